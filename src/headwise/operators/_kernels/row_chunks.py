"""P v and P^T u piece by piece: blocks of rows for arbitrary masks, a rectangle and a triangle for causal ones.

    (P v)_block = P_block v          P^T u = sum over blocks of P_block^T u_block

Blocks of rows cost O(m n d) work; at most limits.SCORE_ENTRIES numbers of P exist at once, in the backward pass too
(blocks are recomputed).  A causal m x n matrix is a rectangle beside a square triangle: every query attends to the
first n - m keys, the first m - n queries attend to nothing, and min(m, n) queries remain against as many keys.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.operators._kernels import limits
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import Mask
from headwise.shapes import filled

Rows = Callable[[int, int], Tensor]
"""(start, stop) -> rows start..stop of P: (*batch, stop - start, n)"""


def apply_rows(rows: Rows, shape: Sequence[int], v: Tensor) -> Tensor:
    """P v: (*batch, n, d) -> (*batch, m, d)"""
    blocks = row_ranges(shape)
    parts = [_recomputed(lambda v, a=a, b=b: rows(a, b) @ v, v, blocks) for a, b in blocks]
    return torch.cat(parts, dim=-2)


def adjoint_rows(rows: Rows, shape: Sequence[int], u: Tensor) -> Tensor:
    """P^T u: (*batch, m, d) -> (*batch, n, d)"""
    blocks = row_ranges(shape)
    parts = (_recomputed(lambda u, a=a, b=b: rows(a, b).mT @ u[..., a:b, :], u, blocks) for a, b in blocks)
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def row_ranges(shape: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of blocks of rows with at most limits.SCORE_ENTRIES entries over the whole batch."""
    *batch, m, n = shape
    step = max(1, min(m, limits.SCORE_ENTRIES // (math.prod(batch) * n)))
    return [(start, min(start + step, m)) for start in range(0, m, step)]


def _recomputed(block: Callable[[Tensor], Tensor], x: Tensor, blocks: list[tuple[int, int]]) -> Tensor:
    # torch.func cannot differentiate through a checkpoint; there the blocks stay alive until the backward pass
    if len(blocks) == 1 or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return block(x)
    return checkpoint(block, x, use_reentrant=False)


Part = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(a, b, v) -> sum_j f(a_i, b_j) v_j over all j, or over j <= i: rows a (*batch, m, k), b (*batch, n, k)."""


def causal_apply(rectangle: Part, triangle: Part, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """sum over j <= i + n - m of f(a_i, b_j) v_j: (*batch, n, d) -> (*batch, m, d)"""
    ahead, empty = _overhang(a, b)
    out = triangle(a[..., empty:, :], b[..., ahead:, :], v[..., ahead:, :])
    if ahead:
        out = out + rectangle(a, b[..., :ahead, :], v[..., :ahead, :])
    return filled(out, (0, 0, empty, 0))


def causal_adjoint(rectangle: Part, triangle: Part, a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """sum over i >= j - n + m of f(b_j, a_i) u_i: (*batch, m, d) -> (*batch, n, d), for symmetric f.

    The transpose of a triangle is the triangle of both sequences reversed.
    """
    ahead, empty = _overhang(a, b)
    backwards = (b[..., ahead:, :].flip(-2), a[..., empty:, :].flip(-2), u[..., empty:, :].flip(-2))
    out = triangle(*backwards).flip(-2)
    return torch.cat([rectangle(b[..., :ahead, :], a, u), out], dim=-2) if ahead else out


def _overhang(a: Tensor, b: Tensor) -> tuple[int, int]:
    m, n = a.shape[-2], b.shape[-2]
    return max(0, n - m), max(0, m - n)


class AveragedOperator(AttentionOperator):
    """P_ij = M_ij f(a_i, b_j) / C_i for a symmetric f with a fast sum_j f(a_i, b_j) v_j, C_i = sum_j M_ij.

    Without a pair_mask, one call of `full` and, if causal, of `triangle`; with one, rows of P in blocks, O(m n d).
    """

    mask: Mask

    @abstractmethod
    def _sides(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a (*batch, m, c) and b (*batch, n, c) in at least single precision."""

    @staticmethod
    @abstractmethod
    def full(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        """sum_j f(a_i, b_j) v_j over all j"""

    @staticmethod
    @abstractmethod
    def triangle(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        """sum over j <= i of f(a_i, b_j) v_j, with as many rows a as b"""

    @staticmethod
    @abstractmethod
    def entries(a: Tensor, b: Tensor) -> Tensor:
        """f(a_i, b_j): (*batch, m, n)"""

    def apply(self, v: Tensor) -> Tensor:
        a, b = self._sides(torch.promote_types(v.dtype, torch.float32))
        x = self.mask.hide(v.to(a.dtype))
        if self.mask.pair_mask is not None:
            out = apply_rows(self._rows(a, b), self.shape, x)
        else:
            out = causal_apply(self.full, self.triangle, a, b, x) if self.mask.causal else self.full(a, b, x)
        return self.mask.average(out).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """The same form, a and b in each other's place."""
        a, b = self._sides(torch.promote_types(u.dtype, torch.float32))
        x = self.mask.average(u.to(a.dtype))
        if self.mask.pair_mask is not None:
            out = adjoint_rows(self._rows(a, b), self.shape, x)
        else:
            out = causal_adjoint(self.full, self.triangle, a, b, x) if self.mask.causal else self.full(b, a, x)
        return self.mask.hide(out).to(u.dtype)

    def _rows(self, a: Tensor, b: Tensor) -> Rows:
        def rows(start: int, stop: int) -> Tensor:
            return self.entries(a[..., start:stop, :], b).masked_fill(~self.mask.rows(start, stop, a.device), 0)

        return rows
