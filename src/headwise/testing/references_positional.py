"""The slow float64 twins of attention by position: every weight of every pair of cells, and convolution tap by tap.

Nothing here imports from headwise.  Loops run over cells; keep the grids small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def cells(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """All cells of a grid in row-major order."""
    return list(itertools.product(*(range(side) for side in sides)))


def attention(
    queries: Sequence[int],
    grid: Sequence[int],
    score: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
    keep: Tensor | None = None,
) -> Tensor:
    """P_qk = exp s(q, k) / sum over the kept k', row by row; a row without a kept key is zero."""
    rows = []
    for q in cells(queries):
        s = torch.stack(torch.broadcast_tensors(*(score(q, k).double() for k in cells(grid))), dim=-1)
        seen = torch.ones_like(s, dtype=torch.bool) if keep is None else keep
        s, seen = torch.broadcast_tensors(s, seen)
        top = s.detach().masked_fill(~seen, -1e300).amax(-1, keepdim=True)
        # what is not seen is set before the exponential, so that no gradient meets an infinity
        e = torch.where(seen, (torch.where(seen, s, top) - top).exp(), 0.0)
        total = e.sum(-1, keepdim=True)
        rows.append(e / torch.where(total > 0, total, 1.0))
    return torch.stack(rows, dim=-2)


def quadratic(
    grid: Sequence[int],
    centres: Tensor,
    log_widths: Tensor,
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """exp(-sum_a (k_a - stride_a q_a - origin_a - centre_a)^2 / (2 width_a^2)), normalised over all cells at once."""
    stride = stride or [1] * len(grid)
    origin = origin or [0] * len(grid)
    centres, widths = torch.broadcast_tensors(centres.double(), log_widths.double().exp())

    def score(q: tuple[int, ...], k: tuple[int, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a in range(len(grid)):
            away = k[a] - stride[a] * q[a] - origin[a] - centres[..., a]
            total = total - away**2 / (2 * widths[..., a] ** 2)
        return total

    return attention(queries or grid, grid, score, keep)


def tables(grid: Sequence[int], values: Sequence[Tensor], keep: Tensor | None = None) -> Tensor:
    """exp(sum_a table_a[k_a - q_a + g_a - 1]), normalised; queries and keys on one grid."""

    def score(q: tuple[int, ...], k: tuple[int, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a, g in enumerate(grid):
            total = total + values[a].double()[..., k[a] - q[a] + g - 1]
        return total

    return attention(grid, grid, score, keep)


def border_cell(at: int, side: int, border: str) -> int | None:
    """The real cell that stands for position `at` of an axis, None where a convolution reads zero."""
    if 0 <= at < side:
        return at
    if border == "zeros":
        return None
    if border == "replicate":
        return 0 if at < 0 else side - 1
    if border == "circular":
        return at % side
    while not 0 <= at < side:  # reflect, as often as it takes
        at = -at if at < 0 else 2 * (side - 1) - at
    return at


def bordered(
    grid: Sequence[int],
    padding: Sequence[tuple[int, int]],
    border: str,
    centres: Tensor,
    log_widths: Tensor,
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
) -> Tensor:
    """The quadratic head over the padded grid, each virtual cell's weight then given to the cell it stands for."""
    wide = [g + before + after for g, (before, after) in zip(grid, padding, strict=True)]
    p = quadratic(
        wide, centres, log_widths, queries=queries or grid, stride=stride, origin=[before for before, _ in padding]
    )
    home = {cell: i for i, cell in enumerate(cells(grid))}
    out = [torch.zeros_like(p[..., 0]) for _ in home]
    for column, cell in enumerate(cells(wide)):
        real = [border_cell(c - before, g, border) for c, g, (before, _) in zip(cell, grid, padding, strict=True)]
        if None not in real:
            i = home[tuple(r for r in real if r is not None)]
            out[i] = out[i] + p[..., column]
    return torch.stack(out, dim=-1)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
    border: str,
    groups: int = 1,
) -> Tensor:
    """y[b, o, p] = bias[o] + sum over taps t and inputs i of w[o, i, t] x[b, i, stride p + dilation t - padding]."""
    batch, _, *grid = x.shape
    out_channels, per_group, *kernel = weight.shape
    sizes = [
        (g + lo + hi - d * (k - 1) - 1) // s + 1
        for g, (lo, hi), d, k, s in zip(grid, padding, dilation, kernel, stride, strict=True)
    ]
    y = torch.zeros(batch, out_channels, *sizes, dtype=torch.float64)
    for o in range(out_channels):
        first = (o // (out_channels // groups)) * per_group
        for p in cells(sizes):
            total = torch.zeros(batch, dtype=torch.float64) if bias is None else bias[o].double().expand(batch)
            for t in cells(kernel):
                at = [
                    border_cell(s * q + d * j - lo, g, border)
                    for s, q, d, j, (lo, _), g in zip(stride, p, dilation, t, padding, grid, strict=True)
                ]
                if None not in at:
                    seen = x[(slice(None), slice(first, first + per_group), *at)].double()
                    total = total + seen @ weight[(o, slice(None), *t)].double()
            y[(slice(None), o, *p)] = total
    return y
