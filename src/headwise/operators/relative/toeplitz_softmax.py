"""P_ij = exp(l_(j - i)) M_ij / C_i, C_i = sum_j exp(l_(j - i)) M_ij: softmax attention by relative position alone.

Numerator and denominator are one Toeplitz matrix W applied to the masked values and to the mask, P = diag(1 / W M) W M.
A transform's error is relative to the largest weight: a row far below it would drown.  So the error each row could
suffer is bounded when P is built, |w|_2 sqrt(n) / min_i C_i in units of float64's rounding and of the largest value;
beyond what the dtype bears, and wherever numbers cannot be looked at (while torch.compile or vmap builds P), rows are
computed one block after the other.  By transform, a NaN among the values reaches every row, even a causal one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.row_chunks import adjoint_rows, apply_rows
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.masks import Visibility, share_between_heads, visibility
from headwise.operators.relative.toeplitz import by_fourier, check_weights, fourier_cost, short, windows
from headwise.shapes import all_finite, broadcast_batch


@final
@dataclass(frozen=True, eq=False)
class ToeplitzSoftmax(AttentionOperator):
    """P_ij = softmax over the visible j of l_(j - i): from j - i = -(m - 1), the bottom left corner, to n - 1.

    A logit of -inf is a relative position never looked at (a window); a row that sees nothing is zero.
    """

    logits: Tensor  # (*batch, m + n - 1)
    seen: Visibility
    fourier: bool  # by transforms, in float64; otherwise by blocks of rows

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.logits.shape[:-1], self.seen.batch)
        return torch.Size((*batch, self.seen.m, self.seen.n))

    @property
    def claims(self) -> frozenset[Claim]:
        promised = {Claim.NONNEGATIVE}
        if not bool(_empty_rows(self.logits, self.seen).any()):
            promised.add(Claim.STOCHASTIC)
        if self.seen.causal:
            promised.add(Claim.CAUSAL)
        return frozenset(promised)

    def apply(self, v: Tensor) -> Tensor:
        if not self.fourier:
            dtype = torch.promote_types(v.dtype, torch.float32)
            x = self.seen.hide(v).to(dtype)
            return apply_rows(self._rows(dtype), self.shape, x).to(v.dtype)
        w, sums = self._weights()
        x = self.seen.hide(v).to(torch.float64)
        return (by_fourier(w, x, self.seen.m) / sums).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """M W^T (u / C): the transpose of W is Toeplitz again, its weights reversed."""
        if not self.fourier:
            dtype = torch.promote_types(u.dtype, torch.float32)
            out = adjoint_rows(self._rows(dtype), self.shape, u.to(dtype))
        else:
            w, sums = self._weights()
            out = by_fourier(w.flip(-1), u.to(torch.float64) / sums, self.seen.n)
        return self.seen.hide(out).to(u.dtype)

    def dense(self, like: Tensor | None = None) -> Tensor:
        like = self.logits if like is None else like
        p = self._rows(torch.promote_types(like.dtype, torch.float32))(0, self.seen.m)
        return p.expand(self.shape).to(like)

    def cost(self, d: int) -> Cost:
        return self._cost(self.seen.m, self.seen.n, d)

    def adjoint_cost(self, d: int) -> Cost:
        return self._cost(self.seen.n, self.seen.m, d)

    def _cost(self, m: int, n: int, d: int) -> Cost:
        batch = self.shape[:-2].numel()
        if not self.fourier:
            return Cost(m * n * d, m * n).times(batch)
        # the transform of w is shared by sums and values, but they are two calls
        return (fourier_cost(m, n, d) + fourier_cost(m, n, 1)).times(batch)

    def _rows(self, dtype: torch.dtype):
        m, n = self.seen.m, self.seen.n

        def rows(start: int, stop: int) -> Tensor:
            scores = windows(self.logits.to(dtype), m, n, start, stop)
            scores = scores.masked_fill(~self.seen.rows(start, stop, scores.device), -math.inf)
            weights = (scores - _top(scores)).exp()
            # the largest weight of a row that sees anything is 1, so only an empty row is clamped
            return weights / weights.sum(-1, keepdim=True).clamp(min=1)

        return rows

    def _weights(self) -> tuple[Tensor, Tensor]:
        """w = exp(l - max l) and the row sums C (*batch, m, 1), infinite for empty rows."""
        w, sums, least = _weights_and_sums(self.logits, self.seen)
        return w, sums.masked_fill(sums <= least / 2, math.inf)


def _weights_and_sums(logits: Tensor, seen: Visibility) -> tuple[Tensor, Tensor, Tensor]:
    """w, the row sums C by transform, and the least C that a transform computes well enough for this dtype."""
    w = logits.to(torch.float64)
    w = (w - _top(w)).exp()
    mask = seen.hide(torch.ones(seen.n, 1, dtype=torch.float64, device=w.device))
    # half and single precision have 2^29 of float64's roundings to spare; among float64's own, 64 are allowed
    bearable = 2.0**6 if logits.dtype == torch.float64 else 2.0**24
    least = w.norm(dim=-1, keepdim=True).unsqueeze(-1) * (math.sqrt(seen.n) / bearable)
    return w, by_fourier(w, mask, seen.m), least


def _top(scores: Tensor) -> Tensor:
    """The largest of the last axis, zero where all are -inf: softmax does not change under this shift."""
    top = scores.detach().amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0)


def _empty_rows(logits: Tensor, seen: Visibility) -> Tensor:
    """True where a query sees no key with a finite logit: (*batch, m)"""
    # a count by transform errs by far less than 1/2
    looked_at = (logits.detach() > -math.inf).to(torch.float64)
    mask = seen.hide(torch.ones(seen.n, 1, dtype=torch.float64, device=logits.device))
    return by_fourier(looked_at, mask, seen.m).squeeze(-1) < 0.5


def _bears_transforms(logits: Tensor, seen: Visibility) -> bool:
    if short(seen.m, seen.n) or torch.compiler.is_compiling():
        return False
    with torch.no_grad():
        _, sums, least = _weights_and_sums(logits, seen)
        try:
            return bool(((sums.squeeze(-1) >= least.squeeze(-1)) | _empty_rows(logits, seen)).all())
        except RuntimeError:  # vmap refuses to look at values
            return False


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
        key_mask = share_between_heads(key_mask, logits.shape[:-1])
    seen = visibility(owner, m, n, causal=causal, key_mask=key_mask, device=logits.device)
    broadcast_batch(owner, logits=logits.shape[:-1], key_mask=seen.batch)
    if causal:  # key j <= i + n - m: a relative position of at most n - m, which is the n-th
        logits = logits.masked_fill(torch.arange(m + n - 1, device=logits.device) >= n, -math.inf)
    return ToeplitzSoftmax(logits, seen, _bears_transforms(logits, seen))
