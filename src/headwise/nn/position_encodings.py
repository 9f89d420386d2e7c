"""What attention knows of places: r_d and s_d of a difference d = k - q, or p of a cell, with learned parameters.

    QuadraticEncoding     e_d = (|d|^2, d),  s_d = -sum_a (d_a - centre_a)^2 / (2 width_a^2)
    SinusoidalEncoding    e_d sines and cosines of d,  s_d = v . r_d / sqrt(k)
    LearnedEncoding       e_d learned for each d,      s_d = v . r_d / sqrt(k)
    AbsoluteEncoding      no r_d and s_d, but p for each cell: sines and cosines, or learned

r_d = e_d W~_k meets the content of a query, s_d is added to its score.  `RelativeAttention` puts them together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError
from headwise.operators.relative.encodings import cells, quadratic_encoding, sinusoidal
from headwise.operators.relative.quadratic import log_width
from headwise.shapes import same_axis, truth_values, whole_numbers, whole_tuple


class PositionEncoding(nn.Module):
    """What a RelativeAttention knows of places: `heads` heads of width `key_width` on maps of `axes` axes.

    `shared` is added to the input of queries and keys; `terms` are r_d (h, t, k) and s_d (h, t) of t differences d.
    """

    def __init__(self, heads: int, axes: int, key_width: int, channels: int, content: bool) -> None:
        super().__init__()
        owner = type(self).__name__
        whole_numbers(owner, heads=heads, axes=axes, key_width=key_width, channels=channels)
        truth_values(owner, content=content)
        self.heads, self.axes, self.key_width, self.channels, self.content = heads, axes, key_width, channels, content

    def shared(self, grid: Sequence[int], like: Tensor) -> Tensor | None:
        """p (n, channels), or None."""
        return None

    def terms(self, offsets: Tensor, reach: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """r_d and s_d for offsets (t, D) in whole cells, at most `reach` along each axis; None is zero.

        With content, either both or none.
        """
        return None, None


class QuadraticEncoding(PositionEncoding):
    """Each head has a centre in cells, drawn around the query, and a width for each axis, alpha = 1 / (2 width^2)."""

    def __init__(self, heads: int, axes: int, key_width: int, channels: int, content: bool, alpha: float = 1.0) -> None:
        super().__init__(heads, axes, key_width, channels, content)
        self.centres = nn.Parameter(torch.randn(heads, axes))
        if isinstance(alpha, Tensor) and alpha.numel() != 1:
            raise ShapeError(f"QuadraticEncoding: alpha must be a number, but has shape {tuple(alpha.shape)}")
        self.log_widths = nn.Parameter(log_width(alpha).reshape(()).expand(heads, axes).clone())
        # |d|^2 is large: the content of a query shifts its scores by little at first
        self.weight = nn.Parameter(0.01 * torch.randn(heads, 1 + axes, key_width)) if content else None

    def terms(self, offsets: Tensor, reach: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        compute = torch.promote_types(self.centres.dtype, torch.float32)  # |d|^2 is soon beyond half precision
        offsets, centres, log_widths = (y.to(compute) for y in (offsets, self.centres, self.log_widths))
        away = (offsets - centres.unsqueeze(-2)) / log_widths.exp().unsqueeze(-2)
        r = None if self.weight is None else quadratic_encoding(offsets) @ self.weight.to(compute)
        return r, -away.square().sum(-1) / 2


class _ProjectedEncoding(PositionEncoding, ABC):
    """r_d = e_d W~_k and s_d = v . r_d / sqrt(k) with e_d of `width` columns."""

    def __init__(self, heads: int, axes: int, key_width: int, channels: int, content: bool, width: int) -> None:
        super().__init__(heads, axes, key_width, channels, content)
        whole_numbers(type(self).__name__, width=width)
        self.weight = nn.Parameter(torch.randn(heads, width, key_width) / math.sqrt(width))
        self.place = nn.Parameter(torch.randn(heads, key_width) / math.sqrt(key_width))

    @abstractmethod
    def encodings(self, offsets: Tensor, reach: Sequence[int]) -> Tensor:
        """e_d (t, width)"""

    def terms(self, offsets: Tensor, reach: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        r = self.encodings(offsets, reach) @ self.weight
        return r, (r @ self.place.unsqueeze(-1)).squeeze(-1) / math.sqrt(self.key_width)


class SinusoidalEncoding(_ProjectedEncoding):
    """e_d are sines and cosines of the differences along each axis; `width` is a multiple of twice the axes."""

    def __init__(self, heads: int, axes: int, key_width: int, channels: int, content: bool, width: int = 24) -> None:
        super().__init__(heads, axes, key_width, channels, content, width)
        sinusoidal(torch.zeros(1, axes), width)  # raises if the width does not fit
        self.width = width

    def encodings(self, offsets: Tensor, reach: Sequence[int]) -> Tensor:
        return sinusoidal(offsets.to(self.weight.dtype), self.width)


class LearnedEncoding(_ProjectedEncoding):
    """e_d is a parameter for every difference of two cells of `grid`, the largest map that the layer will take."""

    def __init__(
        self,
        heads: int,
        axes: int,
        key_width: int,
        channels: int,
        content: bool,
        *,
        grid: Sequence[int],
        width: int = 16,
    ) -> None:
        super().__init__(heads, axes, key_width, channels, content, width)
        self.grid = _checked_grid("LearnedEncoding", grid, axes)
        self.table = nn.Parameter(torch.randn(*(2 * g - 1 for g in self.grid), width) / math.sqrt(width))

    def encodings(self, offsets: Tensor, reach: Sequence[int]) -> Tensor:
        if any(r >= g for r, g in zip(reach, self.grid, strict=True)):
            raise ShapeError(
                f"LearnedEncoding: learned for maps up to {self.grid}, but cells are {tuple(reach)} apart; make it "
                "with a larger grid, or use sinusoidal or quadratic encodings"
            )
        return self.table[tuple((offsets + torch.tensor(self.grid, device=offsets.device) - 1).unbind(-1))]


class AbsoluteEncoding(PositionEncoding):
    """p_k, added where queries and keys come from: sines and cosines of the cell, or learned for maps up to `grid`."""

    def __init__(
        self,
        heads: int,
        axes: int,
        key_width: int,
        channels: int,
        content: bool,
        *,
        grid: Sequence[int] | None = None,
    ) -> None:
        super().__init__(heads, axes, key_width, channels, content)
        if not content:
            raise InputError(
                "AbsoluteEncoding: places are added to content, but content is False; use another encoding"
            )
        self.grid = None if grid is None else _checked_grid("AbsoluteEncoding", grid, axes)
        if self.grid is None:
            sinusoidal(torch.zeros(1, axes), channels)  # raises if the channels do not divide by the axes
        self.table = None if self.grid is None else nn.Parameter(0.02 * torch.randn(*self.grid, channels))

    def shared(self, grid: Sequence[int], like: Tensor) -> Tensor | None:
        if self.table is None or self.grid is None:
            return sinusoidal(cells(grid).to(like), self.channels)
        if any(side > g for side, g in zip(grid, self.grid, strict=True)):
            raise ShapeError(f"AbsoluteEncoding: learned for maps up to {self.grid}, but this one has {tuple(grid)}")
        return self.table[tuple(slice(side) for side in grid)].flatten(0, -2)


Encoding = Callable[..., PositionEncoding]
"""(heads, axes, key_width, channels, content) -> encoding: one of the classes above, or a partial of it."""


def _checked_grid(owner: str, grid: Sequence[int], axes: int) -> tuple[int, ...]:
    grid = whole_tuple(owner, "grid", grid)
    same_axis(owner, "dimension", grid=len(grid), layer=axes)
    return grid
