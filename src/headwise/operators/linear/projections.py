"""E in R^(r x n), which shortens a sequence of n keys to r slots: dense and learned, or so sparse that it costs O(n d).

    Identity      r = n
    Dense         any matrix, learned (Linformer, Wang et al. 2020); O(n r d)
    Pooling       means of `size` consecutive positions; O(n d)
    CountSketch   one random sign a position, added into a random slot (Charikar et al. 2002); O(n d)
    Convolution   weights of a short filter that moves on by `stride`; O(n d) for a filter as long as its stride
    Hadamard      r random rows of the Walsh-Hadamard transform after random signs, times 1/sqrt(r); O(n d log n)

With a key mask, masked rows count as zeros (a mean is over the others), and a slot of masked positions only is empty.
Randomness is drawn when a projection is made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.operators.mask_support import not_exported
from headwise.shapes import filled, is_generator, same_kind, symbolic, whole_numbers


class Projection(ABC):
    """A linear map of sequences (*batch, n, c) -> (*batch, r, c)."""

    averages: ClassVar[bool] = False
    """Rows are >= 0 and sum to 1, so that P stays stochastic."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """r"""

    @property
    @abstractmethod
    def length(self) -> int:
        """n"""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """E x"""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """E^T y"""

    @abstractmethod
    def multiply_adds(self, columns: int) -> int:
        """Of one `apply` to `columns` columns in all, batch axes included."""

    def adjoint_multiply_adds(self, columns: int) -> int:
        return self.multiply_adds(columns)

    @abstractmethod
    def support(self, key_mask: Tensor) -> Tensor:
        """key_mask (*batch, n) -> (*batch, r), True at slots with at least one visible position."""

    @property
    def batch(self) -> torch.Size:
        return torch.Size()

    def counts(self, key_mask: Tensor) -> Tensor | None:
        """Visible positions of a slot as a share of all, by which means are divided; None for sums."""
        return None


@final
@dataclass(frozen=True, eq=False)
class Identity(Projection):
    """E = I."""

    averages: ClassVar[bool] = True

    n: int

    @property
    def slots(self) -> int:
        return self.n

    @property
    def length(self) -> int:
        return self.n

    def apply(self, x: Tensor) -> Tensor:
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        return y

    def multiply_adds(self, columns: int) -> int:
        return 0

    def support(self, key_mask: Tensor) -> Tensor:
        return key_mask


@final
@dataclass(frozen=True, eq=False)
class Dense(Projection):
    """E = matrix (*batch, r, n); with heads as the last batch axis, (h, r, n) is one for each head."""

    matrix: Tensor

    @property
    def slots(self) -> int:
        return self.matrix.shape[-2]

    @property
    def length(self) -> int:
        return self.matrix.shape[-1]

    @property
    def batch(self) -> torch.Size:
        return self.matrix.shape[:-2]

    def apply(self, x: Tensor) -> Tensor:
        return _times(self.matrix.to(x.dtype), x)

    def adjoint(self, y: Tensor) -> Tensor:
        return _times(self.matrix.to(y.dtype).mT, y)

    def multiply_adds(self, columns: int) -> int:
        return self.slots * self.length * columns

    def support(self, key_mask: Tensor) -> Tensor:
        return ((self.matrix.detach() != 0) & key_mask.unsqueeze(-2)).any(-1)


@final
@dataclass(frozen=True, eq=False)
class Pooling(Projection):
    """E_tj = 1 / (positions in segment t) for the `size` positions j of segment t; the last may be shorter."""

    averages: ClassVar[bool] = True

    n: int
    size: int

    @property
    def length(self) -> int:
        return self.n

    @property
    def slots(self) -> int:
        return -(-self.length // self.size)

    def apply(self, x: Tensor) -> Tensor:
        return self._segments(x).sum(-2) / self._sizes(x)

    def adjoint(self, y: Tensor) -> Tensor:
        return (y / self._sizes(y)).repeat_interleave(self.size, dim=-2)[..., : self.length, :]

    def multiply_adds(self, columns: int) -> int:
        return self.slots * self.size * columns

    def adjoint_multiply_adds(self, columns: int) -> int:
        return 0  # copies

    def support(self, key_mask: Tensor) -> Tensor:
        return self._segments(key_mask.unsqueeze(-1)).any(-2).squeeze(-1)

    def counts(self, key_mask: Tensor) -> Tensor:
        visible = self._segments(key_mask.unsqueeze(-1)).sum(-2).squeeze(-1)
        return visible.clamp(min=1).double() / self._sizes(key_mask).squeeze(-1)

    def _segments(self, x: Tensor) -> Tensor:
        return filled(x, (0, 0, 0, self.slots * self.size - self.length)).unflatten(-2, (self.slots, self.size))

    def _sizes(self, x: Tensor) -> Tensor:
        starts = torch.arange(0, self.length, self.size, device=x.device)
        return (self.length - starts).clamp(max=self.size).unsqueeze(-1)


@final
@dataclass(frozen=True, eq=False)
class CountSketch(Projection):
    """E_tj = sign_j where slot_j = t, else 0: one number a column, E^T E = I in expectation."""

    slot: Tensor  # (n,), integers below r
    sign: Tensor  # (n,), +1 or -1
    r: int

    @property
    def slots(self) -> int:
        return self.r

    @property
    def length(self) -> int:
        return self.slot.shape[0]

    def apply(self, x: Tensor) -> Tensor:
        empty = x.new_zeros(*x.shape[:-2], self.slots, x.shape[-1])
        return empty.index_add(-2, self.slot, x * self.sign.to(x.dtype).unsqueeze(-1))

    def adjoint(self, y: Tensor) -> Tensor:
        return y.index_select(-2, self.slot) * self.sign.to(y.dtype).unsqueeze(-1)

    def multiply_adds(self, columns: int) -> int:
        return self.length * columns

    def support(self, key_mask: Tensor) -> Tensor:
        empty = torch.zeros(*key_mask.shape[:-1], self.slots, device=key_mask.device)
        return empty.index_add(-1, self.slot, key_mask.float()) > 0


@final
@dataclass(frozen=True, eq=False)
class Convolution(Projection):
    """E_tj = weight_(j - t stride): a filter of w numbers that moves on by `stride`; r = ceil(n / stride).

    Positions beyond the end count as zeros.  `weight` is (w,), the same for every feature.
    """

    n: int
    stride: int
    weight: Tensor

    @property
    def length(self) -> int:
        return self.n

    @property
    def slots(self) -> int:
        return -(-self.length // self.stride)

    def apply(self, x: Tensor) -> Tensor:
        return (self._windows(x) * self.weight.to(x.dtype)).sum(-1)

    def adjoint(self, y: Tensor) -> Tensor:
        return torch.func.vjp(self.apply, y.new_zeros(*y.shape[:-2], self.length, y.shape[-1]))[1](y)[0]

    def multiply_adds(self, columns: int) -> int:
        return self.slots * self.weight.shape[0] * columns

    def support(self, key_mask: Tensor) -> Tensor:
        visible = self._windows(key_mask.float().unsqueeze(-1)).squeeze(-2)
        return (visible * (self.weight.detach() != 0)).sum(-1) > 0

    def _windows(self, x: Tensor) -> Tensor:
        """(*batch, n, c) -> (*batch, r, c, w)"""
        width = self.weight.shape[0]
        reach = (self.slots - 1) * self.stride + width
        x = filled(x, (0, 0, 0, max(0, reach - self.length)))[..., :reach, :]
        return x.unfold(-2, width, self.stride)


@final
@dataclass(frozen=True, eq=False)
class Hadamard(Projection):
    """E = 1/sqrt(r) R W D: random signs D, the Walsh-Hadamard transform W of +1 and -1, r of its rows R.

    Sequences are filled with zeros up to a power of two.  Ailon & Chazelle 2006 (the subsampled form).
    """

    sign: Tensor  # (n,), +1 or -1
    rows: Tensor  # (r,), rows of W

    @property
    def slots(self) -> int:
        return self.rows.shape[0]

    @property
    def length(self) -> int:
        return self.sign.shape[0]

    @property
    def steps(self) -> int:
        return max(1, (self.length - 1).bit_length())

    def apply(self, x: Tensor) -> Tensor:
        x = x * self.sign.to(x.dtype).unsqueeze(-1)
        x = self._transform(filled(x, (0, 0, 0, (1 << self.steps) - self.length)))
        return x.index_select(-2, self.rows) / math.sqrt(self.slots)

    def adjoint(self, y: Tensor) -> Tensor:
        empty = y.new_zeros(*y.shape[:-2], 1 << self.steps, y.shape[-1])
        y = self._transform(empty.index_add(-2, self.rows, y / math.sqrt(self.slots)))
        return y[..., : self.length, :] * self.sign.to(y.dtype).unsqueeze(-1)

    def _transform(self, x: Tensor) -> Tensor:
        """W x for x (*batch, 2^steps, c): one butterfly a bit."""
        for bit in range(self.steps):
            even, odd = x.unflatten(-2, (-1, 2, 1 << bit)).unbind(-3)
            x = torch.stack([even + odd, even - odd], dim=-3).flatten(-4, -2)
        return x

    def multiply_adds(self, columns: int) -> int:
        return self.length * columns  # signs; the butterflies only add

    def support(self, key_mask: Tensor) -> Tensor:
        return key_mask.any(-1, keepdim=True).expand(*key_mask.shape[:-1], self.slots)


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix @ x; one matrix for all heads is one large product, which is faster than many narrow ones."""
    if matrix.dim() > 2 or x.dim() == 2:
        return matrix @ x
    return torch.tensordot(matrix, x, dims=([1], [x.dim() - 2])).movedim(0, -2)  # pyright: ignore[reportArgumentType]


