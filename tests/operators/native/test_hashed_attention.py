"""Hashed attention by the compiled kernels: the contract again, values and gradients against the twin in float64,
orders against torch's sort, chunks around tiles, masks, threads, bfloat16, second derivatives, opcheck, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.operators import hashed
from headwise.operators._kernels import native
from headwise.operators._kernels.hashed_attention import HashedAttention, hash_order
from headwise.operators.sparse.hashed import Hashed, random_rotations
from headwise.testing import Case, references
from headwise.testing.contract import normal
from tests.operators.cases import CASES

pytestmark = pytest.mark.usefixtures("kernels")

CONTRACT = [case for case in CASES if isinstance(case.operator(), Hashed)]
CHECKS = ("values", "gradients", "adjoint", "broadcast", "strides", "half", "masked", "vmap")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has one entry for each call of the kernel's forward pass."""
    made: list[int] = []
    forward = HashedAttention.forward
    monkeypatch.setattr(HashedAttention, "forward", lambda self, *x: made.append(1) or forward(self, *x))
    return made


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.name)
def test_contract(case: Case, check: str, calls: list[int]) -> None:
    case.check(check)
    if check in ("values", "gradients", "strides", "half"):
        assert calls, "the kernel did not run"


def agree(fast: tuple[Tensor, ...], slow: tuple[Tensor, ...], tolerance: float) -> None:
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def rotations(width: int, rounds: int = 3) -> Tensor:
    return random_rotations(width, 8, rounds, generator=torch.Generator().manual_seed(1))


