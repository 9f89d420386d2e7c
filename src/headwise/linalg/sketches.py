"""S in R^(k x n), k << n: short summaries of long sequences that keep inner products on average, E[S^T S] = I.

    sketch        entries                                    multiply-adds for d columns
    gaussian      N(0, 1/k)                                  k n d
    sign          +-1/sqrt(k)                                k n d
    count         one +-1 in every column                    n d
    hadamard      +-1/sqrt(k), k rows of a Hadamard matrix   N log2 N d, N the power of two from n up
    pooling       means of k equal segments (not random)     n d

All randomness is drawn by the builder, so that a sketch is one matrix: `apply` twice agrees and `adjoint` is its
transpose.  Only the last three make a projected attention's cost independent of k.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.shapes import same_axis


class Sketch(ABC):
    """A k x n matrix S, known by what it does to sequences (*batch, n, d)."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(k, n)"""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """S x: (*batch, n, d) -> (*batch, k, d), in x's dtype."""

    @abstractmethod
    def adjoint(self, u: Tensor) -> Tensor:
        """S^T u: (*batch, k, d) -> (*batch, n, d), in u's dtype."""

    @abstractmethod
    def cost(self, d: int) -> Cost:
        """What one `apply` to a single sequence of width d costs."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the dtype and device S was drawn in."""

    def dense(self) -> Tensor:
        """S as a tensor (k, n)."""
        return self.apply(torch.eye(self.shape[-1], dtype=self.like.dtype, device=self.like.device))

    def __call__(self, x: Tensor) -> Tensor:
        """S x with its axis checked."""
        same_axis(type(self).__name__, "n", sketch=self.shape[-1], x=x.shape[-2] if x.dim() > 1 else x.numel())
        return self.apply(x)


@final
@dataclass(frozen=True, eq=False)
class DenseSketch(Sketch):
    """S given by its entries: the Gaussian and the sign sketch, or a learned projection."""

    matrix: Tensor  # (k, n)

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def like(self) -> Tensor:
        return self.matrix

    def apply(self, x: Tensor) -> Tensor:
        return self.matrix.to(x.dtype) @ x

    def adjoint(self, u: Tensor) -> Tensor:
        return self.matrix.mT.to(u.dtype) @ u

    def cost(self, d: int) -> Cost:
        return Cost(self.matrix.numel() * d)


@final
@dataclass(frozen=True, eq=False)
class SegmentSketch(Sketch):
    """S_ij = weights_j if rows_j = i, else 0: each position goes to one slot.  CountSketch and pooling, O(n d)."""

    rows: Tensor  # (n,) int64, the slot of every position
    weights: Tensor  # (n,)
    slots: int  # k

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.slots, self.rows.shape[0]))

    @property
    def like(self) -> Tensor:
        return self.weights

    def apply(self, x: Tensor) -> Tensor:
        # long sums lose everything in half precision, so they are taken in float32
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        sums = wide.new_zeros(*x.shape[:-2], self.slots, x.shape[-1])
        return sums.index_add(-2, self.rows, wide * self.weights.to(wide.dtype).unsqueeze(-1)).to(x.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        return u.index_select(-2, self.rows) * self.weights.to(u.dtype).unsqueeze(-1)

    def cost(self, d: int) -> Cost:
        return Cost(self.rows.shape[0] * d)


@final
@dataclass(frozen=True, eq=False)
class HadamardSketch(Sketch):
    """S = R H D / sqrt(k): random signs D, the N x N Hadamard matrix H by the fast transform, k of its rows R."""

    signs: Tensor  # (n,)
    rows: Tensor  # (k,) int64, distinct, below N
    padded: int  # N

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows.shape[0], self.signs.shape[0]))

    @property
    def like(self) -> Tensor:
        return self.signs

    def apply(self, x: Tensor) -> Tensor:
        x = x * self.signs.to(x.dtype).unsqueeze(-1)
        x = torch.nn.functional.pad(x, (0, 0, 0, self.padded - x.shape[-2]))
        # scaled before the sums, which would overflow half precision
        return hadamard_transform(x / math.sqrt(self.shape[0])).index_select(-2, self.rows)

    def adjoint(self, u: Tensor) -> Tensor:
        full = u.new_zeros(*u.shape[:-2], self.padded, u.shape[-1])
        x = hadamard_transform(full.index_add(-2, self.rows, u / math.sqrt(self.shape[0])))
        return x[..., : self.shape[-1], :] * self.signs.to(u.dtype).unsqueeze(-1)

    def cost(self, d: int) -> Cost:
        """Additions are counted as multiply-adds: log2 N for each of the N padded positions."""
        levels = self.padded.bit_length() - 1
        return Cost(self.padded * levels * d, self.padded * d, depth=max(1, levels))


