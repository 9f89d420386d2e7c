"""Learned sequence projections E and F as builders: `MultiHead(width, heads, build=LearnedProjection(projected, ...))`.

    one for all heads, or one a head        heads=None | h
    one for keys and values, or one each    shared=True | False
    one for all layers, or one a layer      the same builder given to every layer, or a new one to each

A sequence projection is learned for one length.  Shorter sequences use its first columns (`slice`), or any length uses
its columns interpolated (`interpolate`); a projection learned for blocks, and a convolution, fit every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.projections import Projection, convolution, dense

Fit = Literal["slice", "interpolate"]
FromProjections = Callable[..., AttentionOperator]
"""`(q, k, e, f, **masks) -> operator`: `projected` or `factored`, or their block forms."""


class LearnedProjection(nn.Module):
    """operator(q, k, E, F) with E and F (r, length) learned; Wang et al. 2020 initialise them as we do, N(0, 1/r).

    >>> from headwise.operators import projected
    >>> build = LearnedProjection(projected, length=16, rank=4)
    >>> build(torch.randn(2, 10, 8), torch.randn(2, 10, 8)).shape
    torch.Size([2, 10, 10])
    """

    def __init__(
        self,
        operator: FromProjections,
        length: int,
        rank: int,
        *,
        heads: int | None = None,
        shared: bool = True,
        fit: Fit = "slice",
    ) -> None:
        super().__init__()
        if not 1 <= rank <= length:
            raise ShapeError(f"LearnedProjection: rank must be between 1 and length = {length}, but is {rank}")
        if fit not in ("slice", "interpolate"):
            raise InputError(f"LearnedProjection: fit must be 'slice' or 'interpolate', but is {fit!r}")
        self.operator, self.length, self.rank, self.fit = operator, length, rank, fit
        shape = (rank, length) if heads is None else (heads, rank, length)
        self.e = nn.Parameter(torch.randn(shape) / math.sqrt(rank))
        self.f = None if shared else nn.Parameter(torch.randn(shape) / math.sqrt(rank))

    def forward(self, q: Tensor, k: Tensor, **masks: object) -> AttentionOperator:
        n = k.shape[-2]
        return self.operator(q, k, self.fitted(self.e, n), None if self.f is None else self.fitted(self.f, n), **masks)

    def fitted(self, matrix: Tensor, n: int) -> Projection:
        """Columns for n positions."""
        if n == self.length:
            return dense(matrix)
        if self.fit == "interpolate":
            wide = matrix.reshape(1, -1, self.length)
            # a row keeps its sum, so that slots stay as large as they were
            columns = F.interpolate(wide, size=n, mode="linear", align_corners=False) * (self.length / n)
            return dense(columns.reshape(*matrix.shape[:-1], n))
        if n > self.length:
            raise UnsupportedError(
                f"LearnedProjection: learned for at most {self.length} positions, but there are {n}; use "
                "fit='interpolate', a longer one, or LearnedBlocks"
            )
        return dense(matrix[..., :n])

    def extra_repr(self) -> str:
        name = getattr(self.operator, "__name__", self.operator)
        return f"{name}, length={self.length}, rank={self.rank}, shared={self.f is None}, fit={self.fit!r}"


class LearnedBlocks(nn.Module):
    """operator(q, k, E, F) with E and F (r, block) learned for one block, the same for all: causal, any length."""

    def __init__(
        self, operator: FromProjections, block: int, rank: int, *, heads: int | None = None, shared: bool = True
    ) -> None:
        super().__init__()
        if not 1 <= rank <= block:
            raise ShapeError(f"LearnedBlocks: rank must be between 1 and block = {block}, but is {rank}")
        self.operator = operator
        shape = (rank, block) if heads is None else (heads, rank, block)
        self.e = nn.Parameter(torch.randn(shape) / math.sqrt(rank))
        self.f = None if shared else nn.Parameter(torch.randn(shape) / math.sqrt(rank))

    def forward(self, q: Tensor, k: Tensor, **masks: object) -> AttentionOperator:
        return self.operator(q, k, dense(self.e), None if self.f is None else dense(self.f), **masks)


class LearnedConvolution(nn.Module):
    """operator(q, k, E) with E a learned filter of `width` numbers that moves on by `stride`: r = ceil(n / stride)."""

    def __init__(self, operator: FromProjections, stride: int, width: int | None = None) -> None:
        super().__init__()
        width = stride if width is None else width
        if stride < 1 or width < 1:
            raise ShapeError(f"LearnedConvolution: stride and width must be at least 1, but are {stride} and {width}")
        self.operator, self.stride = operator, stride
        self.weight = nn.Parameter(torch.full((width,), 1 / width))  # begins as the mean

    def forward(self, q: Tensor, k: Tensor, **masks: object) -> AttentionOperator:
        return self.operator(q, k, convolution(k.shape[-2], self.stride, self.weight), **masks)
