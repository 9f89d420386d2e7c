"""A causal m x n matrix, aligned to the bottom right, is a rectangle beside a square triangle.

Row i sees columns j <= i + n - m: the first n - m keys are seen by every query (a rectangle without a mask), the first
m - n queries see nothing, and min(m, n) queries remain against as many keys, each seeing its own and those before.
An operator that can do the rectangle and the triangle can do any causal shape, and its transpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.shapes import filled

Part = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(a, b, v) -> sum_j f(a_i, b_j) v_j over all j, or over j <= i: rows a (*batch, m, k), b (*batch, n, k)."""


def causal_apply(rectangle: Part, triangle: Part, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """sum over j <= i + n - m of f(a_i, b_j) v_j: (*batch, n, d) -> (*batch, m, d)"""
    ahead, silent = _overhang(a, b)
    out = triangle(a[..., silent:, :], b[..., ahead:, :], v[..., ahead:, :])
    if ahead:
        out = out + rectangle(a, b[..., :ahead, :], v[..., :ahead, :])
    return filled(out, (0, 0, silent, 0))


def causal_adjoint(rectangle: Part, triangle: Part, a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """sum over i >= j - n + m of f(b_j, a_i) u_i: (*batch, m, d) -> (*batch, n, d), for f of which the order of the
    arguments does not matter.  The transpose of a triangle is the triangle of both sequences reversed."""
    ahead, silent = _overhang(a, b)
    backwards = (b[..., ahead:, :].flip(-2), a[..., silent:, :].flip(-2), u[..., silent:, :].flip(-2))
    out = triangle(*backwards).flip(-2)
    return torch.cat([rectangle(b[..., :ahead, :], a, u), out], dim=-2) if ahead else out


def _overhang(a: Tensor, b: Tensor) -> tuple[int, int]:
    m, n = a.shape[-2], b.shape[-2]
    return max(0, n - m), max(0, m - n)
