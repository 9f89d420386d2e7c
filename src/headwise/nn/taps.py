"""Where the heads of a convolution look: tap t of query p at cell stride p + dilation t - padding of the input grid.

One value that both kinds of layer (hard shifts and soft quadratic heads) and the conversion share.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import final

import torch.nn.functional as F
from torch import Tensor

from headwise.errors import DtypeError, InputError, ShapeError
from headwise.operators.relative.shift import Border

FILL = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect", "circular": "circular"}
"""The name `torch.nn.functional.pad` has for each border."""


@final
@dataclass(frozen=True)
class Taps:
    """The geometry of a convolution: h = prod(kernel) heads on a grid of 1, 2 or 3 axes, in row-major order."""

    channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) each axis
    border: Border = "zeros"
    groups: int = 1

    def __post_init__(self) -> None:
        sizes = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation, "padding": self.padding}
        if {len(value) for value in sizes.values()} not in ({1}, {2}, {3}):
            raise InputError(f"Taps: one entry an axis and one to three axes are needed, but got {sizes}")
        if min(*self.kernel, *self.stride, *self.dilation, self.groups, self.channels) < 1:
            raise InputError(f"Taps: sizes must be at least 1, but got {self}")
        if min(itertools.chain(*self.padding)) < 0:
            raise InputError(f"Taps: padding must not be negative, but is {self.padding}")
        if self.border not in FILL:
            raise InputError(f"Taps: border must be one of {', '.join(FILL)}, but is {self.border!r}")
        if self.channels % self.groups:
            raise InputError(f"Taps: {self.channels} channels do not divide into {self.groups} groups")

    @property
    def heads(self) -> int:
        return math.prod(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance from the first tap to the last, each axis."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))

    def offsets(self) -> list[tuple[int, ...]]:
        """Where each head looks, relative to stride p, in cells of the unpadded grid."""
        axes = zip(self.kernel, self.dilation, self.padding, strict=True)
        return list(itertools.product(*([d * t - before for t in range(k)] for k, d, (before, _) in axes)))

    def extended(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(g + before + after for g, (before, after) in zip(grid, self.padding, strict=True))

    def queries(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The grid of the output."""
        wide = zip(self.extended(grid), self.reach, self.stride, strict=True)
        return tuple((e - reach - 1) // s + 1 for e, reach, s in wide)

    def extend(self, owner: str, x: Tensor, weight: Tensor) -> Tensor:
        """x checked and padded: (b, channels, *extended)."""
        self.check(owner, x, weight)
        return self.pad(x if x.dim() == len(self.kernel) + 2 else x.unsqueeze(0))

    def pad(self, x: Tensor) -> Tensor:
        """(b, channels, *grid) -> (b, channels, *extended), filled as the border says."""
        if not any(itertools.chain(*self.padding)):
            return x
        return F.pad(x, [side for pads in reversed(self.padding) for side in pads], mode=FILL[self.border])

    def check(self, owner: str, x: Tensor, weight: Tensor) -> None:
        """A sentence for every x that is not (b, channels, *grid) or (channels, *grid) with a map large enough."""
        axes = len(self.kernel)
        if x.dim() not in (axes + 1, axes + 2):
            raise ShapeError(
                f"{owner}: x must be (batch, {self.channels}, {axes} grid axes) or the same without batch, but has "
                f"shape {tuple(x.shape)}"
            )
        if x.shape[-1 - axes] != self.channels:
            raise ShapeError(
                f"{owner}: axis 'channels' must agree, but x has {x.shape[-1 - axes]}, the heads read {self.channels}"
            )
        if x.dtype != weight.dtype:
            raise DtypeError(f"{owner}: dtypes must agree, but x is {x.dtype}, the weights are {weight.dtype}")
        grid = tuple(x.shape[-axes:])
        if min(grid) < 1:
            raise ShapeError(f"{owner}: x has a map of size {grid}: an empty grid has no cell to look at")
        if min(self.queries(grid)) < 1:
            raise ShapeError(
                f"{owner}: taps reaching over {tuple(r + 1 for r in self.reach)} cells do not fit into a map of "
                f"{grid} padded to {self.extended(grid)}; use a larger map or more padding"
            )
        widest = {"reflect": -1, "circular": 0}.get(self.border)
        for axis, (g, pads) in enumerate(zip(grid, self.padding, strict=True)):
            if widest is not None and max(pads) > g + widest:
                raise ShapeError(
                    f"{owner}: {self.border} padding of {max(pads)} cells needs at least {max(pads) - widest} cells, "
                    f"but grid axis {axis} has {g}"
                )
