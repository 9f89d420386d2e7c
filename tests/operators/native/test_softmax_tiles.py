"""Exact attention by the compiled tiles: the contract again, where they are used and where not, large scores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.operators import projected, softmax
from headwise.operators._kernels import limits, native
from headwise.operators._kernels.key_patterns import PatternAttention
from headwise.operators.linear.projections import pooling
from headwise.operators.softmax import Softmax
from headwise.testing import Case, references
from headwise.testing.contract import normal
from tests.operators.cases import CASES

pytestmark = pytest.mark.usefixtures("kernels")

CONTRACT = [case for case in CASES if isinstance(case.operator(), Softmax)]
CHECKS = ("values", "gradients", "adjoint", "broadcast", "strides", "half", "masked", "vmap", "claims", "repeatable")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has one entry for each call of the tiles' forward pass."""
    made: list[int] = []
    forward = PatternAttention.forward
    monkeypatch.setattr(PatternAttention, "forward", lambda self, *x: made.append(1) or forward(self, *x))
    return made


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.name)
def test_contract(case: Case, check: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles for any number of queries and keys: the contract's sequences are short."""
    monkeypatch.setattr(limits, "TILES_FROM", 1)
    if check in case.skip:
        pytest.skip(case.skip[check])
    case.check(check)
    if check == "values":
        mask = case.operator().scores.mask  # pyright: ignore[reportAttributeAccessIssue]
        assert bool(calls) == (mask.pair_mask is None and mask.attn_bias is None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("m, n", [(32, 32), (33, 70), (70, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_long_enough_sequences(m: int, n: int, causal: bool, dtype: torch.dtype, calls: list[int]) -> None:
    """Values and gradients against the twin, values of another width, two query heads to a key head, padding."""
    q = normal(2, 4, m, 5, seed=0, dtype=dtype).requires_grad_()
    k, v = (normal(2, 2, n, width, seed=width, dtype=dtype).requires_grad_() for width in (5, 7))
    key_mask = torch.arange(n) < torch.tensor([[n], [n - 9]])
    values = v.repeat_interleave(2, dim=1)
    out = softmax(q, k, causal=causal, key_mask=key_mask)(values)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, twins = (x.repeat_interleave(2, dim=1) for x in doubles[1:])
    expected = references.softmax(doubles[0], keys, causal=causal, key_mask=key_mask[:, None]) @ twins
    assert calls
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-11, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    pull = normal(*out.shape, seed=4)
    fast, slow = torch.autograd.grad(out, (q, k, v), pull.to(dtype)), torch.autograd.grad(expected, doubles, pull)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b, atol=8 * tolerance, rtol=8 * tolerance)


def test_short_sequences_are_left_to_torch(calls: list[int]) -> None:
    q = normal(1, 2, limits.TILES_FROM, 4, seed=0, dtype=torch.float32)
    softmax(q[..., :-1, :], q)(q)
    softmax(q, q[..., :-1, :])(q[..., :-1, :])
    assert not calls
    softmax(q, q)(q)
    assert calls


def test_slots_of_projected_are_attended_to_by_tiles(calls: list[int]) -> None:
    q = normal(1, 2, 64, 4, seed=0, dtype=torch.float32)
    projected(q, q, pooling(64, 2))(q)
    assert calls


def test_a_mode_that_watches_calls_sees_torch(calls: list[int]) -> None:
    """`examine` finds attention by the call of torch's function."""
    watched = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            watched.append(function)
            return function(*args, **(kwargs or {}))

    q = normal(1, 2, 40, 4, seed=0, dtype=torch.float32)
    with Watch():
        softmax(q, q)(q)
    assert F.scaled_dot_product_attention in watched
    assert not calls


@pytest.mark.parametrize("size", [1e3, 1e15])
def test_large_scores(size: float, calls: list[int]) -> None:
    """Rows become one-hot; nothing overflows, forward and backward."""
    q, k, v = (normal(2, 50, 8, seed=i, dtype=torch.float32) for i in range(3))
    leaves = [(q * size).requires_grad_(), (k * size).requires_grad_(), v.requires_grad_()]
    out = softmax(leaves[0], leaves[1])(v)
    assert calls
    with native.switched("off"):
        torch.testing.assert_close(out, softmax(leaves[0], leaves[1])(v), atol=1e-3, rtol=1e-3)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


def test_second_derivatives() -> None:
    """Torch's fused kernel has none; the reference is a softmax of all scores."""
    q, k, v = (normal(1, 40, 3, seed=i).requires_grad_() for i in range(3))
    key_mask = torch.arange(40) < 37

    def second(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))

    expected = references.softmax(q, k, causal=True, key_mask=key_mask) @ v
    torch.testing.assert_close(second(softmax(q, k, causal=True, key_mask=key_mask)(v)), second(expected))
