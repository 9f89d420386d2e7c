"""P_ij = t_(j - i): weights that depend on relative position alone, applied in O((m + n) log(m + n) d) by FFT.

A Toeplitz matrix times a vector is a piece of a convolution, and a convolution is a product of Fourier transforms.  The
transform's error is relative to the largest weight, not to each row: eps log2(m + n) |t|_2 |v|_2 for each column.

`toeplitz_softmax` is softmax attention by relative position, P_ij = exp(l_(j - i)) M_ij / C_i with C_i the sum of the
row: one Toeplitz matrix W applied to the masked values and to the mask, P = diag(1 / W M) W M.  A row far below the
largest weight would be lost in the transform's error, so |w|_2 sqrt(n) / min_i C_i bounds the error when P is built;
beyond what the dtype tolerates, and where values cannot be read (under torch.compile or vmap), blocks of rows are
computed instead.  By transform, a NaN among the values reaches every row, even a causal one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels import limits
from headwise.operators._kernels.row_chunks import adjoint_rows, apply_rows
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.masks import Mask, share_between_heads
from headwise.shapes import all_finite, are_tensors, broadcast_batch, same_axis, same_kind, whole_numbers


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


@final
@dataclass(frozen=True, eq=False)
class ToeplitzSoftmax(AttentionOperator):
    """P_ij = softmax over the visible j of l_(j - i): from j - i = -(m - 1), the bottom left corner, to n - 1.

    A logit of -inf masks a relative position (a window); a row without keys is zero.
    """

    logits: Tensor  # (*batch, m + n - 1)
    mask: Mask
    fourier: bool  # by transforms, in float64; otherwise by blocks of rows

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.logits.shape[:-1], self.mask.batch)
        return torch.Size((*batch, self.mask.m, self.mask.n))

    @property
    def claims(self) -> frozenset[Claim]:
        empty = bool(_empty_rows(self.logits, self.mask).any())
        return weights_claim(stochastic=not empty, causal=self.mask.causal)

    def apply(self, v: Tensor) -> Tensor:
        if not self.fourier:
            dtype = torch.promote_types(v.dtype, torch.float32)
            x = self.mask.hide(v).to(dtype)
            return apply_rows(self._rows(dtype), self.shape, x).to(v.dtype)
        w, sums = self._weights()
        x = self.mask.hide(v).to(torch.float64)
        return (by_fourier(w, x, self.mask.m) / sums).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """M W^T (u / C): the transpose of W is Toeplitz again, its weights reversed."""
        if not self.fourier:
            dtype = torch.promote_types(u.dtype, torch.float32)
            out = adjoint_rows(self._rows(dtype), self.shape, u.to(dtype))
        else:
            w, sums = self._weights()
            out = by_fourier(w.flip(-1), u.to(torch.float64) / sums, self.mask.n)
        return self.mask.hide(out).to(u.dtype)

    def dense(self, like: Tensor | None = None) -> Tensor:
        like = self.logits if like is None else like
        p = self._rows(torch.promote_types(like.dtype, torch.float32))(0, self.mask.m)
        return p.expand(self.shape).to(like)

    def cost(self, d: int) -> Cost:
        return self._cost(self.mask.m, self.mask.n, d)

    def adjoint_cost(self, d: int) -> Cost:
        return self._cost(self.mask.n, self.mask.m, d)

    def _cost(self, m: int, n: int, d: int) -> Cost:
        batch = self.shape[:-2].numel()
        if not self.fourier:
            return Cost(m * n * d, m * n).times(batch)
        # the transform of w is shared by sums and values, but they are two calls
        return (fourier_cost(m, n, d) + fourier_cost(m, n, 1)).times(batch)

    def _rows(self, dtype: torch.dtype):
        m, n = self.mask.m, self.mask.n

        def rows(start: int, stop: int) -> Tensor:
            scores = windows(self.logits.to(dtype), m, n, start, stop)
            scores = scores.masked_fill(~self.mask.rows(start, stop, scores.device), -math.inf)
            weights = (scores - _top(scores)).exp()
            # the largest weight of a row is 1, so only an empty row is clamped
            return weights / weights.sum(-1, keepdim=True).clamp(min=1)

        return rows

    def _weights(self) -> tuple[Tensor, Tensor]:
        """w = exp(l - max l) and the row sums C (*batch, m, 1), infinite for empty rows."""
        w, sums, least = _weights_and_sums(self.logits, self.mask)
        return w, sums.masked_fill(sums <= least / 2, math.inf)


def _weights_and_sums(logits: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """w, the row sums C by transform, and the least C that a transform computes well enough for this dtype."""
    w = logits.to(torch.float64)
    w = (w - _top(w)).exp()
    visible = mask.hide(torch.ones(mask.n, 1, dtype=torch.float64, device=w.device))
    # half and single precision have 2^29 float64 roundings to spare; in float64 itself, 64 are allowed
    bearable = 2.0**6 if logits.dtype == torch.float64 else 2.0**24
    least = w.norm(dim=-1, keepdim=True).unsqueeze(-1) * (math.sqrt(mask.n) / bearable)
    return w, by_fourier(w, visible, mask.m), least


def _top(scores: Tensor) -> Tensor:
    """The largest of the last axis, zero where all are -inf: softmax does not change under this shift."""
    top = scores.detach().amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0)


def _empty_rows(logits: Tensor, mask: Mask) -> Tensor:
    """True where a query attends to no key with a finite logit: (*batch, m)"""
    # a count by transform errs by far less than 1/2
    finite = (logits.detach() > -math.inf).to(torch.float64)
    visible = mask.hide(torch.ones(mask.n, 1, dtype=torch.float64, device=logits.device))
    return by_fourier(finite, visible, mask.m).squeeze(-1) < 0.5


def _bears_transforms(logits: Tensor, mask: Mask) -> bool:
    if short(mask.m, mask.n) or torch.compiler.is_compiling():
        return False
    with torch.no_grad():
        _, sums, least = _weights_and_sums(logits, mask)
        try:
            return bool(((sums.squeeze(-1) >= least.squeeze(-1)) | _empty_rows(logits, mask)).all())
        except RuntimeError:  # vmap refuses to read values
            return False


@supports(instead="toeplitz_softmax, or softmax with attn_bias")
def toeplitz(weights: Tensor, m: int, n: int) -> Toeplitz:
    """P_ij = t_(j - i) from weights (*batch, m + n - 1), which begin at j - i = -(m - 1)."""
    check_weights("Toeplitz", weights, m, n)
    all_finite("Toeplitz", weights=weights)
    return Toeplitz(weights, m, n)


@supports(CAUSAL, KEY_MASK, one_length="its transforms are of one length")
def toeplitz_softmax(
    logits: Tensor, m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None
) -> ToeplitzSoftmax:
    """P_ij = softmax over the visible j of l_(j - i), from logits (*batch, m + n - 1) that begin at j - i = -(m - 1).

    >>> toeplitz_softmax(torch.zeros(3), 2, 2, causal=True).dense()
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    owner = "ToeplitzSoftmax"
    check_weights(owner, logits, m, n)
    # -inf is a mask; NaN and +inf are mistakes
    all_finite(owner, logits=logits.clamp(min=torch.finfo(logits.dtype).min))
    if key_mask is not None:
        are_tensors(owner, key_mask=key_mask)
        key_mask = share_between_heads(key_mask, logits.shape[:-1])
    mask = Mask.checked(owner, m, n, causal=causal, key_mask=key_mask, device=logits.device)
    broadcast_batch(owner, logits=logits.shape[:-1], key_mask=mask.batch)
    if causal:  # key j <= i + n - m: a relative position of at most n - m, which is the n-th
        logits = logits.masked_fill(torch.arange(m + n - 1, device=logits.device) >= n, -math.inf)
    return ToeplitzSoftmax(logits, mask, _bears_transforms(logits, mask))


def short(m: int, n: int) -> bool:
    """Whether rows of P are faster than transforms."""
    return min(m, n) <= limits.SHORT_TOEPLITZ


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


def check_weights(owner: str, weights: Tensor, m: int, n: int) -> None:
    whole_numbers(owner, least=0, m=m, n=n)
    if m < 1 or n < 1:
        raise ShapeError(f"{owner}: m has {m}, n has {n}: an empty axis has no attention")
    are_tensors(owner, weights=weights)
    if weights.dim() < 1 or 0 in weights.shape:
        raise ShapeError(f"{owner}: weights must be (*batch, m + n - 1), but have shape {tuple(weights.shape)}")
    same_axis(owner, "m + n - 1", **{f"m = {m} and n = {n}": m + n - 1}, weights=weights.shape[-1])
    same_kind(owner, weights=weights)
