"""y = sum over heads h of P_h X W_h + b, P_h a function of relative position: attention layers that convolve.

The value and output projections of a head multiply into one matrix W_h (out x in).  With one head per kernel cell this
is Theorem 1 of Cordonnier, Loukas & Jaggi 2020.

    ShiftAttention                 P_h shifts to one kernel cell: equal to the convolution, and run as one
    SeparableQuadraticAttention    P_h quadratic with centres on a grid K_1 x K_2 x ...; 1-D factors are shared
    QuadraticAttention             P_h quadratic, each head with its own centre and widths

All layers take and return channels-first maps (b, channels, *grid), like nn.Conv2d.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import DtypeError, InputError, ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.compose import per_head
from headwise.operators.relative.positional import Positional
from headwise.operators.relative.quadratic import log_width, quadratic
from headwise.operators.relative.shift import Border, shift
from headwise.shapes import (
    MOST,
    are_tensors,
    autocasting,
    broadcasts_to,
    same_kind,
    shown,
    whole_numbers,
    whole_pairs,
    whole_tuple,
)

PAD_MODES = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect", "circular": "circular"}
"""Border -> mode of `torch.nn.functional.pad`."""


def is_channels_last(x: Tensor) -> bool:
    """Whether maps of two or three axes are laid out so; by strides, which vmap knows where it knows no layout."""
    return x.dim() in (4, 5) and x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()


@final
@dataclass(frozen=True)
class ConvolutionGeometry:
    """Head h of query p attends to cell stride p + dilation h - padding; h runs over the kernel in row-major order.

    The arguments are those of nn.Conv1d, nn.Conv2d and nn.Conv3d, with one entry per axis.
    """

    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) along each axis
    border: Border = "zeros"
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("kernel_size", "stride", "dilation"):
            whole_tuple("ConvolutionGeometry", name, getattr(self, name), least=0)
        whole_pairs("ConvolutionGeometry", "padding", self.padding, least=-MOST)
        whole_numbers("ConvolutionGeometry", least=0, in_channels=self.in_channels, groups=self.groups)
        sizes = {
            "kernel_size": self.kernel_size,
            "stride": self.stride,
            "dilation": self.dilation,
            "padding": self.padding,
        }
        if {len(value) for value in sizes.values()} not in ({1}, {2}, {3}):
            raise InputError(f"ConvolutionGeometry: needs one to three axes and one entry per axis, but got {sizes}")
        if min(*self.kernel_size, *self.stride, *self.dilation, self.groups, self.in_channels) < 1:
            raise InputError(f"ConvolutionGeometry: sizes must be at least 1, but got {self}")
        if min(itertools.chain(*self.padding)) < 0:
            raise InputError(f"ConvolutionGeometry: padding must not be negative, but is {self.padding}")
        if not isinstance(self.border, str) or self.border not in PAD_MODES:
            raise InputError(f"ConvolutionGeometry: border must be one of {', '.join(PAD_MODES)}, not {self.border!r}")
        if self.in_channels % self.groups:
            raise InputError(
                f"ConvolutionGeometry: {self.in_channels} channels do not divide into {self.groups} groups"
            )

    @classmethod
    def from_torch(
        cls,
        in_channels: int,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        padding: str | Sequence[int],
        border: Border = "zeros",
        groups: int = 1,
    ) -> ConvolutionGeometry:
        """`padding` as torch has it: 'same' with an odd reach pads one cell more after the map than before it."""
        reach = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
        if padding == "same":
            pairs = [(r // 2, r - r // 2) for r in reach]
        else:
            pairs = [(0, 0) for _ in reach] if isinstance(padding, str) else [(p, p) for p in padding]
        return cls(in_channels, tuple(kernel_size), tuple(stride), tuple(dilation), tuple(pairs), border, groups)

    @property
    def axes(self) -> int:
        return len(self.kernel_size)

    @property
    def heads(self) -> int:
        return math.prod(self.kernel_size)

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance from the first kernel cell to the last, along each axis."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))

    @property
    def pads_explicitly(self) -> bool:
        """Whether `convolve` pads beforehand; torch's convolutions pad by equally many zeros on both sides only."""
        return self.border != "zeros" or any(before != after for before, after in self.padding)

    def padded_size(self, grid: Sequence[int]) -> tuple[int, ...]:
        return tuple(g + before + after for g, (before, after) in zip(grid, self.padding, strict=True))

    def output_size(self, grid: Sequence[int]) -> tuple[int, ...]:
        sides = zip(self.padded_size(grid), self.reach, self.stride, strict=True)
        return tuple((side - reach - 1) // s + 1 for side, reach, s in sides)

    def pad(self, x: Tensor) -> Tensor:
        """(b, channels, *grid) -> (b, channels, *padded_size(grid)), filled according to `border`."""
        if not any(itertools.chain(*self.padding)):
            return x
        return F.pad(x, [side for pair in reversed(self.padding) for side in pair], mode=PAD_MODES[self.border])

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """torch's convolution of x (b, channels, *grid) with weight (out, in/groups, *kernel_size)."""
        padding = [before for before, _ in self.padding]
        if self.pads_explicitly:
            x, padding = self.pad(x), [0] * self.axes
        convolution = (F.conv1d, F.conv2d, F.conv3d)[self.axes - 1]
        return convolution(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def check_input(self, owner: str, x: Tensor, weight: Tensor) -> None:
        """Raise ShapeError unless x is (b, channels, *grid) or (channels, *grid) and the kernel fits into the grid."""
        axes = self.axes
        are_tensors(owner, x=x)
        if x.dim() not in (axes + 1, axes + 2):
            raise ShapeError(
                f"{owner}: x must be (batch, {self.in_channels}, {axes} grid axes) or the same without batch, but has "
                f"shape {tuple(x.shape)}"
            )
        if x.shape[-1 - axes] != self.in_channels:
            raise ShapeError(
                f"{owner}: axis 'channels' must agree, but x has {x.shape[-1 - axes]}, the layer {self.in_channels}"
            )
        if x.dtype != weight.dtype and not autocasting(x.device):
            raise DtypeError(f"{owner}: dtypes must agree, but x is {x.dtype}, the weights are {weight.dtype}")
        grid = tuple(x.shape[-axes:])
        if min(grid) < 1:
            raise ShapeError(f"{owner}: x has an empty grid of size {grid}; every axis needs at least one cell")
        if min(self.output_size(grid)) < 1:
            raise ShapeError(
                f"{owner}: a kernel that reaches over {tuple(r + 1 for r in self.reach)} cells does not fit into a map "
                f"of {grid} padded to {self.padded_size(grid)}; use a larger map or more padding"
            )
        slack = {"reflect": -1, "circular": 0}.get(self.border)
        for axis, (side, pair) in enumerate(zip(grid, self.padding, strict=True)):
            if slack is not None and max(pair) > side + slack:
                raise ShapeError(
                    f"{owner}: {self.border} padding of {max(pair)} cells needs at least {max(pair) - slack} cells, "
                    f"but grid axis {axis} has {side}"
                )


class MapAttention(nn.Module, ABC):
    """y = sum_h P_h X W_h + b on channels-first maps; `weight` is (out, in/groups, *heads), W_h its slice at head h.

    By default the heads are the cells of the kernel, and `weight` is that of nn.Conv2d.
    """

    def __init__(
        self, geometry: ConvolutionGeometry, weight: Tensor, bias: Tensor | None, heads: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if not isinstance(geometry, ConvolutionGeometry):
            raise InputError(f"{owner}: geometry must be a ConvolutionGeometry, but is {shown(geometry)}")
        same_kind(owner, weight=weight, **({} if bias is None else {"bias": bias}))
        heads = None if heads is None else whole_tuple(owner, "heads", heads)
        inner, groups = geometry.in_channels // geometry.groups, geometry.groups
        if tuple(weight.shape[1:]) != (inner, *(heads or geometry.kernel_size)) or weight.shape[0] % groups:
            what = f"heads {heads}" if heads else f"kernel {geometry.kernel_size}"
            raise ShapeError(
                f"{type(self).__name__}: weight must be (out, in per group {inner}, {what}) "
                f"with out a multiple of {groups} groups, but has shape {tuple(weight.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(
                f"{type(self).__name__}: axis 'out' must agree, but weight has {weight.shape[0]}, bias has shape "
                f"{tuple(bias.shape)}"
            )
        self.geometry = geometry
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    @abstractmethod
    def attention_on(self, x: Tensor) -> AttentionOperator:
        """P (h, m, n) or (b, h, m, n) of all heads on x (b, channels, *grid); keys are the cells of the padded grid."""

    @abstractmethod
    def cost(self, grid: Sequence[int]) -> Cost:
        """Cost of one map of this size."""

    @property
    def out_channels(self) -> int:
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """(b, channels, *grid) -> (b, out, *queries); the batch axis may be missing."""
        self.geometry.check_input(type(self).__name__, x, self.weight)
        return self._batched(self._forward, x)

    def _batched(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """forward(x) for x with or without a batch axis; no maps give no maps, and channels last stay last."""
        if x.dim() == self.geometry.axes + 1:
            return forward(x.unsqueeze(0)).squeeze(0)
        if x.shape[0] == 0:
            none = x.new_zeros(0, self.out_channels, *self.geometry.output_size(x.shape[2:]))
            return self._add_bias(none * (self.weight.sum() + x.sum()))
        y = forward(x)
        return y.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last(x) else y

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """sum_h P_h X W_h + b by applying P; what `forward` computes, by a faster path where there is one."""
        return self._weighted(self.attention_on(x), x)

    def _weighted(self, operator: AttentionOperator, x: Tensor) -> Tensor:
        geometry, grid = self.geometry, x.shape[2:]
        attended = operator(geometry.pad(x).flatten(2).mT.unsqueeze(1))  # (b, h, m, channels)
        attended = attended.unflatten(-1, (geometry.groups, -1)).permute(0, 3, 4, 1, 2).flatten(2, 3)
        y = self.weight.flatten(1).unflatten(0, (geometry.groups, -1)) @ attended  # (b, groups, out/groups, m)
        return self._add_bias(y.reshape(x.shape[0], self.out_channels, *geometry.output_size(grid)))

    def _forward(self, x: Tensor) -> Tensor:
        return self.sum_over_heads(x)

    def _add_bias(self, y: Tensor) -> Tensor:
        # in place: y belongs to this layer, and no gradient needs its old value
        return y if self.bias is None else y.add_(self.bias.reshape(-1, *(1,) * self.geometry.axes))

    def extra_repr(self) -> str:
        g = self.geometry
        return (
            f"{g.in_channels}, {self.out_channels}, kernel_size={g.kernel_size}, stride={g.stride}, "
            f"dilation={g.dilation}, padding={g.padding}, border={g.border!r}, groups={g.groups}, "
            f"bias={self.bias is not None}"
        )


class KernelAttention(MapAttention):
    """Base of the three layers whose P depends on positions alone, one head per kernel cell."""

    @abstractmethod
    def operator(self, grid: Sequence[int]) -> AttentionOperator:
        """P (h, m, n) of all heads; the keys are the cells of the padded grid."""

    def attention_on(self, x: Tensor) -> AttentionOperator:
        return self.operator(x.shape[2:])


class ShiftAttention(KernelAttention):
    """P_h v = v shifted to kernel cell h: the convolution itself, so torch's convolution computes it."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.numel() == 0:
            self.geometry.check_input(type(self).__name__, x, self.weight)
        try:  # checking beforehand would take 5 % of the time of a small map
            return self.geometry.convolve(x, self.weight, self.bias)
        except RuntimeError:
            self.geometry.check_input(type(self).__name__, x, self.weight)  # raises a clearer error
            raise

    def operator(self, grid: Sequence[int]) -> AttentionOperator:
        g = self.geometry
        padded, queries = g.padded_size(grid), g.output_size(grid)
        cells = itertools.product(*([d * i for i in range(k)] for k, d in zip(g.kernel_size, g.dilation, strict=True)))
        return per_head([shift(padded, cell, border="zeros", stride=g.stride, queries=queries) for cell in cells])

    def cost(self, grid: Sequence[int]) -> Cost:
        """Shifts are free: only the products with W_h count."""
        g = self.geometry
        padded = g.in_channels * math.prod(g.padded_size(grid)) if g.pads_explicitly else 0
        return Cost(math.prod(g.output_size(grid)) * self.weight.numel(), padded)


class SeparableQuadraticAttention(KernelAttention):
    """Quadratic heads whose centres are all combinations of K_a centres along axis a, each with its own width.

    P_(i, j) = R_i (x) C_j, so sum_ij (R_i (x) C_j) X W_ij takes K column products, one channel product and K row
    products, where separate heads take K^2 of each.
    """

    def __init__(self, geometry: ConvolutionGeometry, weight: Tensor, bias: Tensor | None, *, alpha: float) -> None:
        super().__init__(geometry, weight, bias)
        if isinstance(alpha, Tensor) and alpha.numel() != 1:
            raise ShapeError(f"SeparableQuadraticAttention: alpha must be a number, but has shape {tuple(alpha.shape)}")
        like = {"dtype": weight.dtype, "device": weight.device}
        axes = list(zip(geometry.kernel_size, geometry.dilation, strict=True))
        self.centres = nn.ParameterList(nn.Parameter(torch.arange(k, **like) * d) for k, d in axes)
        self.log_widths = nn.ParameterList(
            nn.Parameter(log_width(alpha).reshape(()).to(**like).expand(k).clone()) for k in geometry.kernel_size
        )

    def factors(self, grid: Sequence[int]) -> list[Tensor]:
        """The 1-D attention matrices of every axis: (K_a, queries_a, padded_a)."""
        g = self.geometry
        sides = zip(self.centres, self.log_widths, g.padded_size(grid), g.output_size(grid), g.stride, strict=True)
        heads = [
            quadratic((side,), centres.unsqueeze(-1), widths.unsqueeze(-1), queries=(queries,), stride=(stride,))
            for centres, widths, side, queries, stride in sides
        ]
        return [head.factors()[0].to(self.weight.dtype) for head in heads]

    def _forward(self, x: Tensor) -> Tensor:
        g, b = self.geometry, x.shape[0]
        first, *others = self.factors(x.shape[2:])
        x = g.pad(x).unflatten(1, (g.groups, 1, -1))  # (b, groups, kernel cells so far, in/groups, *padded)
        for axis, p in reversed(list(enumerate(others, start=1))):
            at = 4 + axis
            y = x.movedim(at, -1) @ p.flatten(0, 1).mT  # all K_a attentions in one product
            y = y.unflatten(-1, p.shape[:2]).movedim(-1, at).movedim(-1, 2)
            x = y.flatten(2, 3)
        outer, inner, k = self.out_channels // g.groups, g.in_channels // g.groups, g.kernel_size[0]
        # rows (out/groups, K_1), columns (the other kernel cells, in/groups): the order of the last product
        w = self.weight.reshape(g.groups, outer, inner, k, -1).permute(0, 1, 3, 4, 2)
        sides = x.shape[4:]
        y = w.reshape(g.groups, outer * k, -1) @ x.reshape(b, g.groups, -1, math.prod(sides))
        y = y.reshape(b, self.out_channels, k * sides[0], -1)
        rows = first.movedim(0, 1).flatten(1)  # (q_1, K_1 e_1)
        return self._add_bias((rows @ y).reshape(b, self.out_channels, rows.shape[0], *sides[1:]))

    def operator(self, grid: Sequence[int]) -> Positional:
        g = self.geometry
        centres = torch.cartesian_prod(*self.centres).reshape(g.heads, -1)
        widths = torch.cartesian_prod(*self.log_widths).reshape(g.heads, -1)
        return quadratic(g.padded_size(grid), centres, widths, queries=g.output_size(grid), stride=g.stride)

    def cost(self, grid: Sequence[int]) -> Cost:
        g, queries, sides = self.geometry, self.geometry.output_size(grid), list(self.geometry.padded_size(grid))
        copies, work, widest = g.in_channels, 0, 0
        for axis in reversed(range(1, len(sides))):
            copies *= g.kernel_size[axis]
            work += copies * math.prod(sides) * queries[axis]
            sides[axis] = queries[axis]
            widest = max(widest, copies * math.prod(sides))
        mixed = self.out_channels * g.kernel_size[0] * math.prod(sides)
        work += copies // g.groups * mixed + mixed * queries[0]
        return Cost(work, max(widest, mixed), len(sides) + 1)


class QuadraticAttention(KernelAttention):
    """Quadratic heads with a trainable centre and widths each (Cordonnier, Loukas & Jaggi 2020).

    Centres are cells of the padded grid relative to the query, so kernel cell i of a convolution is at dilation i.
    """

    def __init__(
        self,
        geometry: ConvolutionGeometry,
        weight: Tensor,
        bias: Tensor | None,
        *,
        centres: Tensor,
        log_widths: Tensor,
    ) -> None:
        super().__init__(geometry, weight, bias)
        same_kind("QuadraticAttention", weight=weight, centres=centres, log_widths=log_widths)
        expected = (geometry.heads, geometry.axes)
        if centres.shape != expected:
            raise ShapeError(
                f"QuadraticAttention: centres must be (heads {expected[0]}, axes {expected[1]}), but have shape "
                f"{tuple(centres.shape)}"
            )
        broadcasts_to("QuadraticAttention", "log_widths", log_widths, expected)
        self.centres = nn.Parameter(centres)
        self.log_widths = nn.Parameter(log_widths.expand(expected).clone())

    def operator(self, grid: Sequence[int]) -> Positional:
        g = self.geometry
        return quadratic(
            g.padded_size(grid), self.centres, self.log_widths, queries=g.output_size(grid), stride=g.stride
        )

    def cost(self, grid: Sequence[int]) -> Cost:
        g = self.geometry
        return self.operator(grid).cost(g.in_channels) + Cost(math.prod(g.output_size(grid)) * self.weight.numel())
