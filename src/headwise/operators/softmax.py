"""P = softmax_rows(s Q K^T + bias), the exact attention of Vaswani et al. 2017, never formed except in `dense`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import DtypeError, ShapeError
from headwise.linalg.krylov import Spectrum, singular_values
from headwise.operators._kernels.scores import WIDEST, Scores, attend, attend_with_lse, row_maxima
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.shapes import all_finite, broadcast_batch, broadcasts_to, no_empty_axis, same_axis, same_kind


@final
@dataclass(frozen=True, eq=False)
class Softmax(AttentionOperator):
    """P_ij = exp(S_ij - lse_i), S the scores, lse_i = log sum_j exp(S_ij).  Rows that see no key are zero."""

    scores: Scores

    @property
    def shape(self) -> torch.Size:
        return self.scores.shape

    @property
    def like(self) -> Tensor:
        return self.scores.q

    @property
    def claims(self) -> frozenset[Claim]:
        causal = {Claim.CAUSAL} if self.scores.ahead is not None else set()
        silent = self.scores.silent_rows()
        if silent is not None and bool(silent.any()):
            return frozenset({Claim.NONNEGATIVE, *causal})
        return frozenset({Claim.STOCHASTIC, Claim.NONNEGATIVE, *causal})

    def apply(self, v: Tensor) -> Tensor:
        return attend(self.scores, v)

    def adjoint(self, u: Tensor) -> Tensor:
        """P^T u is attention again: columns become rows of S^T - lse, whose own log-sum-exps are P's column sums."""
        scores = self._in(torch.promote_types(u.dtype, torch.float32))  # lse is not a half-precision number
        return self._adjoint_with(scores, attend_with_lse(scores, scores.k)[1], u)

    def _adjoint_with(self, scores: Scores, lse: Tensor, u: Tensor) -> Tensor:
        # a silenced row is masked in every column already, so any finite value will do in its place
        turned = scores.transposed(minus=lse.masked_fill(lse == -math.inf, 0))
        u = u.to(scores.q.dtype)
        out, log_sums = attend_with_lse(turned, u if scores.ahead is None else u.flip(-2))
        out = out * log_sums.exp().unsqueeze(-1)
        return (out if scores.ahead is None else out.flip(-2)).to(self.like.dtype)

    def spectrum(self, r: int, *, generator: torch.Generator | None = None) -> Spectrum:
        """As for every operator, but the log-sum-exps are found once for all adjoints: a third of the sweeps saved."""
        with torch.no_grad():
            scores = self._in(torch.promote_types(self.like.dtype, torch.float32))
            lse = attend_with_lse(scores, scores.k)[1]
        adjoint = partial(self._adjoint_with, scores, lse)
        return singular_values(self.apply, adjoint, self.shape, r, like=self.like, generator=generator)

    def dense(self, like: Tensor | None = None) -> Tensor:
        p = torch.softmax(self.scores.dense(), dim=-1)
        silent = self.scores.silent_rows()
        if silent is not None:
            p = p.masked_fill(silent.unsqueeze(-1), 0)
        return p if like is None else p.to(like)

    def cost(self, d: int) -> Cost:
        """Scores and weighted sums, both as wide as the wider of keys and values; causal ones counted in full."""
        *batch, m, n = self.shape
        width = self.scores.q.shape[-1]
        calls = [min(WIDEST, d - start) for start in range(0, d, WIDEST)]
        return Cost(math.prod(batch) * m * n * sum(2 * max(width, call) for call in calls), math.prod(batch) * m)

    def adjoint_cost(self, d: int) -> Cost:
        """One sweep with the keys as values for the log-sum-exps, one for the transposed scores."""
        return self.cost(self.scores.q.shape[-1]) + self.cost(d)

    def log_sum_exp(self) -> Tensor:
        """lse_i = log sum_j exp(S_ij), (*batch, m); -inf where row i sees no key."""
        return attend_with_lse(self.scores, self.scores.k)[1]

    def entropy(self) -> Tensor:
        """-sum_j P_ij log P_ij = lse_i - <P, S>_i, (*batch, m), in nats; one call with the keys as values.

        With a bias, <P, bias>_i has no such short cut and the rows are computed in chunks.
        """
        if self.scores.bias is not None:
            return self._entropy_in_chunks()
        keys, lse = attend_with_lse(self.scores, self.scores.k)
        entropy = lse - self.scores.scale * (self.scores.q * keys).sum(-1)
        return entropy.masked_fill(lse == -math.inf, 0).clamp(min=0)

    def _entropy_in_chunks(self) -> Tensor:
        parts = []
        for start, stop in self.scores.chunks():
            scores = self.scores.rows(start, stop).dense()
            lse = torch.logsumexp(scores, dim=-1)
            level = lse.masked_fill(lse == -math.inf, 0)  # a silenced row is all zeros, whatever is subtracted
            # scores of -inf leave before they are multiplied: 0 * inf would poison the gradient
            mean = ((scores - level.unsqueeze(-1)).exp() * scores.masked_fill(scores == -math.inf, 0)).sum(-1)
            parts.append((level - mean).clamp(min=0))
        return torch.cat(parts, dim=-1)

    def frobenius(self) -> Tensor:
        """||P||_F = sqrt(sum_i exp(lse_i(2 S) - 2 lse_i(S))), (*batch,)."""
        lse = self.log_sum_exp()
        twice = attend_with_lse(self.scores.doubled(), self.scores.k)[1]
        return (twice - 2 * lse.masked_fill(lse == -math.inf, 0)).exp().sum(-1).sqrt()

    def row_maxima(self) -> Tensor:
        """max_j P_ij = exp(max_j S_ij - lse_i), (*batch, m): one is a query that has made up its mind."""
        lse = self.log_sum_exp()
        return (row_maxima(self.scores) - lse.masked_fill(lse == -math.inf, 0)).exp()

    def largest_score(self) -> Tensor:
        """max_ij S_ij, (*batch,): what overflows first in half precision."""
        return row_maxima(self.scores).amax(-1)

    def _in(self, dtype: torch.dtype) -> Scores:
        s = self.scores
        bias = None if s.bias is None else s.bias.to(dtype)
        return Scores(s.q.to(dtype), s.k.to(dtype), s.scale, s.ahead, s.keep, bias)


