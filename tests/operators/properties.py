"""Helpers for cases, and properties beyond the contract: causality, padding, no n x n tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.operators.base import AttentionOperator
from headwise.testing import Case

Builder = Callable[..., AttentionOperator]


PADDING = torch.tensor([[True] * 7, [False, True, True, True, True, False, False]])[:, None]  # (b, 1, n)
NOTHING = torch.tensor([[True] * 7, [False] * 7])[:, None]  # the second sequence has no key at all


def same(
    name: str,
    build: Callable,
    twin: Callable,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float = 1.0,
    **options: Any,
) -> Case:
    """A case whose twin takes the same arguments as the builder; a key_mask (b, n) has a head axis for the twin."""
    key_mask = options.get("key_mask")
    shared = key_mask is not None and key_mask.dim() == 2

    def slow(**tensors: Any) -> Tensor:
        return twin(**({**tensors, "key_mask": tensors["key_mask"].unsqueeze(1)} if shared else tensors))

    masks = {name: options.pop(name) for name in ("key_mask", "pair_mask", "attn_bias") if name in options}
    return Case(
        name, partial(build, **options), {**(inputs or {}), **masks}, partial(slow, **options), tolerance=tolerance
    )


def boolean(*shape: int, seed: int = 0, density: float = 0.6) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_no_look_ahead(build: Builder, n: int, width: int = 4) -> None:
    """The output at every position i has no gradient in any q, k or v of a later position; build(q, k) is causal."""
    x = draw(3, n, width).requires_grad_()
    out = build(x[0], x[1])(x[2])
    for i in range(n):
        (gradient,) = torch.autograd.grad(out[i].sum() + (out[i] ** 2).sum(), x, retain_graph=True)
        assert gradient[:, i + 1 :].abs().max() == 0 if i + 1 < n else True, f"row {i} depends on a later position"
        assert gradient[2, : i + 1].abs().max() > 0, f"row {i} depends on nothing"


def assert_padding_is_absence(build: Builder, n: int, real: int, width: int = 4, *, tolerance: float = 1e-12) -> None:
    """Real rows of a padded sequence equal those of the short one, whatever the padding holds, gradients too."""
    q, k, v = draw(3, 2, n, width).unbind(0)
    garbage = (torch.arange(n) >= real).unsqueeze(-1) * 1e3
    key_mask = (torch.arange(n) < real).expand(2, n)
    long = [(x + garbage).requires_grad_() for x in (q, k, v)]
    short = [x[:, :real].clone().requires_grad_() for x in (q, k, v)]
    a = build(long[0], long[1], key_mask=key_mask)(long[2])[:, :real]
    b = build(short[0], short[1])(short[2])
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    pull = draw(*b.shape, seed=1)
    for x, y in zip(torch.autograd.grad(a, long, pull), torch.autograd.grad(b, short, pull), strict=True):
        torch.testing.assert_close(x[:, :real], y, rtol=0, atol=tolerance)
        assert x[:, real:].abs().max() == 0


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made while active."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x._base is None:  # a view takes no memory
                self.elements = max(self.elements, x.numel())
        return out


def assert_no_square(build: Builder, n: int = 2048, width: int = 4, *, limit: float = 0.2) -> None:
    """Forward and backward form nothing near n x n."""
    q, k, v = (x.float().requires_grad_() for x in draw(3, 1, 1, n, width).unbind(0))
    with Largest() as largest:
        build(q, k)(v).sum().backward()
    assert largest.elements < limit * n * n, f"{largest.elements} elements at n = {n}"
