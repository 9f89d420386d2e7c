"""The compiled kernels against torch's calls in double precision: layouts, masks, widths and large scores that
nothing was tuned to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.operators import efficient, fixed, hashed, near_far, projected, softmax, strided, window
from headwise.operators._kernels import native
from headwise.operators.linear.projections import dense
from headwise.testing.contract import normal

pytestmark = pytest.mark.usefixtures("kernels")

Build = Callable[..., Any]
N, WIDTH = 45, 16


def by_features(q: Tensor, k: Tensor, **masks: Any) -> Any:
    a, b, c = (normal(3, q.shape[-1], seed=i).to(q) for i in (1, 2, 3))
    return near_far(q, k, a, b, c[..., 0], block=8, **masks)


def by_hash(q: Tensor, k: Tensor, **masks: Any) -> Any:
    rotations = (4 * normal(2, q.shape[-1], 2, seed=8)).round()  # the same in every precision
    return hashed(q, k, rotations.to(q.dtype), chunk=16, **masks)


def by_slots(q: Tensor, k: Tensor, **masks: Any) -> Any:
    return projected(q, k, dense((normal(40, k.shape[-2], seed=4).abs() / k.shape[-2]).to(k)), **masks)


BUILDS: dict[str, Build] = {
    "softmax": softmax,
    "window": lambda q, k, **masks: window(q, k, 9, leading=min(2, k.shape[-2]), **masks),
    "strided": lambda q, k, **masks: strided(q, k, 7, **masks),
    "fixed": lambda q, k, **masks: fixed(q, k, 6, **masks),
    "near_far": by_features,
    "hashed": by_hash,
    "projected": by_slots,
    "efficient": efficient,
}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def results(build: Build, tensors: list[Tensor], wanted: tuple[int, ...], pull: Tensor, **masks: Any) -> list[Tensor]:
    """P v, and the gradients of the tensors with the numbers `wanted`."""
    q, k, v = leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    out = build(q, k, **masks)(v)
    return [out, *torch.autograd.grad(out, [leaves[i] for i in wanted], pull.to(out.dtype))]


def compare(name: str, q: Tensor, k: Tensor, v: Tensor, wanted: tuple[int, ...] = (0, 1, 2), **masks: Any) -> None:
    batch = torch.broadcast_shapes(q.shape[:-2], v.shape[:-2])
    pull = normal(*batch, q.shape[-2], v.shape[-1], seed=9).to(q.dtype)
    fast = results(BUILDS[name], [q, k, v], wanted, pull, **masks)
    with native.switched("off"):
        slow = results(BUILDS[name], [x.double() for x in (q, k, v)], wanted, pull, **masks)
    for a, b in zip(fast, slow, strict=True):
        assert a.dtype == q.dtype
        size = b.abs().max().item() if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCES[q.dtype] * size)


def inputs(*, width: int = WIDTH, values: int = WIDTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v (2, 4, n, width) as layers have them: transposed views of (2, n, 4, width)."""
    return [normal(2, N, 4, c, seed=i, dtype=dtype).transpose(1, 2) for i, c in enumerate((width, width, values))]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "column after column": lambda x: x.mT.contiguous().mT,
    "one head expanded": lambda x: x[:1, :1].expand(2, 4, -1, -1),
    "every second row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "no batch": lambda x: x[0, 0],
    "five axes": lambda x: x[None, None],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BUILDS)
def test_layouts(name: str, layout: str) -> None:
    compare(name, *map(LAYOUTS[layout], inputs()))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=lambda wanted: "".join("qkv"[i] for i in wanted))
@pytest.mark.parametrize("name", BUILDS)
def test_gradients_of_some_inputs(name: str, wanted: tuple[int, ...]) -> None:
    compare(name, *inputs(), wanted=wanted)


@pytest.mark.parametrize("width, values", [(1, 7), (7, 80), (80, 96), (96, 1), (256, 256), (16, 600)])
@pytest.mark.parametrize("name", BUILDS)
def test_widths(name: str, width: int, values: int) -> None:
    compare(name, *inputs(width=width, values=values), wanted=(2,) if width == 1 else (0, 1, 2))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_scores_of_two_hundred(name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    compare(name, 7 * q.sign(), 7 * k.sign(), v)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_masks_of_any_layout(name: str, dtype: torch.dtype) -> None:
    keep = normal(2, 4, N, seed=5) > -0.2
    keep[1] = False
    q, k, v = inputs(dtype=dtype)
    for mask in (keep, keep[:, :1].expand(2, 4, N), keep.mT.contiguous().mT):
        compare(name, q, k, v, key_mask=mask)


@pytest.mark.parametrize("m, n", [(1, 1), (1, 40), (33, 57)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_grouped_queries_of_another_length(m: int, n: int, dtype: torch.dtype) -> None:
    """The last query stands at the last key; two heads of keys serve four of queries."""
    q, k, v = (normal(2, h, rows, 80, seed=h + rows, dtype=dtype) for h, rows in ((4, m), (2, n), (4, n)))
    keep = (normal(2, n, seed=6) > -0.5) | (torch.arange(n) == 0)  # one key, and dS of a row is zero
    for name in ("softmax", "window"):
        for causal in (False, True):
            compare(name, q, k, v, wanted=(2,) if n == 1 else (0, 1, 2), causal=causal, key_mask=keep)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_second_derivatives(name: str, dtype: torch.dtype) -> None:
    def second(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = leaves = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(BUILDS[name](q, k)(v).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad([x.square().sum() for x in first], leaves)

    tensors = inputs(dtype=dtype)
    fast = second(tensors)
    # torch's fused attention has no second derivative
    with native.switched("off"), sdpa_kernel(SDPBackend.MATH):
        slow = second([x.double() for x in tensors])
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2 * TOLERANCES[dtype] * b.abs().max().item())
