"""Positional encodings: absolute ones, and the four score terms of relative ones.

    absolute   S_qk = (x_q + p_q) W_q W_k^T (x_k + p_k)^T                               (Vaswani et al. 2017)
    relative   S_qk = a_q.c_k + a_q.r_d + u.c_k + v.r_d,  a = x W_q, c = x W_k, r_d = e_d W~_k, d = k - q
                                                                                        (Dai et al. 2019)

Absolute encodings are added to the input.  Relative ones become a query (a + u), a key c and attn_bias (a + v).r_d of
`softmax`.  Encodings e_d are learned, sinusoidal, or the quadratic (|d|^2, d) of Cordonnier, Loukas & Jaggi 2020, whose
scores with W_q = W_k = 0 are `quadratic` heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.shapes import (
    are_tensors,
    broadcast_batch,
    no_empty_axis,
    read,
    same_axis,
    same_kind,
    whole_numbers,
    whole_tuple,
)


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """e_(p, 2i) = sin(p / 10000^(2i/w)), e_(p, 2i+1) = cos(...): (*batch, D) -> (*batch, width), w = width / D.

    Each axis has w columns.  Positions may be cells, differences of cells (negative ones too) or fractions of cells.

    >>> sinusoidal(torch.tensor([[0.0]]), 4)
    tensor([[0., 1., 0., 1.]])
    """
    are_tensors("sinusoidal", positions=positions)
    whole_numbers("sinusoidal", least=0, width=width)
    axes = positions.shape[-1] if positions.dim() else 0
    if axes < 1 or width % (2 * axes) or width < 1:
        raise ShapeError(f"sinusoidal: width must be a multiple of 2 x {axes} axes, but is {width}")
    if not positions.dtype.is_floating_point:
        positions = positions.to(torch.get_default_dtype())
    pairs = width // (2 * axes)
    exponents = torch.arange(pairs, dtype=positions.dtype, device=positions.device) / pairs
    angles = positions.unsqueeze(-1) * (-math.log(10_000.0) * exponents).exp()
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


def cells(grid: Sequence[int]) -> Tensor:
    """The cells of a grid in row-major order: (n, D) of int64, ready for `sinusoidal` or a learned table."""
    grid = whole_tuple("cells", "grid", grid)
    if not grid:
        raise ShapeError("cells: grid needs at least one axis, but has none")
    axes = [torch.arange(g) for g in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(axes))


def differences(
    grid: Sequence[int], queries: Sequence[int] | None = None, stride: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """All differences d = k - stride q, (t, D), and the index of the difference of each pair, (m, n).

    t = prod(g_a + stride_a (q_a - 1)) is far fewer than m n, so encodings are projected once per difference.
    """
    grid = whole_tuple("differences", "grid", grid, least=0)
    queries = grid if queries is None else whole_tuple("differences", "queries", queries, least=0)
    stride = (1,) * len(grid) if stride is None else whole_tuple("differences", "stride", stride)
    same_axis("differences", "dimension", grid=len(grid), queries=len(queries), stride=len(stride))
    if not grid or min(*grid, *queries) < 1:
        raise ShapeError(
            f"differences: grid {tuple(grid)} and queries {queries} need at least one cell along each axis"
        )
    before = [s * (q - 1) for q, s in zip(queries, stride, strict=True)]
    spans = [g + b for g, b in zip(grid, before, strict=True)]
    least = torch.tensor(before)
    index = torch.zeros(1, 1, dtype=torch.int64)
    for a, span in enumerate(spans):
        along = cells(grid)[None, :, a] - stride[a] * cells(queries)[:, None, a] + least[a]
        index = index * span + along
    return cells(spans) - least, index


def quadratic_encoding(offsets: Tensor) -> Tensor:
    """r_d = (|d|^2, d_1, d_2, ...): (t, D) -> (t, 1 + D)."""
    are_tensors("quadratic_encoding", offsets=offsets)
    if offsets.dim() < 1:
        raise ShapeError("quadratic_encoding: offsets must be (t, D), but have no axis")
    return torch.cat([offsets.square().sum(-1, keepdim=True), offsets], dim=-1)


def quadratic_vector(alpha: Tensor, centres: Tensor) -> Tensor:
    """v = -alpha (1, -2 centre): with `quadratic_encoding`, v.r_d = -alpha (|d - centre|^2 - |centre|^2)."""
    same_kind("quadratic_vector", alpha=alpha, centres=centres)
    if centres.dim() < 1:
        raise ShapeError("quadratic_vector: centres must be (*batch, D), but have no axis")
    broadcast_batch("quadratic_vector", alpha=alpha.shape, centres=centres.shape[:-1])
    one = torch.ones_like(centres[..., :1])
    return -alpha.unsqueeze(-1) * torch.cat([one, -2 * centres], dim=-1)


def four_terms(a: Tensor, encodings: Tensor, index: Tensor, *, content: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """(a + content, (a + place).r_d): the query and bias of a relative score, from projected queries a (*batch, m, k).

    encodings  r_d for every difference, (*batch, t, k), projected
    index      the difference of each pair, (m, n), from `differences`
    content    u and place v: one vector (*batch, k) each for all queries

    >>> a, c = torch.randn(6, 4), torch.randn(6, 4)
    >>> offsets, index = differences((2, 3))
    >>> q, bias = four_terms(a, sinusoidal(offsets, 4), index, content=torch.zeros(4), place=torch.zeros(4))
    >>> from headwise.operators import softmax
    >>> softmax(q, c, scale=1.0, attn_bias=bias).shape
    torch.Size([6, 6])
    """
    same_kind("four_terms", a=a, encodings=encodings, content=content, place=place)
    for name, x in (("a", a), ("encodings", encodings), ("content", content), ("place", place)):
        if x.dim() < 1:
            raise ShapeError(f"four_terms: {name} needs a last axis of width k, but has none")
    same_axis(
        "four_terms",
        "k",
        a=a.shape[-1],
        encodings=encodings.shape[-1],
        content=content.shape[-1],
        place=place.shape[-1],
    )
    are_tensors("four_terms", index=index)
    if index.dtype != torch.int64 or index.dim() != 2:
        raise ShapeError(f"four_terms: index must be (m, n) of int64, but is {tuple(index.shape)} of {index.dtype}")
    no_empty_axis("four_terms", a=a, encodings=encodings, index=index)
    broadcast_batch(
        "four_terms",
        a=a.shape[:-2],
        encodings=encodings.shape[:-2],
        content=content.shape[:-1],
        place=place.shape[:-1],
    )
    same_axis("four_terms", "m", a=a.shape[-2], index=index.shape[-2])
    least, most = (read(x) for x in index.aminmax())
    if least is not None and most is not None and (least < 0 or most >= encodings.shape[-2]):
        raise ShapeError(
            f"four_terms: index refers to differences {int(least)} to {int(most)}, but there are "
            f"{encodings.shape[-2]} encodings"
        )
    by_difference = (a + place.unsqueeze(-2)) @ encodings.mT  # (*batch, m, t)
    index = index.to(a.device).expand(*by_difference.shape[:-2], *index.shape)
    return a + content.unsqueeze(-2), by_difference.gather(-1, index)
