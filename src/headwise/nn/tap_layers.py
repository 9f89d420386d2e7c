"""y = sum over heads h of P_h X W_h + b, P_h looking at a place: attention layers that are convolutions.

P_h depends on positions alone, so values and output projections of a head multiply into one W_h (out x in): with one
head for each cell of a kernel this is Theorem 1 of Cordonnier, Loukas & Jaggi 2020 read from right to left.

    ShiftAttention             P_h = shift by the tap: equal to the convolution, to rounding
    GridQuadraticAttention     P_h quadratic, centres on a grid of K_1 x K_2 x ...: the 1-D factors are shared
    QuadraticAttention         P_h quadratic, every head its own centre and widths

All take and return channels-first maps (b, channels, *grid), as convolutions do.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.nn import minimal
from headwise.nn.taps import Taps
from headwise.operators.base import AttentionOperator
from headwise.operators.compose import per_head
from headwise.operators.relative.positional import Positional
from headwise.operators.relative.quadratic import log_width, quadratic
from headwise.operators.relative.shift import shift

STACK = 256
"""Taps along one axis are stacked until the channel product has about this many inputs: below, the matrix products are
too thin to run at full speed; above, stacking only copies."""


class TapLayer(nn.Module, ABC):
    """What the three layers share: a projection W_h (out x in/groups) for each head, and a bias."""

    def __init__(self, taps: Taps, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        expected = (taps.heads, taps.channels // taps.groups)
        if weight.dim() != 3 or (weight.shape[0], weight.shape[2]) != expected or weight.shape[1] % taps.groups:
            raise ShapeError(
                f"{type(self).__name__}: weight must be (heads {expected[0]}, out, in per group {expected[1]}) with "
                f"out a multiple of {taps.groups} groups, but has shape {tuple(weight.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[1:2]:
            raise ShapeError(
                f"{type(self).__name__}: axis 'out' must agree, but weight has {weight.shape[1]}, bias has shape "
                f"{tuple(bias.shape)}"
            )
        self.taps = taps
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        self.taps.check(type(self).__name__, x, self.weight)
        y = self.mix(x if x.dim() == len(self.taps.kernel) + 2 else x.unsqueeze(0))
        if self.bias is not None:
            y = y.add_(self.bias.reshape(-1, *(1,) * len(self.taps.kernel)))  # y is ours, and no gradient needs it
        return y if x.dim() == y.dim() else y.squeeze(0)

    @abstractmethod
    def mix(self, x: Tensor) -> Tensor:
        """sum_h P_h X W_h: (b, channels, *grid) -> (b, out, *queries)."""

    @abstractmethod
    def heads(self, grid: tuple[int, ...]) -> AttentionOperator:
        """P as an operator (h, m, n) whose keys are the cells of `grid` padded, for measuring it."""

    @abstractmethod
    def cost(self, grid: tuple[int, ...]) -> Cost:
        """What one map of this size costs."""

    def extra_repr(self) -> str:
        t = self.taps
        return (
            f"{t.channels}, {self.outputs}, heads={t.heads}, kernel={t.kernel}, stride={t.stride}, "
            f"dilation={t.dilation}, padding={t.padding}, border={t.border!r}, groups={t.groups}"
        )


class ShiftAttention(TapLayer):
    """Every head looks at exactly one cell: P_h x is x moved, no softmax and no weights to form.

    The taps of one axis are stacked as channels (K shifted copies), the taps of the others are slices of that stack,
    each one matrix product added to the sum: K copies in place of the K^2 of an unfolded convolution.  Three rows of
    taps without stride take two thirds of the products when no gradient is wanted (`minimal`).
    """

    def mix(self, x: Tensor) -> Tensor:
        t, b = self.taps, x.shape[0]
        unit = len(t.kernel) == 2 and (t.kernel[0], *t.stride, t.dilation[0], t.groups) == (3, 1, 1, 1, 1)
        if minimal.applies(x, self.weight, unit=unit):
            zeros = t.border == "zeros"  # padded block by block; other borders beforehand
            x, (rows, columns) = (x, t.padding) if zeros else (t.pad(x), ((0, 0), (0, 0)))
            return minimal.three_rows(x, self.weight.unflatten(0, t.kernel), t.dilation[1], (rows, columns))
        x = t.pad(x)
        inner, outer = t.channels // t.groups, self.outputs // t.groups
        queries = self._queries(x)
        # the axis with the most taps is stacked, the last one if several have
        along = max(range(len(t.kernel)), key=lambda axis: (t.kernel[axis], axis))
        others = [axis for axis in range(len(t.kernel)) if axis != along]
        weight = self.weight.reshape(*t.kernel, t.groups, outer, inner).movedim(along, -2)
        step = max(1, min(t.kernel[along], STACK // inner))
        total: Tensor | None = None
        for first in range(0, t.kernel[along], step):
            stacked = range(first, min(first + step, t.kernel[along]))
            columns = [self._slice(x, along, tap, queries[along]) for tap in stacked]
            stack = columns[0] if len(columns) == 1 else self._stack(columns)
            for place in itertools.product(*(range(t.kernel[axis]) for axis in others)):
                w = weight[place][..., first : stacked.stop, :].flatten(-2)  # (groups, outer, taps inner)
                values = self._place(stack, others, place, queries)
                values = values.reshape(b * t.groups, w.shape[-1], -1)
                w = w.expand(b, *w.shape).reshape(b * t.groups, *w.shape[-2:])
                total = torch.bmm(w, values) if total is None else total.baddbmm_(w, values)
        assert total is not None
        return total.reshape(b, self.outputs, *queries)

    def heads(self, grid: tuple[int, ...]) -> AttentionOperator:
        t = self.taps
        wide, queries = t.extended(grid), t.queries(grid)
        places = itertools.product(*([d * tap for tap in range(k)] for k, d in zip(t.kernel, t.dilation, strict=True)))
        return per_head([shift(wide, place, border="zeros", stride=t.stride, queries=queries) for place in places])

    def cost(self, grid: tuple[int, ...]) -> Cost:
        """Shifts are free: the channel products are all there is (a third fewer where `minimal` applies)."""
        t = self.taps
        cells = math.prod(t.queries(grid))
        stack = min(t.kernel[-1], max(1, STACK // (t.channels // t.groups)))
        work = t.heads * cells * self.outputs * (t.channels // t.groups)
        return Cost(work, stack * t.channels * math.prod(t.extended(grid)), t.heads)

    def _queries(self, x: Tensor) -> tuple[int, ...]:
        t = self.taps
        sides = zip(x.shape[2:], t.reach, t.stride, strict=True)
        return tuple((e - reach - 1) // s + 1 for e, reach, s in sides)

    def _slice(self, x: Tensor, axis: int, tap: int, size: int) -> Tensor:
        """The cells that `size` queries see through one tap of one axis."""
        start, stride = tap * self.taps.dilation[axis], self.taps.stride[axis]
        cells = slice(start, start + (size - 1) * stride + 1, stride)
        return x[(slice(None), slice(None), *(slice(None),) * axis, cells)]

    def _stack(self, columns: list[Tensor]) -> Tensor:
        """Copies as channels, within each group: (b, groups taps inner, *)."""
        groups = self.taps.groups
        if groups == 1:
            return torch.cat(columns, dim=1)
        return torch.cat([c.unflatten(1, (groups, -1)) for c in columns], dim=2).flatten(1, 2)

    def _place(self, stack: Tensor, others: list[int], place: tuple[int, ...], queries: tuple[int, ...]) -> Tensor:
        for axis, tap in zip(others, place, strict=True):
            stack = self._slice(stack, axis, tap, queries[axis])
        return stack


class GridQuadraticAttention(TapLayer):
    """Quadratic heads whose centres are all combinations of K_a centres along axis a, with one width each.

    P_(i, j) = R_i (x) C_j, so sum_ij (R_i (x) C_j) X W_ij takes K column products, one channel product and K row
    products where separate heads take K^2 of each.
    """

    def __init__(self, taps: Taps, weight: Tensor, bias: Tensor | None, *, alpha: float) -> None:
        super().__init__(taps, weight, bias)
        like = {"dtype": weight.dtype, "device": weight.device}
        axes = list(zip(taps.kernel, taps.dilation, strict=True))
        self.centres = nn.ParameterList(nn.Parameter(torch.arange(k, **like) * d) for k, d in axes)
        self.log_widths = nn.ParameterList(
            nn.Parameter(log_width(alpha).to(**like).expand(k).clone()) for k in taps.kernel
        )

    def factors(self, extended: tuple[int, ...]) -> list[Tensor]:
        """The 1-D attentions of every axis: (K_a, q_a, e_a)."""
        sides = zip(extended, self.taps.reach, self.taps.stride, strict=True)
        out = []
        for axis, (e, reach, s) in enumerate(sides):
            queries = ((e - reach - 1) // s + 1,)
            centres, widths = self.centres[axis].unsqueeze(-1), self.log_widths[axis].unsqueeze(-1)
            head = quadratic((e,), centres, widths, queries=queries, stride=(s,))
            out.append(head.factors()[0].to(self.weight.dtype))
        return out

    def mix(self, x: Tensor) -> Tensor:
        t, b = self.taps, x.shape[0]
        x = t.pad(x)
        first, *others = self.factors(tuple(x.shape[2:]))
        x = x.unflatten(1, (t.groups, 1, -1))  # (b, groups, taps so far, inner, *extended)
        for axis, p in reversed(list(enumerate(others, start=1))):
            at = 4 + axis
            y = x.movedim(at, -1) @ p.flatten(0, 1).mT  # all K_a attentions in one product
            y = y.unflatten(-1, p.shape[:2]).movedim(-1, at).movedim(-1, 2)
            x = y.flatten(2, 3)
        inner, outer = t.channels // t.groups, self.outputs // t.groups
        # rows (outer, K_1), columns (the other taps, inner): the order the last product wants
        w = self.weight.reshape(t.kernel[0], -1, t.groups, outer, inner).permute(2, 3, 0, 1, 4)
        sides = x.shape[4:]
        y = w.reshape(t.groups, outer * t.kernel[0], -1) @ x.reshape(b, t.groups, -1, math.prod(sides))
        y = y.reshape(b, self.outputs, t.kernel[0] * sides[0], -1)
        rows = first.movedim(0, 1).flatten(1)  # (q_1, K_1 e_1)
        return (rows @ y).reshape(b, self.outputs, rows.shape[0], *sides[1:])

    def heads(self, grid: tuple[int, ...]) -> Positional:
        centres = torch.cartesian_prod(*self.centres).reshape(self.taps.heads, -1)
        widths = torch.cartesian_prod(*self.log_widths).reshape(self.taps.heads, -1)
        t = self.taps
        return quadratic(t.extended(grid), centres, widths, queries=t.queries(grid), stride=t.stride)

    def cost(self, grid: tuple[int, ...]) -> Cost:
        t, queries, sides = self.taps, self.taps.queries(grid), list(self.taps.extended(grid))
        copies, work, widest = t.channels, 0, 0
        for axis in reversed(range(1, len(sides))):
            copies *= t.kernel[axis]
            work += copies * math.prod(sides) * queries[axis]
            sides[axis] = queries[axis]
            widest = max(widest, copies * math.prod(sides))
        work += copies // t.groups * self.outputs * t.kernel[0] * math.prod(sides)
        work += self.outputs * t.kernel[0] * math.prod(sides) * queries[0]
        return Cost(work, max(widest, self.outputs * t.kernel[0] * math.prod(sides)), len(sides) + 1)


class QuadraticAttention(TapLayer):
    """Quadratic heads that move and widen one by one: the layer of the source, trained from anywhere.

    Centres count from the query's own cell of the padded grid, so tap t of a convolution is at dilation t.
    """

    def __init__(self, taps: Taps, weight: Tensor, bias: Tensor | None, *, centres: Tensor, log_widths: Tensor) -> None:
        super().__init__(taps, weight, bias)
        axes = len(taps.kernel)
        if centres.shape != (taps.heads, axes):
            raise ShapeError(
                f"QuadraticAttention: centres must be (heads {taps.heads}, axes {axes}), but have shape "
                f"{tuple(centres.shape)}"
            )
        self.centres = nn.Parameter(centres)
        self.log_widths = nn.Parameter(log_widths.expand(taps.heads, axes).clone())

    def mix(self, x: Tensor) -> Tensor:
        t, b = self.taps, x.shape[0]
        x = t.pad(x)
        sides = zip(x.shape[2:], t.reach, t.stride, strict=True)
        queries = [(e - reach - 1) // s + 1 for e, reach, s in sides]
        p = quadratic(x.shape[2:], self.centres, self.log_widths, queries=queries, stride=t.stride)
        seen = p(x.flatten(2).mT.unsqueeze(1))  # (b, h, m, channels)
        seen = seen.unflatten(-1, (t.groups, -1)).permute(0, 3, 1, 4, 2).flatten(2, 3)  # (b, groups, h inner, m)
        w = self.weight.unflatten(1, (t.groups, -1)).permute(1, 2, 0, 3).flatten(2)  # (groups, outer, h inner)
        return (w @ seen).reshape(b, self.outputs, *queries)

    def heads(self, grid: tuple[int, ...]) -> Positional:
        t = self.taps
        return quadratic(t.extended(grid), self.centres, self.log_widths, queries=t.queries(grid), stride=t.stride)

    def cost(self, grid: tuple[int, ...]) -> Cost:
        t = self.taps
        mixing = t.heads * math.prod(t.queries(grid)) * self.outputs * (t.channels // t.groups)
        return self.heads(grid).cost(t.channels) + Cost(mixing)
