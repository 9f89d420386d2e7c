"""Builders with parameters: learned sequence projections E and F, and similarities that are networks.

`MultiHead(width, heads, build=LearnedProjection(projected, ...))`, `build=LearnedSimilarity(network)`.

    one for all heads, or one per head        heads=None | h
    one for keys and values, or one each      shared=True | False
    one for all layers, or one per layer      pass the same builder to every layer, or a new one to each

A sequence projection is learned for one length.  Shorter sequences use its first columns (`slice`), or any length uses
its columns interpolated (`interpolate`); projections of blocks, and convolutions, fit every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.projections import Projection, convolution, dense
from headwise.operators.similarity import Normalisation, similarity
from headwise.shapes import no_empty_axis, shown, truth_values, whole_numbers

Fit = Literal["slice", "interpolate"]
FromProjections = Callable[..., AttentionOperator]
"""`(q, k, e, f, **masks) -> operator`: `projected` or `factored`, or their block forms."""


class _LearnedMatrices(nn.Module):
    """E and F (r, columns), or (heads, r, columns), drawn from N(0, 1/r) as in Wang et al. 2020."""

    def __init__(
        self, operator: FromProjections, rank: int, *, heads: int | None, shared: bool, **columns: int
    ) -> None:
        super().__init__()
        ((name, size),) = columns.items()
        owner = type(self).__name__
        if not callable(operator):
            raise InputError(f"{owner}: operator must be a builder such as projected, but is {shown(operator)}")
        whole_numbers(owner, **columns)
        whole_numbers(owner, least=0, rank=rank)
        whole_numbers(owner, heads=1 if heads is None else heads)
        truth_values(owner, shared=shared)
        if not 1 <= rank <= size:
            raise ShapeError(f"{type(self).__name__}: rank must be between 1 and {name} = {size}, but is {rank}")
        self.operator, self.rank = operator, rank
        shape = (rank, size) if heads is None else (heads, rank, size)
        self.e = nn.Parameter(torch.randn(shape) / math.sqrt(rank))
        self.f = None if shared else nn.Parameter(torch.randn(shape) / math.sqrt(rank))


class LearnedProjection(_LearnedMatrices):
    """operator(q, k, E, F) with learned E and F (r, length).

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
        super().__init__(operator, rank, heads=heads, shared=shared, length=length)
        if fit not in ("slice", "interpolate"):
            raise InputError(f"LearnedProjection: fit must be 'slice' or 'interpolate', but is {fit!r}")
        self.length, self.fit = length, fit

    def forward(self, q: Tensor, k: Tensor, **masks: object) -> AttentionOperator:
        no_empty_axis("LearnedProjection", k=k)
        n = k.shape[-2]
        return self.operator(q, k, self.fitted(self.e, n), None if self.f is None else self.fitted(self.f, n), **masks)

    def fitted(self, matrix: Tensor, n: int) -> Projection:
        """The projection `matrix` (E or F) for n positions."""
        if n == self.length:
            return dense(matrix)
        if self.fit == "interpolate":
            rows = matrix.reshape(1, -1, self.length)
            # rows keep their sums, so projected keys and values keep their scale
            columns = F.interpolate(rows, size=n, mode="linear", align_corners=False) * (self.length / n)
            return dense(columns.reshape(*matrix.shape[:-1], n))
        if n > self.length:
            raise UnsupportedError(
                f"LearnedProjection: learned for at most {self.length} positions, but there are {n}; use "
                "fit='interpolate', a larger length, or LearnedBlocks"
            )
        return dense(matrix[..., :n])

    def extra_repr(self) -> str:
        name = getattr(self.operator, "__name__", self.operator)
        return f"{name}, length={self.length}, rank={self.rank}, shared={self.f is None}, fit={self.fit!r}"


class LearnedBlocks(_LearnedMatrices):
    """operator(q, k, E, F) with learned E and F (r, block), the same for all blocks: causal, any length."""

    def __init__(
        self, operator: FromProjections, block: int, rank: int, *, heads: int | None = None, shared: bool = True
    ) -> None:
        super().__init__(operator, rank, heads=heads, shared=shared, block=block)

    def forward(self, q: Tensor, k: Tensor, **masks: object) -> AttentionOperator:
        return self.operator(q, k, dense(self.e), None if self.f is None else dense(self.f), **masks)


class LearnedConvolution(nn.Module):
    """operator(q, k, E) with E a learned filter of `width` weights at every `stride`-th key: r = ceil(n / stride)."""

    def __init__(self, operator: FromProjections, stride: int, width: int | None = None) -> None:
        super().__init__()
        width = stride if width is None else width
        if not callable(operator):
            raise InputError(f"LearnedConvolution: operator must be a builder, but is {shown(operator)}")
        whole_numbers("LearnedConvolution", stride=stride, width=width)
        self.operator, self.stride = operator, stride
        self.weight = nn.Parameter(torch.full((width,), 1 / width))  # starts as the mean

    def forward(self, q: Tensor, k: Tensor, **masks: object) -> AttentionOperator:
        no_empty_axis("LearnedConvolution", k=k)
        return self.operator(q, k, convolution(k.shape[-2], self.stride, self.weight), **masks)


class LearnedSimilarity(nn.Module):
    """similarity(q, k, f) with an nn.Module f, whose parameters become those of the layer.

    >>> class Distance(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.reach = nn.Parameter(torch.ones(()))
    ...     def forward(self, q, k):  # (..., m, k), (..., n, k) -> (..., m, n)
    ...         return 1 / (self.reach.square() + torch.cdist(q, k).square())
    >>> from headwise.nn import MultiHead
    >>> layer = MultiHead(8, 2, build=LearnedSimilarity(Distance()))
    >>> layer(torch.randn(1, 5, 8)).sum().backward()
    >>> layer.build.f.reach.grad is not None
    True
    """

    def __init__(self, f: nn.Module, normalise: Normalisation = "sum", *, pair_cost: int | None = None) -> None:
        super().__init__()
        if not isinstance(f, nn.Module):
            raise InputError(
                f"LearnedSimilarity: f must be an nn.Module, but is {shown(f)}; for a function use "
                "functools.partial(similarity, f=f)"
            )
        self.f, self.pair_cost = f, pair_cost
        self.normalise: Normalisation = normalise

    def forward(self, q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
        return similarity(q, k, self.f, self.normalise, pair_cost=self.pair_cost, **masks)
