"""s(q, k) = -alpha |k - q - centre|^2: heads that attend around a place relative to the query, with a given width.

The quadratic relative encoding of Cordonnier, Loukas & Jaggi 2020, on grids of any dimension, with one width per axis.
The score is a sum over axes, so P is a Kronecker product (`positional`).  As the width goes to 0 it becomes a `shift`,
and a layer with one head per kernel cell becomes a convolution.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.operators.compose import Product
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.relative.encodings import cells
from headwise.operators.relative.positional import Positional, positional
from headwise.operators.relative.shift import Border, shift
from headwise.operators.softmax import Softmax, softmax
from headwise.shapes import (
    MOST,
    all_finite,
    are_tensors,
    broadcasts_to,
    same_axis,
    same_kind,
    shown,
    whole_pairs,
    whole_tuple,
)

_supports_key_mask = supports(KEY_MASK, instead="softmax with the scores as attn_bias")
_supports_causal = supports(CAUSAL, KEY_MASK, instead="softmax with the scores as attn_bias")


@_supports_causal
def quadratic(
    grid: Sequence[int],
    centres: Tensor,
    log_widths: Tensor,
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Positional:
    """P_qk ~ exp(-sum_a (k_a - p_a - centre_a)^2 / (2 width_a^2)), p = stride q + origin the cell of query q.

    centres     (*batch, D) in cells; heads are a batch axis
    log_widths  broadcasts to (*batch, D); the logarithm can be trained without constraint.  `log_width(alpha)` converts
                the sharpness alpha = 1 / (2 width^2) of the paper.
    causal      attend to cells up to the query's own in row-major order; without `queries`, `stride` and `origin`
    key_mask    (*batch, n), True = attend

    >>> P = quadratic((3, 3), torch.tensor([0.0, 1.0]), log_width(alpha=30.0))
    >>> P.dense()[4].argmax().item()  # the middle cell attends to its right neighbour
    5
    """
    same_kind("quadratic", centres=centres, log_widths=log_widths)
    grid, deltas = _deltas("quadratic", grid, queries, stride, origin, centres.device)
    if centres.dim() < 1 or centres.shape[-1] != len(grid):
        raise ShapeError(f"quadratic: centres must be (*batch, {len(grid)}), but have shape {tuple(centres.shape)}")
    broadcasts_to("quadratic", "log_widths", log_widths, centres.shape)
    all_finite("quadratic", centres=centres, log_widths=log_widths)
    compute = torch.promote_types(centres.dtype, torch.float32)
    at, sharp = torch.broadcast_tensors(centres.to(compute), (-2 * log_widths.to(compute)).exp() / 2)
    scores = [
        -sharp[..., a, None, None] * (delta.to(compute) - at[..., a, None, None]).square()
        for a, delta in enumerate(deltas)
    ]
    _one_grid("quadratic", causal, queries, stride, origin)
    return positional(scores, causal=causal, key_mask=key_mask, dtype=centres.dtype)


@_supports_causal
def tables(
    grid: Sequence[int],
    values: Sequence[Tensor],
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Positional:
    """P_qk ~ exp(sum_a table_a[k_a - p_a]): a learned score for every distance along every axis.

    `values[a]` is (*batch, t_a), from the most negative distance to the most positive: t_a = 2 g_a - 1 when queries and
    keys share one grid.  The masks are those of `quadratic`.
    """
    if isinstance(values, (str, bytes, Tensor)) or not isinstance(values, Sequence):
        raise InputError(f"tables: values must be a sequence of one tensor for each axis, but is {shown(values)}")
    same_kind("tables", **{f"values[{axis}]": x for axis, x in enumerate(values)})
    grid, deltas = _deltas("tables", grid, queries, stride, origin, values[0].device if values else None)
    same_axis("tables", "dimension", grid=len(grid), values=len(values))
    ends = zip(grid, queries or grid, stride or (1,) * len(grid), origin or (0,) * len(grid), strict=True)
    ranges = [(-(s * (q - 1) + o), g - 1 - o) for g, q, s, o in ends]
    scores = []
    for a, (delta, table, (least, most)) in enumerate(zip(deltas, values, ranges, strict=True)):
        if table.dim() < 1 or table.shape[-1] != most - least + 1:
            raise ShapeError(
                f"tables: axis {a} has distances {least} to {most}, so its table needs {most - least + 1} entries, "
                f"but has shape {tuple(table.shape)}"
            )
        scores.append(table[..., delta - least])
    _one_grid("tables", causal, queries, stride, origin)
    return positional(scores, causal=causal, key_mask=key_mask)


@_supports_key_mask
def bordered(
    grid: Sequence[int],
    padding: Sequence[tuple[int, int]],
    border: Border,
    centres: Tensor,
    log_widths: Tensor,
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    key_mask: Tensor | None = None,
) -> Product:
    """A quadratic head on a grid padded like that of a convolution, `padding` (before, after) cells along each axis.

    "zeros": padding cells take weight but have zero values (null keys), so the rows of P sum to less than one.
    "replicate", "reflect", "circular": their weight goes to the cell they copy.  As the widths go to 0 the head becomes
    the `shift` of the same border.
    """
    grid = whole_tuple("bordered", "grid", grid)
    padding = whole_pairs("bordered", "padding", padding)
    same_axis("bordered", "dimension", grid=len(grid), padding=len(padding))
    extended = [g + before + after for g, (before, after) in zip(grid, padding, strict=True)]
    embed = shift(grid, [-before for before, _ in padding], border=border, queries=extended)
    if key_mask is not None:
        are_tensors("bordered", key_mask=key_mask)
        same_axis("bordered", "n", key_mask=key_mask.shape[-1] if key_mask.dim() else 0, grid=math.prod(grid))
        source = embed.sources().to(key_mask.device)
        key_mask = key_mask[..., source.clamp(min=0)] | (source < 0)
    head = quadratic(
        extended,
        centres,
        log_widths,
        queries=grid if queries is None else queries,
        stride=stride,
        origin=[before for before, _ in padding],
        key_mask=key_mask,
    )
    return Product((head, embed))


@_supports_key_mask
def rotated(grid: Sequence[int], centres: Tensor, precision: Tensor, *, key_mask: Tensor | None = None) -> Softmax:
    """P_qk ~ exp(-(k - q - c)^T L (k - q - c) / 2), L (*batch, D, D) symmetric: an ellipse at any angle.

    A full L does not factor over the axes, so this is dense softmax attention with N^2 scores; a warning says so.
    """
    same_kind("rotated", centres=centres, precision=precision)
    grid, _ = _deltas("rotated", grid, None, None, None, centres.device)
    if precision.shape[-2:] != (len(grid),) * 2 or centres.shape[-1:] != (len(grid),):
        raise ShapeError(
            f"rotated: a grid of {len(grid)} axes needs centres (*batch, {len(grid)}) and precision (*batch, "
            f"{len(grid)}, {len(grid)}), but they have shapes {tuple(centres.shape)} and {tuple(precision.shape)}"
        )
    n = math.prod(grid)
    warnings.warn(f"a full covariance does not factor over the axes: {n} x {n} scores are computed", stacklevel=3)
    at = cells(grid).to(centres.device)
    away = (at[None, :] - at[:, None]).to(centres.dtype) - centres[..., None, None, :]  # (*batch, n, n, D)
    bias = -((away @ precision.unsqueeze(-3)) * away).sum(-1) / 2
    q = centres.new_zeros(*bias.shape[:-1], 1)
    return softmax(q, q, attn_bias=bias, key_mask=key_mask)


def log_width(alpha: Tensor | float) -> Tensor:
    """log width = -log(2 alpha) / 2, for a quadratic encoding of sharpness alpha."""
    if not isinstance(alpha, (int, float, Tensor)) or isinstance(alpha, bool):
        raise InputError(f"log_width: alpha must be a number or a tensor, but is {shown(alpha)}")
    if not isinstance(alpha, Tensor) and not 0 < alpha < 1e30:
        raise InputError(f"log_width: alpha must be a positive number, but is {shown(alpha)}")
    alpha = alpha if isinstance(alpha, Tensor) else torch.tensor(float(alpha))
    return -(2 * (alpha if alpha.dtype.is_floating_point else alpha.float())).log() / 2


def _one_grid(owner: str, causal: bool, *other: Sequence[int] | None) -> None:
    """Causality compares the cell of a query with that of a key, so query q has to be at cell q."""
    if causal and any(part is not None for part in other):
        raise UnsupportedError(
            f"{owner}: causal needs queries at the cells of the keys, without queries, stride and origin; use softmax "
            "with the scores as attn_bias and a pair_mask"
        )


def _deltas(
    owner: str,
    grid: Sequence[int],
    queries: Sequence[int] | None,
    stride: Sequence[int] | None,
    origin: Sequence[int] | None,
    device: torch.device | None,
) -> tuple[tuple[int, ...], list[Tensor]]:
    """k_a - (stride_a q_a + origin_a) for every axis: (q_a, g_a) of int64."""
    grid = whole_tuple(owner, "grid", grid, least=0)
    queries = grid if queries is None else whole_tuple(owner, "queries", queries, least=0)
    stride = (1,) * len(grid) if stride is None else whole_tuple(owner, "stride", stride, least=0)
    origin = (0,) * len(grid) if origin is None else whole_tuple(owner, "origin", origin, least=-MOST)
    same_axis(owner, "dimension", grid=len(grid), queries=len(queries), stride=len(stride), origin=len(origin))
    if not grid or min(grid) < 1 or min(queries) < 1 or min(stride) < 1:
        raise ShapeError(
            f"{owner}: grid {grid}, queries {queries} and stride {stride} need at least one axis and 1 along each"
        )
    keys = [torch.arange(g, device=device) for g in grid]
    places = [torch.arange(q, device=device) * s + o for q, s, o in zip(queries, stride, origin, strict=True)]
    return grid, [k[None, :] - p[:, None] for k, p in zip(keys, places, strict=True)]
