"""(P v)_p = v_(stride p + offset) on a grid of any dimension: attention to exactly one cell.

The limit of a sharp positional head (Cordonnier, Loukas & Jaggi 2020): a convolution is a sum of shifts, one per
kernel cell.  Computed by index arithmetic along each axis, without multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import InputError, ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.mask_support import supports
from headwise.shapes import MOST, same_axis, whole_tuple

Border = Literal["circular", "zeros", "replicate", "reflect"]


@final
@dataclass(frozen=True, eq=False)
class Shift(AttentionOperator):
    """P has one 1 in row p, at cell stride p + offset of the key grid; cells are numbered in row-major order.

    Outside the grid, `border` applies as in a convolution: "zeros" leaves the row empty, "replicate" takes the nearest
    cell, "reflect" mirrors about the outermost cell, "circular" wraps around.

    >>> shift((3,), (1,), border="zeros").dense()
    tensor([[0., 1., 0.],
            [0., 0., 1.],
            [0., 0., 0.]])
    """

    grid: tuple[int, ...]  # of the keys
    offset: tuple[int, ...]
    border: Border
    stride: tuple[int, ...]
    queries: tuple[int, ...]  # grid of the queries

    @property
    def shape(self) -> torch.Size:
        return torch.Size((math.prod(self.queries), math.prod(self.grid)))

    @property
    def claims(self) -> frozenset[Claim]:
        m, n = self.shape
        source, keys = self.sources(), torch.arange(n)
        promised = {Claim.NONNEGATIVE}
        if bool((source >= 0).all()):
            promised.add(Claim.STOCHASTIC)
            if m == n and torch.equal(source.sort().values, keys):
                promised.add(Claim.ORTHOGONAL)
                if torch.equal(source[source], keys):
                    promised.add(Claim.SYMMETRIC)
        if bool((source <= torch.arange(m) + n - m).all()):
            promised.add(Claim.CAUSAL)
        return frozenset(promised)

    def sources(self) -> Tensor:
        """The key of every query, -1 where there is none: (m,) of int64."""
        flat, empty = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
        for axis, g in enumerate(self.grid):
            source = self._source(axis, torch.device("cpu"))
            flat = (flat[:, None] * g + source).flatten()
            empty = (empty[:, None] | (source < 0)).flatten()
        return flat.masked_fill(empty, -1)

    def apply(self, v: Tensor) -> Tensor:
        axes = self._axes()
        x = v.unflatten(-2, self.grid)
        if self._rolls:
            return x.roll([-o for o in self.offset], axes).flatten(axes[0], -2)
        if self.border == "zeros":
            # the cells inside the grid are a slice along each axis: one copy, no gather
            spans = [self._span(axis) for axis in range(len(self.grid))]
            inside = zip(spans, self.offset, self.stride, axes, strict=True)
            for (first, last), o, s, axis in inside:
                cells = slice(first * s + o, (last - 1) * s + o + 1, s) if last > first else slice(0, 0)
                x = x[(..., cells, *(slice(None),) * (-1 - axis))]
            pads = [(first, size - last) for (first, last), size in zip(spans, self.queries, strict=True)]
            return F.pad(x, (0, 0, *(side for pair in reversed(pads) for side in pair))).flatten(axes[0], -2)
        for axis in range(len(self.grid)):
            x = x.index_select(axes[axis], self._source(axis, v.device))
        return x.flatten(axes[0], -2)

    def adjoint(self, u: Tensor) -> Tensor:
        """Each key sums over the queries that attend to it."""
        axes = self._axes()
        x = u.unflatten(-2, self.queries)
        if self._rolls:
            return x.roll(self.offset, axes).flatten(axes[0], -2)
        for axis, g in enumerate(self.grid):
            dim, (first, last) = axes[axis], self._span(axis)
            source = self._source(axis, u.device)[first:last]
            x = x.narrow(dim, first, last - first)
            size = list(x.shape)
            size[dim] = g
            x = x.new_zeros(size).index_add(dim, source, x)
        return x.flatten(axes[0], -2)

    def cost(self, d: int) -> Cost:
        return Cost(multiply_adds=0, scalars=0)

    @property
    def _rolls(self) -> bool:
        return self.border == "circular" and self.queries == self.grid and set(self.stride) == {1}

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-1 - len(self.grid), -1))

    def _span(self, axis: int) -> tuple[int, int]:
        """The range of queries along an axis that have a key; all of them unless the border is "zeros"."""
        g, o, s, size = self.grid[axis], self.offset[axis], self.stride[axis], self.queries[axis]
        if self.border != "zeros":
            return 0, size
        first = min(max(0, -(o // s)), size)  # the least p with p s + o >= 0
        last = min(max(0, (g - 1 - o) // s + 1), size)  # one beyond the greatest p with p s + o <= g - 1
        return first, max(first, last)

    def _source(self, axis: int, device: torch.device) -> Tensor:
        """The coordinate of each query's key along this axis, -1 for none."""
        g, o, s, size = self.grid[axis], self.offset[axis], self.stride[axis], self.queries[axis]
        at = torch.arange(size, device=device) * s + o
        if self.border == "circular":
            return at % g
        if self.border == "replicate":
            return at.clamp(0, g - 1)
        if self.border == "reflect":
            period = max(1, 2 * (g - 1))  # one round trip, with the outermost cells once each
            at = at % period
            return torch.minimum(at, period - at) if g > 1 else at
        return at.masked_fill((at < 0) | (at >= g), -1)


@supports(instead="offset, which takes a key_mask, or softmax")
def shift(
    grid: Sequence[int],
    offset: Sequence[int],
    *,
    border: Border = "circular",
    stride: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Shift:
    """Query p attends to key stride p + offset; by default the stride is 1 and `queries` is the grid of the keys."""
    grid, offset = whole_tuple("Shift", "grid", grid, least=0), whole_tuple("Shift", "offset", offset, least=-MOST)
    steps = (1,) * len(grid) if stride is None else whole_tuple("Shift", "stride", stride, least=0)
    out = grid if queries is None else whole_tuple("Shift", "queries", queries, least=0)
    same_axis("Shift", "dimension", grid=len(grid), offset=len(offset), stride=len(steps), queries=len(out))
    if not grid or min(grid) < 1 or min(out) < 1:
        raise ShapeError(f"Shift: grid {grid} and queries {out} need at least one axis and one cell along each")
    if min(steps) < 1:
        raise InputError(f"Shift: stride must be at least 1 along every axis, but is {steps}")
    if border not in get_args(Border):
        raise InputError(f"Shift: border must be one of {', '.join(get_args(Border))}, but is {border!r}")
    return Shift(grid, offset, border, steps, out)