def compare(
    n: int,
    chunk: int,
    *,
    causal: bool = False,
    masked: bool = False,
    shared: bool = False,
    widths: tuple[int, int] = (20, 24),
    batch: tuple[int, int] = (2, 3),
) -> None:
    """Values and gradients against the twin: q, k, v as a layer computes them, views of (b, n, h d)."""
    (b, h), (k_width, d) = batch, widths
    q, k, v = (
        normal(b, n, h, width, seed=i, dtype=torch.float32).transpose(1, 2).requires_grad_()
        for i, width in enumerate((k_width, k_width, d))
    )
    key_mask = normal(b, n, seed=3) > -0.5 if masked else None
    turn, keys = rotations(k_width), None if shared else k
    out = hashed(q, keys, turn, chunk=chunk, causal=causal, key_mask=key_mask)(v)
    slow_mask = None if key_mask is None else key_mask[:, None]
    p = references.hashed(q, keys, turn, chunk=chunk, causal=causal, key_mask=slow_mask)
    expected, leaves = p @ v.double(), (q, v) if shared else (q, k, v)
    pull = normal(*out.shape, seed=4)
    assert out.dtype == torch.float32
    agree((out,), (expected,), 5e-6)
    slow = torch.autograd.grad(expected, leaves, pull)
    agree(torch.autograd.grad(out, leaves, pull.float()), slow, 5e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["two", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("n, chunk", [(1, 64), (40, 7), (70, 33), (65, 16)])
def test_chunks_around_tiles(n: int, chunk: int, causal: bool, shared: bool) -> None:
    compare(n, chunk, causal=causal, shared=shared, batch=(1, 2))
    compare(n, chunk, causal=causal, shared=shared, masked=True, batch=(2, 1))


@pytest.mark.parametrize("widths", [(1, 1), (16, 64), (65, 3)])
def test_widths(widths: tuple[int, int]) -> None:
    compare(40, 16, masked=True, widths=widths, batch=(1, 1))


@pytest.mark.parametrize("batch", [(1, 1), (1, 2), (2, 3)])
def test_any_number_of_threads(batch: tuple[int, int]) -> None:
    """With fewer heads than threads a head is cut into parts, whose gradients are added."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        compare(50, 8, causal=True, batch=batch)
        compare(50, 8, masked=True, batch=batch)
    finally:
        torch.set_num_threads(before)


def test_long_lists_of_keys_are_taken_in_pieces() -> None:
    """Two chunks of 200 are more keys than a tile works on at once; values and gradients of one chunk are exact."""
    q, k, v = (normal(1, 1, 400, 4, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    results = []
    for mode in ("build", "off"):
        with native.switched(mode):
            out = hashed(q, k, rotations(4), chunk=200)(v)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    agree(*results, 2e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["two", "shared"])
def test_bfloat16_is_computed_in_single_precision(shared: bool) -> None:
    q, k, v = (normal(1, 2, 60, 32, seed=i, dtype=torch.bfloat16).requires_grad_() for i in range(3))
    turn, keys, leaves = rotations(32), None if shared else k, (q, v) if shared else (q, k, v)
    out = hashed(q, keys, turn.bfloat16(), chunk=16)(v)
    assert out.dtype == torch.bfloat16
    expected = references.hashed(q, keys, turn.bfloat16().float(), chunk=16) @ v.double()
    torch.testing.assert_close(out.double(), expected, atol=2**-10, rtol=2**-8)  # one rounding of the result
    pull = normal(*out.shape, seed=4, dtype=torch.bfloat16)
    fast, slow = (torch.autograd.grad(x, leaves, pull.to(x.dtype)) for x in (out, expected))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2**-8, rtol=2**-6)


def test_scores_far_below_zero() -> None:
    """Lanes of a tile without a query have no part in the gradients, however small all scores of the others are."""
    q, k, v = (normal(1, 1, 40, 4, seed=i, dtype=torch.float32) for i in range(3))
    q, k, v = (x.requires_grad_() for x in (q.abs() + 10, -k.abs() - 20, v))
    out = hashed(q, k, rotations(4), chunk=7)(v)
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert x.isfinite().all()


def test_second_derivatives(calls: list[int]) -> None:
    q, k, v = (normal(2, 13, 4, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    key_mask = torch.arange(13) % 5 > 0

    def second() -> tuple[Tensor, ...]:
        out = hashed(q, k, rotations(4), chunk=3, key_mask=key_mask)(v)
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))

    actual = second()
    assert calls
    with native.switched("off"):
        agree(actual, second(), 1e-5)


# ---- orders ----


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("hashes", [1, 2])
@pytest.mark.parametrize("half", [1, 8, 21])
def test_orders_are_those_of_a_sort(half: int, hashes: int, masked: bool) -> None:
    turned = normal(2, 3, 50, hashes, 4, half, seed=half, dtype=torch.float32)
    turned[0, 0, 10:20] = (turned[0, 0, 10:20] * 2).round()  # ties within a hash
    turned[0, 1, 20:30] = turned[0, 1, 20]  # and of hashes
    turned[1, 0, 5] = 0
    key_mask = normal(2, 3, 50, seed=1) > -0.5 if masked else None
    fast = hash_order(turned, key_mask)
    with native.switched("off"):
        assert torch.equal(fast, hash_order(turned, key_mask))
    assert torch.equal(fast.sort(-1).values, torch.arange(50).expand(2, 3, 4, 50))


# ---- operations ----


def arguments() -> tuple:
    q, k, v = (normal(2, 3, 40, d, seed=d, dtype=torch.float32).requires_grad_() for d in (6, 6, 5))
    orders = [normal(2, 3, 2, 40, seed=i).argsort(-1) for i in (7, 8)]
    return q, k, v, torch.rand(2, 1, 40).expand(2, 3, 40) > 0.3, *orders, 8, 0.5, True, None


def test_opcheck() -> None:
    q, k, v, mask, order_q, order_k, *numbers = arguments()
    operation = torch.ops.headwise.hashed_attention
    torch.library.opcheck(operation, (q, k, v, mask, order_q, order_k, *numbers))
    torch.library.opcheck(operation, (q, k, v, None, order_q, order_k, *numbers[:-1], -1e5))
    results = [x.detach() for x in operation(q, k, v, mask, order_q, order_k, *numbers)]
    q, k, v = (x.detach() for x in (q, k, v))
    backward = torch.ops.headwise.hashed_attention_backward
    torch.library.opcheck(backward, (torch.ones_like(results[0]), q, k, v, mask, order_q, order_k, *results, *numbers))
    torch.library.opcheck(torch.ops.headwise.hash_order, (torch.randn(2, 3, 10, 1, 2, 4), mask[..., :10]))


def test_compiled_in_one_graph() -> None:
    q, k, v, *others = arguments()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.headwise.hashed_attention(q * 2, k, v, *others)[0] + 1

    results = [x(q, k, v) for x in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))]
    assert torch.equal(*results)
    agree(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in results), 1e-6)


def test_masked_keys_are_not_read() -> None:
    q, k, v, _, order_q, order_k, *numbers = arguments()
    key_mask = (torch.arange(40) >= 15).expand(2, 3, 40)
    k, v = (torch.where(key_mask.unsqueeze(-1), x, torch.nan).detach().requires_grad_() for x in (k, v))
    out = torch.ops.headwise.hashed_attention(q, k, v, key_mask, order_q, order_k, *numbers)[0]
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert x.isfinite().all()


def test_refusals() -> None:
    q, k, v, mask, order_q, order_k, *numbers = arguments()
    operation = torch.ops.headwise.hashed_attention
    with pytest.raises(RuntimeError, match=r"hashed_attention: q .* do not fit together"):
        operation(q, k[:, :, :, :2], v, mask, order_q, order_k, *numbers)
    with pytest.raises(RuntimeError, match="3 heads need keys of their own, but there are 1"):
        operation(q, k[:, :1], v[:, :1], mask, order_q, order_k, *numbers)
    with pytest.raises(RuntimeError, match="40 queries and 39 keys are not one sequence"):
        operation(q, k[:, :, 1:], v[:, :, 1:], None, order_q, order_k, *numbers)
    with pytest.raises(RuntimeError, match=r"orders must be int64 \(b, h, rounds, n\)"):
        operation(q, k, v, mask, order_q[..., :3], order_k, *numbers)
    with pytest.raises(RuntimeError, match="round 1 is not an order of 40 positions"):
        operation(q, k, v, mask, order_q.where(torch.arange(2)[:, None] == 0, 3), order_k, *numbers)
    with pytest.raises(RuntimeError, match="round 0 is not an order of 40 positions"):
        operation(q, k, v, mask, order_q, order_k + 1, *numbers)
    with pytest.raises(RuntimeError, match="chunk must be positive, but is 0"):
        operation(q, k, v, mask, order_q, order_k, 0, *numbers[1:])
    with pytest.raises(RuntimeError, match="hash_order: turned must be float32"):
        torch.ops.headwise.hash_order(torch.zeros(2, 3, 4, 1, 2, 5).double(), None)