def identity(n: int) -> Identity:
    _check_sizes("Identity", n=n)
    return Identity(n)


def dense(matrix: Tensor) -> Dense:
    """A projection given as a matrix (*batch, r, n), learned or not."""
    same_kind("Dense", matrix=matrix)
    if matrix.dim() < 2 or 0 in matrix.shape:
        raise ShapeError(f"Dense: matrix must be (*batch, r, n), but has shape {tuple(matrix.shape)}")
    _check_sizes("Dense", r=matrix.shape[-2], n=matrix.shape[-1])
    return Dense(matrix)


def pooling(n: int, size: int) -> Pooling:
    """Means of `size` consecutive positions: r = ceil(n / size)."""
    _check_sizes("Pooling", n=n, size=size)
    return Pooling(n, min(size, n))


def count_sketch(n: int, r: int, *, generator: torch.Generator | None = None) -> CountSketch:
    """Every position into one of r slots, with a sign."""
    _check_sizes("CountSketch", n=n, r=r)
    is_generator("CountSketch", generator)
    slot = torch.randint(r, (n,), generator=generator)
    return CountSketch(slot, _signs(n, generator), r)


def convolution(n: int, stride: int, weight: Tensor) -> Convolution:
    """A filter `weight` (w,) that moves on by `stride`: r = ceil(n / stride)."""
    if symbolic(n):
        raise not_exported("convolution", "its blocks are cut for one length")
    _check_sizes("Convolution", n=n, stride=stride)
    same_kind("Convolution", weight=weight)
    if weight.dim() != 1 or weight.shape[0] < 1:
        raise ShapeError(f"Convolution: weight must be (w,), but has shape {tuple(weight.shape)}")
    return Convolution(n, stride, weight)


def hadamard(n: int, r: int, *, generator: torch.Generator | None = None) -> Hadamard:
    """r rows of a randomised Walsh-Hadamard transform."""
    _check_sizes("Hadamard", n=n, r=r)
    is_generator("Hadamard", generator)
    size = 1 << max(1, (n - 1).bit_length())
    return Hadamard(_signs(n, generator), torch.randperm(size, generator=generator)[:r])


def _signs(n: int, generator: torch.Generator | None) -> Tensor:
    return 2.0 * torch.randint(2, (n,), generator=generator) - 1.0


def _check_sizes(owner: str, *, n: int, r: int = 1, **sizes: int) -> None:
    """All sizes are at least 1, and r slots are not more than n keys."""
    whole_numbers(owner, n=n, r=r, **sizes)
    if r > n:
        raise ShapeError(f"{owner}: r = {r} slots for n = {n} keys shorten nothing; use r <= n, or identity({n})")