def hadamard_transform(x: Tensor) -> Tensor:  # (*batch, N, d), N a power of two
    """H x, H = [[1, 1], [1, -1]] (x) ... (x) [[1, 1], [1, -1]], in N log2 N additions a column (Yates 1937).

    >>> hadamard_transform(torch.eye(2)).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    shape, size, half = x.shape, x.shape[-2], 1
    if size & (size - 1):
        raise ShapeError(f"hadamard_transform: axis 'n' must be a power of two, but is {size}; pad it with zeros")
    while half < size:
        a, b = x.reshape(*shape[:-2], size // (2 * half), 2, half, shape[-1]).unbind(-3)
        x, half = torch.stack((a + b, a - b), dim=-3), 2 * half
    return x.reshape(shape)


def gaussian(k: int, n: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Sketch:
    """S_ij ~ N(0, 1/k) independent (Johnson & Lindenstrauss 1984)."""
    _sizes("gaussian", k, n)
    device = None if generator is None else generator.device
    return DenseSketch(torch.randn(k, n, generator=generator, device=device, dtype=dtype) / math.sqrt(k))


def sign(k: int, n: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Sketch:
    """S_ij = +-1/sqrt(k) independent (Achlioptas 2003)."""
    _sizes("sign", k, n)
    return DenseSketch(_signs((k, n), generator, dtype) / math.sqrt(k))


def count(k: int, n: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Sketch:
    """CountSketch: position j is added to one random slot with a random sign (Charikar, Chen & Farach-Colton 2002)."""
    _sizes("count", k, n)
    device = None if generator is None else generator.device
    rows = torch.randint(k, (n,), generator=generator, device=device)
    return SegmentSketch(rows, _signs((n,), generator, dtype), k)


def hadamard(k: int, n: int, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Sketch:
    """Subsampled randomised Hadamard transform (Ailon & Chazelle 2006; Tropp 2011); any n, by zeros up to N = 2^p."""
    _sizes("hadamard", k, n)
    padded = 1 << (n - 1).bit_length()
    if k > padded:
        raise ShapeError(
            f"hadamard: axis 'k' must be at most N = {padded}, the power of two from n = {n} up, but is {k}"
        )
    device = None if generator is None else generator.device
    rows = torch.randperm(padded, generator=generator, device=device)[:k]
    return HadamardSketch(_signs((n,), generator, dtype), rows, padded)


def pooling(k: int, n: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Sketch:
    """Means of k consecutive segments whose lengths differ by at most one; any n >= k.  S 1 = 1, S S^T is diagonal.

    Not random, and E[S^T S] = I does not hold: it keeps what is smooth along the sequence and drops the rest.

    >>> pooling(2, 5).dense() @ torch.arange(5.0)
    tensor([0.5000, 3.0000])
    """
    _sizes("pooling", k, n)
    if k > n:
        raise ShapeError(f"pooling: axis 'k' must be at most n = {n}, or segments are empty, but is {k}")
    # segment i is [i n // k, (i + 1) n // k)
    ends = torch.arange(1, k + 1, device=device) * n // k
    lengths = ends.diff(prepend=ends.new_zeros(1))
    rows = torch.repeat_interleave(torch.arange(k, device=device), lengths)
    return SegmentSketch(rows, (1 / lengths.to(dtype or torch.get_default_dtype()))[rows], k)


def _signs(shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype | None) -> Tensor:
    device = None if generator is None else generator.device
    bits = torch.randint(2, shape, generator=generator, device=device)
    return (2 * bits - 1).to(dtype or torch.get_default_dtype())


def _sizes(owner: str, k: int, n: int) -> None:
    if k < 1 or n < 1:
        raise ShapeError(f"{owner}: axes 'k' and 'n' must be positive, but k is {k} and n is {n}")