def softmax(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Softmax:
    """P = softmax_rows(scale q k^T + bias) from q (*batch, m, k) and k (*batch, n, k); scale is 1/sqrt(k) by default.

    causal   row i sees columns j <= i + n - m (aligned to the bottom right: the last query sees every key)
    key_mask  boolean (*batch, n), True for a real key
    pair_mask     boolean, broadcasts to (*batch, m, n), True where a query may look
    bias     added to the scores, broadcasts to (*batch, m, n); -inf silences

    `key_mask` is per sequence: with heads as the last batch axis, (b, n) means the same for every head.
    Grouped queries: k may have fewer heads (axis -3) than q if their number divides; each serves consecutive queries.

    >>> P = softmax(torch.zeros(2, 4), torch.zeros(3, 4))
    >>> P(torch.tensor([[3.0], [0.0], [0.0]])).flatten().tolist()
    [1.0, 1.0]
    """
    no_empty_axis("Softmax", q=q, k=k)
    same_axis("Softmax", "k", q=q.shape[-1], k=k.shape[-1])
    same_kind("Softmax", q=q, k=k)
    all_finite("Softmax", q=q, k=k)
    k = repeat_heads(k, q)
    batch = broadcast_batch("Softmax", q=q.shape[:-2], k=k.shape[:-2])
    shape = (*batch, q.shape[-2], k.shape[-2])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ShapeError(f"Softmax: scale must be finite, but is {scale}")
    keep = kept("Softmax", shape, key_mask, pair_mask, device=q.device)
    if bias is not None:
        if not bias.dtype.is_floating_point:
            raise DtypeError(f"Softmax: bias must be floating point, but is {bias.dtype}; a boolean one is a mask")
        if bias.device != q.device:
            raise DtypeError(f"Softmax: devices must agree, but q is on {q.device}, bias is on {bias.device}")
        bias = broadcasts_to("Softmax", "bias", bias, shape)
        bias = bias.reshape(*(1,) * (2 - bias.dim()), *bias.shape)
    ahead = k.shape[-2] - q.shape[-2] if causal else None
    return Softmax(Scores(q, k, scale, ahead, keep, bias))


def repeat_heads(k: Tensor, q: Tensor, owner: str = "Softmax") -> Tensor:
    """Grouped queries: each of k's heads repeated for the consecutive heads of q it serves."""
    if k.dim() < 3 or q.dim() < 3 or k.shape[-3] in (1, q.shape[-3]) or q.shape[-3] == 1:
        return k
    heads, groups = q.shape[-3], k.shape[-3]
    if heads % groups:
        raise ShapeError(f"{owner}: axis 'h' must divide, but q has {heads} heads and k has {groups}")
    return k.repeat_interleave(heads // groups, dim=-3)


def kept(
    owner: str, shape: tuple[int, ...], key_mask: Tensor | None, pair_mask: Tensor | None, *, device: torch.device
) -> Tensor | None:
    """One boolean of at least two axes that broadcasts to (*batch, m, n), or None when nothing is silenced."""
    for name, x in (("key_mask", key_mask), ("pair_mask", pair_mask)):
        if x is not None and x.dtype != torch.bool:
            raise DtypeError(f"{owner}: {name} must be boolean with True for what counts, but is {x.dtype}")
        if x is not None and x.device != device:
            raise DtypeError(f"{owner}: devices must agree, but q is on {device}, {name} is on {x.device}")
    keep = None
    if key_mask is not None:
        *batch, _, n = shape
        if key_mask.dim() == 0 or key_mask.shape[-1] != n:
            raise ShapeError(f"{owner}: key_mask has shape {tuple(key_mask.shape)}, but there are n = {n} keys")
        # (b, n) against a batch (b, h): heads share it
        missing = len(batch) - (key_mask.dim() - 1)
        if key_mask.dim() > 1 and missing > 0:
            key_mask = key_mask.reshape(*key_mask.shape[:-1], *(1,) * missing, n)
        keep = broadcasts_to(owner, "key_mask", key_mask.unsqueeze(-2), shape)
    if pair_mask is not None:
        pair_mask = broadcasts_to(owner, "pair_mask", pair_mask, shape)
        pair_mask = pair_mask.reshape(*(1,) * (2 - pair_mask.dim()), *pair_mask.shape)
        keep = pair_mask if keep is None else keep & pair_mask
    return keep
