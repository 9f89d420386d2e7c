"""P = softmax_rows(s Q K^T + attn_bias), the exact attention of Vaswani et al. 2017, never formed except in `dense`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.linalg.krylov import Spectrum, singular_values
from headwise.operators._kernels import limits
from headwise.operators._kernels.scores import Scores, attend, attend_with_lse, row_maxima
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.masks import ATTN_BIAS, CAUSAL, KEY_MASK, PAIR_MASK, supports


@final
@dataclass(frozen=True, eq=False)
class Softmax(AttentionOperator):
    """P_ij = exp(S_ij - lse_i), S the scores, lse_i = log sum_j exp(S_ij).  Rows without keys are zero."""

    scores: Scores

    @property
    def shape(self) -> torch.Size:
        return self.scores.shape

    @property
    def claims(self) -> frozenset[Claim]:
        mask = self.scores.mask
        return weights_claim(stochastic=not mask.has_empty_rows(), causal=mask.causal)

    def apply(self, v: Tensor) -> Tensor:
        return attend(self.scores, v)

    def adjoint(self, u: Tensor) -> Tensor:
        """P^T u is attention again: columns become rows of S^T - lse, whose own log-sum-exps are P's column sums."""
        scores = self.scores.to(torch.promote_types(u.dtype, torch.float32))  # lse is not a half-precision number
        return self._adjoint_with(scores, attend_with_lse(scores, scores.k)[1], u)

    def _adjoint_with(self, scores: Scores, lse: Tensor, u: Tensor) -> Tensor:
        # an empty row is masked in every column already, so any finite value will do in its place
        turned = scores.transposed(minus=lse.masked_fill(lse == -math.inf, 0))
        u = u.to(scores.q.dtype)
        out, log_sums = attend_with_lse(turned, u.flip(-2) if scores.mask.causal else u)
        out = out * log_sums.exp().unsqueeze(-1)
        return (out.flip(-2) if scores.mask.causal else out).to(self.like.dtype)

    def spectrum(self, r: int, *, generator: torch.Generator | None = None) -> Spectrum:
        """As for every operator, but the log-sum-exps are computed once for all adjoints."""
        with torch.no_grad():
            scores = self.scores.to(torch.promote_types(self.like.dtype, torch.float32))
            lse = attend_with_lse(scores, scores.k)[1]
        adjoint = partial(self._adjoint_with, scores, lse)
        return singular_values(self.apply, adjoint, self.shape, r, like=self.like, generator=generator)

    def dense(self, like: Tensor | None = None) -> Tensor:
        p = torch.softmax(self.scores.dense(), dim=-1)
        empty = self.scores.empty_rows()
        if empty is not None:
            p = p.masked_fill(empty.unsqueeze(-1), 0)
        return p if like is None else p.to(like)

    def cost(self, d: int) -> Cost:
        """Scores and weighted sums, both as wide as the wider of keys and values; causal ones counted in full."""
        *batch, m, n = self.shape
        width = self.scores.q.shape[-1]
        calls = [min(limits.MAX_COLUMNS, d - start) for start in range(0, d, limits.MAX_COLUMNS)]
        return Cost(math.prod(batch) * m * n * sum(2 * max(width, call) for call in calls), math.prod(batch) * m)

    def adjoint_cost(self, d: int) -> Cost:
        """One sweep with the keys as values for the log-sum-exps, one for the transposed scores."""
        return self.cost(self.scores.q.shape[-1]) + self.cost(d)

    def log_sum_exp(self) -> Tensor:
        """lse_i = log sum_j exp(S_ij), (*batch, m); -inf where row i has no key."""
        return attend_with_lse(self.scores, self.scores.k)[1]

    def entropy(self) -> Tensor:
        """-sum_j P_ij log P_ij = lse_i - <P, S>_i, (*batch, m), in nats; one call with the keys as values.

        With attn_bias, <P, attn_bias>_i has no such short cut and the rows are computed in chunks.
        """
        if self.scores.mask.attn_bias is not None:
            return self._entropy_in_chunks()
        keys, lse = attend_with_lse(self.scores, self.scores.k)
        entropy = lse - self.scores.scale * (self.scores.q * keys).sum(-1)
        return entropy.masked_fill(lse == -math.inf, 0).clamp(min=0)

    def _entropy_in_chunks(self) -> Tensor:
        parts = []
        for start, stop in self.scores.chunks():
            scores = self.scores.rows(start, stop).dense()
            lse = torch.logsumexp(scores, dim=-1)
            level = lse.masked_fill(lse == -math.inf, 0)  # an empty row is all zeros, whatever is subtracted
            # scores of -inf are replaced before the product: 0 * inf would make the gradient NaN
            mean = ((scores - level.unsqueeze(-1)).exp() * scores.masked_fill(scores == -math.inf, 0)).sum(-1)
            parts.append((level - mean).clamp(min=0))
        return torch.cat(parts, dim=-1)

    def frobenius(self) -> Tensor:
        """||P||_F = sqrt(sum_i exp(lse_i(2 S) - 2 lse_i(S))), (*batch,)."""
        lse = self.log_sum_exp()
        twice = attend_with_lse(self.scores.doubled(), self.scores.k)[1]
        return (twice - 2 * lse.masked_fill(lse == -math.inf, 0)).exp().sum(-1).sqrt()

    def row_maxima(self) -> Tensor:
        """max_j P_ij = exp(max_j S_ij - lse_i), (*batch, m): 1 is a query that attends to a single key."""
        lse = self.log_sum_exp()
        return (row_maxima(self.scores) - lse.masked_fill(lse == -math.inf, 0)).exp()

    def largest_score(self) -> Tensor:
        """max_ij S_ij, (*batch,): what overflows first in half precision."""
        return row_maxima(self.scores).amax(-1)


@supports(CAUSAL, KEY_MASK, PAIR_MASK, ATTN_BIAS)
def softmax(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Softmax:
    """P = softmax_rows(scale q k^T + attn_bias) from q (*batch, m, k) and k (*batch, n, k); scale 1/sqrt(k) by default.

    causal     query i attends to keys j <= i + n - m (aligned to the bottom right: the last query attends to all)
    key_mask   boolean (*batch, n), True = attend; (b, n) against a batch (b, h) is shared by the heads
    pair_mask  boolean, broadcasts to (*batch, m, n), True = attend
    attn_bias  added to the scores, broadcasts to (*batch, m, n); -inf masks

    Grouped queries: k may have fewer heads (axis -3) than q if their number divides; each serves consecutive queries.

    >>> P = softmax(torch.zeros(2, 4), torch.zeros(3, 4))
    >>> P(torch.tensor([[3.0], [0.0], [0.0]])).flatten().tolist()
    [1.0, 1.0]
    """
    masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask, "attn_bias": attn_bias}
    return Softmax(Scores.checked("Softmax", q, k, scale=scale, positive_scale=False, **masks))
