"""P_ij = t_(j - i): weights that depend on relative position alone, applied in O((m + n) log(m + n) d) by FFT.

A Toeplitz matrix times a vector is a piece of a convolution, and a convolution is a product of Fourier transforms.  The
transform's error is relative to the largest weight, not to each row: eps log2(m + n) |t|_2 |v|_2 for each column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels.row_chunks import apply_rows
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.shapes import all_finite, same_axis, same_kind

SHORT = 256
"""Up to this many queries or keys, rows of P times v are faster than the transforms (measured on CPU, d = 1 to 64)."""


@final
@dataclass(frozen=True, eq=False)
class Toeplitz(AttentionOperator):
    """P_ij = weights_(j - i + m - 1): from j - i = -(m - 1), the bottom left corner, to n - 1, the top right one.

    >>> toeplitz(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2, 3).dense()
    tensor([[2., 3., 4.],
            [1., 2., 3.]])
    """

    weights: Tensor  # (*batch, m + n - 1)
    m: int
    n: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.weights.shape[:-1], self.m, self.n))

    @property
    def claims(self) -> frozenset[Claim]:
        promised, w = set(), self.weights.detach()
        if bool((w >= 0).all()):
            promised.add(Claim.NONNEGATIVE)
            # row sums are differences of one running sum; weights stored in this dtype cannot be closer to 1 than this
            sums = torch.nn.functional.pad(w.double().cumsum(-1), (1, 0))
            sums = sums[..., self.n :] - sums[..., : self.m]
            if bool(((sums - 1).abs() <= 16 * torch.finfo(w.dtype).eps).all()):
                promised.add(Claim.STOCHASTIC)
        if bool((w[..., self.n :] == 0).all()):
            promised.add(Claim.CAUSAL)
        if self.m == self.n and torch.equal(w, w.flip(-1)):
            promised.add(Claim.SYMMETRIC)
        return frozenset(promised)

    def apply(self, v: Tensor) -> Tensor:
        dtype = torch.promote_types(v.dtype, torch.float32)  # no transform in half precision
        w, x = self.weights.to(dtype), v.to(dtype)
        if short(self.m, self.n):
            return apply_rows(lambda start, stop: windows(w, self.m, self.n, start, stop), self.shape, x).to(v.dtype)
        return by_fourier(w, x, self.m).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """P^T is Toeplitz again, its weights reversed."""
        return Toeplitz(self.weights.flip(-1), self.n, self.m).apply(u)

    def dense(self, like: Tensor | None = None) -> Tensor:
        return windows(self.weights, self.m, self.n, 0, self.m).to(self.weights if like is None else like)

    def cost(self, d: int) -> Cost:
        batch = self.weights.shape[:-1].numel()
        if short(self.m, self.n):
            return Cost(self.m * self.n * d, self.m * self.n).times(batch)
        return fourier_cost(self.m, self.n, d).times(batch)


def short(m: int, n: int) -> bool:
    """Whether rows of P are the faster way."""
    return min(m, n) <= SHORT


def windows(w: Tensor, m: int, n: int, start: int, stop: int) -> Tensor:
    """Rows start..stop of the matrix: (*batch, m + n - 1) -> (*batch, stop - start, n)"""
    return w[..., m - stop : m - start + n - 1].unfold(-1, n, 1).flip(-2)


def by_fourier(w: Tensor, v: Tensor, m: int) -> Tensor:
    """(P v)_i = (reversed w * v)_(n - 1 + i), a convolution: (*batch, m + n - 1), (*batch, n, d) -> (*batch, m, d)"""
    n = v.shape[-2]
    size = smooth(m + n - 1)  # what wraps around lands before n - 1, where nothing is read
    spectrum = torch.fft.rfft(w.flip(-1), size).unsqueeze(-1) * torch.fft.rfft(v, size, dim=-2)
    return torch.fft.irfft(spectrum, size, dim=-2)[..., n - 1 : n - 1 + m, :]


def fourier_cost(m: int, n: int, d: int) -> Cost:
    """Transforms of w, of v and back, L log2 L each, and a product for each frequency."""
    size = smooth(m + n - 1)
    frequencies = size // 2 + 1
    transforms = (2 * d + 1) * size * math.ceil(math.log2(size))
    return Cost(transforms + frequencies * d, 2 * frequencies * (2 * d + 1), math.ceil(math.log2(size)))


def smooth(size: int) -> int:
    """The least number >= size with no prime factor above 5, for which the transform is fast.

    >>> smooth(1023), smooth(1025)
    (1024, 1080)
    """
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1


def toeplitz(weights: Tensor, m: int, n: int) -> Toeplitz:
    """P_ij = t_(j - i) from weights (*batch, m + n - 1), which begin at j - i = -(m - 1)."""
    check_weights("Toeplitz", weights, m, n)
    all_finite("Toeplitz", weights=weights)
    return Toeplitz(weights, m, n)


def check_weights(owner: str, weights: Tensor, m: int, n: int) -> None:
    if m < 1 or n < 1:
        raise ShapeError(f"{owner}: m has {m}, n has {n}: an empty axis has no attention")
    if weights.dim() < 1 or 0 in weights.shape:
        raise ShapeError(f"{owner}: weights must be (*batch, m + n - 1), but have shape {tuple(weights.shape)}")
    same_axis(owner, "m + n - 1", **{f"m = {m} and n = {n}": m + n - 1}, weights=weights.shape[-1])
    same_kind(owner, weights=weights)
