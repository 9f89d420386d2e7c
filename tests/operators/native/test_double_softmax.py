"""Both forms of the double softmax by the compiled kernels: the contract again, values and gradients against the twins
in float64, lengths around blocks, masks, threads, bfloat16, keys that rise far, second derivatives, opcheck."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise.operators import efficient, factored
from headwise.operators._kernels import native
from headwise.operators._kernels.double_softmax import CompiledDoubleSoftmax, key_states
from headwise.operators._kernels.prefix_sums import CompiledPrefixSoftmax
from headwise.operators.linear.efficient import Efficient, EfficientCausal
from headwise.operators.linear.factored import Factored
from headwise.operators.linear.projections import pooling
from headwise.testing import Case, references
from headwise.testing.contract import normal
from tests.operators.cases import CASES

pytestmark = pytest.mark.usefixtures("kernels")

CONTRACT = [case for case in CASES if isinstance(case.operator(), (Efficient, EfficientCausal, Factored))]
OPERATIONS = {"plain": "double_softmax", "causal": "prefix_softmax"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has one entry for each call of a kernel's forward pass."""
    made: list[int] = []
    for kernel in (CompiledDoubleSoftmax, CompiledPrefixSoftmax):
        forward = kernel.forward
        monkeypatch.setattr(kernel, "forward", lambda self, *x, run=forward: made.append(1) or run(self, *x))
    return made


@pytest.mark.parametrize("check", ["half", "masked", "vmap", "strides"])
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.name)
def test_contract(case: Case, check: str, calls: list[int]) -> None:
    case.check(check)
    assert calls or check != "half", "the kernel did not run"


def agree(fast: tuple[Tensor, ...], slow: tuple[Tensor, ...], tolerance: float) -> None:
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.name)
def test_values_and_gradients_of_every_case(case: Case, calls: list[int]) -> None:
    """The contract's own checks are in float64, which the kernels leave to torch."""
    tensors = case.tensors(torch.float32)
    leaves = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    op = case.build(**tensors)
    v = normal(*op.shape[:-2], op.shape[-1], 5, seed=1, dtype=torch.float32).requires_grad_()
    out, expected = op(v), case.matrix(tensors) @ v.double()
    assert calls
    pull = normal(*out.shape, seed=2)
    agree((out,), (expected,), 3e-6)
    slow = torch.autograd.grad(expected, [*leaves, v], pull)
    agree(torch.autograd.grad(out, [*leaves, v], pull.float()), slow, 2e-5)


