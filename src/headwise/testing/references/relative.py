"""Twins of attention by position: every weight of every pair of positions or cells, and convolution tap by tap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.testing.references.exact import matrix, normalised, visible

BORDERS = ("zeros", "replicate", "reflect", "circular")


def cells(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """All cells of a grid in row-major order."""
    return list(itertools.product(*(range(side) for side in sides)))


def shift(
    grid: Sequence[int],
    offset: Sequence[int],
    *,
    border: str = "circular",
    stride: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Tensor:
    """P_ij = 1 if query i attends to key j: (P v)_p = v_(stride p + offset) for the cells p of a grid.

    Where that leaves the grid: "zeros" reads nothing, "replicate" the nearest cell, "reflect" the mirror image about
    the outermost cell, "circular" the cell on the other side.  Cells are numbered in row-major order.
    """
    keys, places = cells(grid), cells(queries or grid)
    p = torch.zeros(len(places), len(keys), dtype=torch.float64)
    for i, cell in enumerate(places):
        steps = stride or (1,) * len(cell)
        axes = zip(cell, steps, offset, grid, strict=True)
        target = tuple(border_cell(x * step + dx, g, border) for x, step, dx, g in axes)
        if target in keys:
            p[i, keys.index(target)] = 1.0  # type: ignore[arg-type]
    return p


def offset(m: int, n: int, by: int, *, key_mask: Tensor | None = None) -> Tensor:
    """P_ij = 1 for j = i + n - m + by, clamped to the visible keys, which are consecutive; zero without keys."""
    masks = torch.ones(1, n, dtype=torch.bool) if key_mask is None else key_mask.reshape(-1, n)
    p = torch.zeros(len(masks), m, n, dtype=torch.float64)
    for b, mask in enumerate(masks):
        keys = [j for j in range(n) if mask[j]]
        for i in range(m if keys else 0):
            p[b, i, min(max(i + n - m + by, keys[0]), keys[-1])] = 1.0
    return p[0] if key_mask is None else p.reshape(*key_mask.shape[:-1], m, n)


def toeplitz(weights: Tensor, m: int, n: int) -> Tensor:
    """P_ij = w_(j - i + m - 1): weights (*batch, m + n - 1), from the bottom left corner to the top right."""
    weights = weights.double()
    return matrix(m, n, lambda i, j: weights[..., j - i + m - 1])


def toeplitz_softmax(logits: Tensor, m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """P_ij = softmax over the visible j of l_(j - i + m - 1); a logit of -inf is a mask."""
    table = toeplitz(logits, m, n)
    allowed = visible(m, n, causal=causal, key_mask=key_mask) & (table > -math.inf)
    return normalised(table.masked_fill(table == -math.inf, 0.0), allowed)


def positional(
    queries: Sequence[int],
    grid: Sequence[int],
    score: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
    key_mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """P_qk = exp s(q, k) / sum over the visible k' of a grid; a row without a visible key is zero.

    Causal: k comes before q, or is q, in the order of the cells; both grids are one.
    """
    rows = [torch.broadcast_tensors(*(score(q, k).double() for k in cells(grid))) for q in cells(queries)]
    s = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
    seen = torch.ones(s.shape[-1], dtype=torch.bool) if key_mask is None else key_mask
    order = torch.tensor([[not causal or k <= q for k in cells(grid)] for q in cells(queries)])
    return normalised(s, seen.unsqueeze(-2) & order)


def quadratic(
    grid: Sequence[int],
    centres: Tensor,
    log_widths: Tensor,
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
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

    return positional(queries or grid, grid, score, key_mask, causal)


def tables(
    grid: Sequence[int], values: Sequence[Tensor], key_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """exp(sum_a table_a[k_a - q_a + g_a - 1]), normalised; queries and keys on one grid."""

    def score(q: tuple[int, ...], k: tuple[int, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a, g in enumerate(grid):
            total = total + values[a].double()[..., k[a] - q[a] + g - 1]
        return total

    return positional(grid, grid, score, key_mask, causal)


def four_terms(
    a: Tensor,
    c: Tensor,
    u: Tensor,
    r: Callable[[tuple[int, ...]], Tensor],
    s: Callable[[tuple[int, ...]], Tensor],
    queries: Sequence[int],
    grid: Sequence[int],
    *,
    stride: Sequence[int] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax of (a_q . c_k + a_q . r_d + u . c_k) / sqrt(k) + s_d with d = k - stride q, pair by pair.

    a (b, h, m, k) and c (b, h, n, k) are the projected cells of the queries and of the keys, u (h, k); r(d) is (h, k)
    and s(d) is (h,).
    """
    a, c, u = a.double(), c.double(), u.double()
    stride = stride or [1] * len(grid)
    places, cells_of_keys = cells(queries), cells(grid)

    def score(q: tuple[int, ...], k: tuple[int, ...]) -> Tensor:
        d = tuple(y - step * x for x, y, step in zip(q, k, stride, strict=True))
        query, key = a[:, :, places.index(q)], c[:, :, cells_of_keys.index(k)]
        content = (query * key).sum(-1) + (query * r(d).double()).sum(-1) + (u * key).sum(-1)
        return content / math.sqrt(a.shape[-1]) + s(d).double()

    return positional(queries, grid, score, None if key_mask is None else key_mask[:, None], causal)


def border_cell(at: int, side: int, border: str) -> int | None:
    """The cell that position `at` of an axis of `side` cells reads; None where it reads zero."""
    if 0 <= at < side:
        return at
    if border == "zeros":
        return None
    if border == "replicate":
        return min(max(at, 0), side - 1)
    if border == "circular":
        return at % side
    if border == "reflect":
        while not 0 <= at < side:  # each bounce mirrors about an outermost cell, which is not repeated
            at = -at if at < 0 else 2 * (side - 1) - at
        return at
    raise ValueError(f"border must be one of {BORDERS}, but is {border!r}")


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
    """The quadratic head over the padded grid, the weight of each padding cell moved to the cell it reads."""
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
                    read = x[(slice(None), slice(first, first + per_group), *at)].double()
                    total = total + read @ weight[(o, slice(None), *t)].double()
            y[(slice(None), o, *p)] = total
    return y