def compare(m: int, n: int, *, causal: bool, masked: bool, widths: tuple[int, int] = (20, 24), batch: int = 2) -> None:
    """Values and gradients against the twin: q, k, v as a layer computes them, views of (b, n, h d)."""
    k_width, d = widths
    q = normal(batch, m, 3, k_width, seed=0, dtype=torch.float32).transpose(1, 2).requires_grad_()
    k = normal(batch, n, 3, k_width, seed=1, dtype=torch.float32).transpose(1, 2).requires_grad_()
    v = normal(batch, n, 3, d, seed=2, dtype=torch.float32).transpose(1, 2).requires_grad_()
    key_mask = normal(batch, n, seed=3) > -0.7 if masked else None
    shared = None if key_mask is None else key_mask[:, None]
    out = efficient(q, k, causal=causal, key_mask=key_mask, scale=0.8)(v)
    expected = references.efficient(q.double(), k.double(), causal=causal, key_mask=shared, scale=0.8) @ v.double()
    pull = normal(*out.shape, seed=4)
    assert out.dtype == torch.float32
    agree((out,), (expected,), 3e-6)
    slow = torch.autograd.grad(expected, (q, k, v), pull)
    agree(torch.autograd.grad(out, (q, k, v), pull.float()), slow, 3e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("m, n", [(1, 1), (31, 31), (32, 32), (33, 33), (100, 100), (5, 70), (1, 97), (80, 70)])
def test_lengths_around_blocks(m: int, n: int, causal: bool) -> None:
    compare(m, n, causal=causal, masked=False)
    compare(m, n, causal=causal, masked=True)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("widths", [(1, 1), (16, 64), (64, 16), (65, 3), (130, 129)])
def test_widths(widths: tuple[int, int], causal: bool) -> None:
    compare(40, 40, causal=causal, masked=True, widths=widths)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    """A batch of one is cut into parts of the sequence, whose sums are merged."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for causal in (False, True):
            compare(430, 420, causal=causal, masked=True, batch=1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
def test_bfloat16_is_computed_in_single_precision(causal: bool) -> None:
    q, k, v = (normal(1, 2, 300, 32, seed=i, dtype=torch.bfloat16).requires_grad_() for i in range(3))
    out = efficient(q, k, causal=causal)(v)
    expected = references.efficient(q.double(), k.double(), causal=causal) @ v.double()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=2**-10, rtol=2**-8)  # one rounding of the result
    pull = normal(*out.shape, seed=4, dtype=torch.bfloat16)
    fast, slow = (torch.autograd.grad(x, (q, k, v), pull.to(x.dtype)) for x in (out, expected))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2**-9, rtol=2**-6)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
def test_masked_keys_are_not_read(causal: bool) -> None:
    q, k, v = (normal(1, 2, 90, 8, seed=i, dtype=torch.float32) for i in range(3))
    key_mask = (torch.arange(90) >= 35).expand(1, 2, 90)
    k, v = (torch.where(key_mask.unsqueeze(-1), x, torch.nan) for x in (k, v))
    operation = getattr(torch.ops.headwise, OPERATIONS["causal" if causal else "plain"])
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = operation(q, k, v, key_mask, 0.5)[0]
    assert out.isfinite().all()
    assert not causal or (out[..., :35, :] == 0).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
def test_without_any_key_rows_are_zero(causal: bool) -> None:
    q = normal(1, 4, 3, seed=0, dtype=torch.float32).requires_grad_()
    out = efficient(q, q, causal=causal, key_mask=torch.zeros(1, 4, dtype=torch.bool))(q)
    assert (out == 0).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()


def test_keys_that_rise_far_are_kept_apart() -> None:
    """As in torch's path: rows do not underflow because of later keys that are e^400 times heavier."""
    q, k, v = (normal(300, 4, seed=i) for i in range(3))
    k = k + torch.linspace(0, 400, 300).unsqueeze(-1)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    fast = efficient(leaves[0], leaves[1], scale=1.0, causal=True)(leaves[2])
    slow = references.efficient(doubles[0], doubles[1], scale=1.0, causal=True) @ doubles[2]
    agree((fast,), (slow,), 1e-5)
    agree(torch.autograd.grad(fast.sum(), leaves), torch.autograd.grad(slow.sum(), doubles), 1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
def test_long_sums_keep_their_digits(causal: bool) -> None:
    """Of 20 000 equal keys: sums of float32, one after the other, would be off by 1e-5."""
    k, v = torch.zeros(20_000, 4), 1 + normal(20_000, 3, seed=1, dtype=torch.float32).abs()
    out = efficient(k, k, causal=causal)(v)[-1]
    torch.testing.assert_close(out.double(), v.double().mean(0), rtol=1e-6, atol=0)


BUILDERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "efficient": efficient,
    "efficient, masked": lambda q, k: efficient(q, k, key_mask=torch.arange(13) % 5 > 0),
    "efficient, causal": lambda q, k: efficient(q, k, causal=True, key_mask=torch.arange(13) % 5 > 0),
    "factored": lambda q, k: factored(q, k, pooling(13, 3)),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_second_derivatives(build: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]], calls: list[int]) -> None:
    q, k, v = (normal(2, 13, 4, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(build(q, k)(v).square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))

    actual = second()
    assert calls
    with native.switched("off"):
        agree(actual, second(), 1e-5)


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    q, k, v = (normal(2, 3, n, d, seed=d, dtype=torch.float32).requires_grad_() for n, d in ((9, 6), (40, 6), (40, 5)))
    return q, k, v, torch.rand(2, 1, 40).expand(2, 3, 40) > 0.3, 0.5


@pytest.mark.parametrize("name", OPERATIONS.values())
def test_opcheck(name: str) -> None:
    operation, backward = (getattr(torch.ops.headwise, x) for x in (name, f"{name}_backward"))
    q, k, v, mask, scale = arguments()
    torch.library.opcheck(operation, (q, k, v, mask, scale))
    out, *kept = (x.detach() for x in operation(q, k, v, None, scale))
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(backward, (torch.ones_like(out), q, k, v, mask, *kept, scale))


@pytest.mark.parametrize("name", OPERATIONS.values())
def test_compiled_in_one_graph(name: str) -> None:
    operation = getattr(torch.ops.headwise, name)
    q, k, v, mask, scale = arguments()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return operation(q * 2, k, v, mask, scale)[0] + 1

    results = [x(q, k, v) for x in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))]
    assert torch.equal(*results)
    agree(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in results), 1e-6)


@pytest.mark.parametrize("name", OPERATIONS.values())
def test_refusals(name: str) -> None:
    operation = getattr(torch.ops.headwise, name)
    q, k, v, mask, scale = arguments()
    with pytest.raises(RuntimeError, match=f"{name}: q .* do not fit together"):
        operation(q, k[:, :2], v, None, scale)
    with pytest.raises(RuntimeError, match=f"{name}: q, k and v must be float32 or bfloat16"):
        operation(q.double(), k.double(), v.double(), None, scale)
    with pytest.raises(RuntimeError, match=f"{name}: key_mask must be boolean"):
        operation(q, k, v, mask[..., :3], scale)


@pytest.mark.parametrize("of", ["the log-sum-exp", "the means", "both"])
@pytest.mark.parametrize("hidden", [False, True], ids=["all keys", "some masked"])
def test_key_states(kernels: None, of: str, hidden: bool) -> None:
    """Values and gradients of [lse, C] are those of torch's calls in double precision."""
    k, v = torch.randn(2, 3, 100, 20), torch.randn(2, 3, 100, 18)
    mask = torch.rand(2, 1, 100).expand(2, 3, 100) < 0.6 if hidden else None
    pull = torch.randn(2, 3, 20, 19)
    pull[..., 0 if of == "the means" else slice(1, None) if of == "the log-sum-exp" else slice(0)] = 0
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (k, v)]
        out = key_states(*leaves, mask, 0.3)
        found.append([out, *torch.autograd.grad(out, leaves, pull.to(dtype))])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)
