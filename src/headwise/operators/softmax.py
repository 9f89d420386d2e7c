"""P = softmax_rows(s Q K^T + attn_bias), the exact attention of Vaswani et al. 2017, never formed except in `dense`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.linalg.krylov import Spectrum, singular_values
from headwise.operators._kernels import limits
from headwise.operators._kernels.row_chunks import adjoint_rows
from headwise.operators._kernels.scores import Scores, attend, attend_with_lse, keeps_digits, row_maxima, weights
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import ATTN_BIAS, CAUSAL, KEY_MASK, PAIR_MASK, supports
from headwise.shapes import symbolic


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
        if symbolic(*self.shape[-2:]):  # one call: rows cannot be divided into a number of parts that is not known
            s = self.scores.rising()
            masks = s.mask.sdpa_arguments(s.q.dtype, s.q.device)
            out = F.scaled_dot_product_attention(s.q, s.k, s.mask.hide(v), scale=s.scale, **masks)
            empty = s.empty_rows()
            return out if empty is None else out.masked_fill(empty.unsqueeze(-1), 0)  # other runtimes give means or NaN
        return attend(self.scores, v)

    def adjoint(self, u: Tensor) -> Tensor:
        """P^T u is attention again: columns become rows of S^T - lse, whose own log-sum-exps are P's column sums."""
        scores = self.scores.to(torch.promote_types(u.dtype, torch.float32))  # lse is not a half-precision number
        return self._adjoint_with(scores, attend_with_lse(scores, scores.k)[1], u)

    def _adjoint_with(self, scores: Scores, lse: Tensor, u: Tensor) -> Tensor:
        if not keeps_digits(lse):
            return adjoint_rows(lambda i, j: weights(scores.rows(i, j)), self.shape, u.to(scores.q.dtype)).to(u.dtype)
        # an empty row is masked in every column already, so any finite value will do in its place
        turned = scores.transposed(minus=lse.masked_fill(lse == -math.inf, 0))
        rows = u.to(scores.q.dtype)
        out, log_sums = attend_with_lse(turned, rows.flip(-2) if scores.mask.causal else rows)
        out = out * log_sums.exp().unsqueeze(-1)
        return (out.flip(-2) if scores.mask.causal else out).to(u.dtype)

    def spectrum(self, r: int, *, generator: torch.Generator | None = None) -> Spectrum:
        """As for every operator, but the log-sum-exps are computed once for all adjoints."""
        return singular_values(self.apply, self.adjoint_map(), self.shape, r, like=self.like, generator=generator)

    @torch.no_grad()
    def adjoint_map(self) -> Callable[[Tensor], Tensor]:
        """u -> P^T u for many u: the log-sum-exps are computed once."""
        scores = self.scores.to(torch.promote_types(self.like.dtype, torch.float32))
        return partial(self._adjoint_with, scores, attend_with_lse(scores, scores.k)[1])

    def dense(self, like: Tensor | None = None) -> Tensor:
        return weights(self.scores.wide()).to(self.like if like is None else like)

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
        scores = self.scores.wide()
        return attend_with_lse(scores, scores.k)[1]

    def entropy(self) -> Tensor:
        """-sum_j P_ij log P_ij = lse_i - <P, S>_i, (*batch, m), in nats; one call with the keys as values.

        With attn_bias, <P, attn_bias>_i has no such short cut and the rows are computed in chunks.
        """
        scores = self.scores.wide()
        if scores.mask.attn_bias is not None:
            return self._by_rows(_entropy)
        keys, lse = attend_with_lse(scores, scores.k)
        if not keeps_digits(lse):
            return self._by_rows(_entropy)
        entropy = lse - scores.scale * (scores.q * keys).sum(-1)
        return entropy.masked_fill(lse == -math.inf, 0).clamp(min=0)

    def frobenius(self) -> Tensor:
        """||P||_F = sqrt(sum_i exp(lse_i(2 S) - 2 lse_i(S))), (*batch,)."""
        scores, lse = self.scores.wide(), self.log_sum_exp()
        if not keeps_digits(lse):
            return self._by_rows(lambda rows: weights(rows).square().sum(-1)).sum(-1).sqrt()
        twice = attend_with_lse(scores.doubled(), scores.k)[1]
        return (twice - 2 * lse.masked_fill(lse == -math.inf, 0)).exp().sum(-1).sqrt()

    def row_maxima(self) -> Tensor:
        """max_j P_ij = exp(max_j S_ij - lse_i), (*batch, m): 1 is a query that attends to a single key."""
        lse = self.log_sum_exp()
        if not keeps_digits(lse):
            return self._by_rows(lambda rows: weights(rows).amax(-1))
        return (row_maxima(self.scores) - lse.masked_fill(lse == -math.inf, 0)).exp()

    def _by_rows(self, measure: Callable[[Scores], Tensor]) -> Tensor:
        """One number for each row of P, (*batch, m), in chunks of rows."""
        scores = self.scores.wide()
        return torch.cat([measure(scores.rows(start, stop)) for start, stop in scores.chunks()], dim=-1)

    def largest_score(self) -> Tensor:
        """max_ij S_ij, (*batch,): what overflows first in half precision."""
        return row_maxima(self.scores).amax(-1)


def _entropy(rows: Scores) -> Tensor:
    """-sum_j P_ij log P_ij; a row that attends to no key, or to one, has none."""
    p = weights(rows)
    # P = 0 is replaced before the logarithm: 0 * inf would make the gradient NaN
    return -(p * p.masked_fill(p == 0, 1).log()).sum(-1).clamp(max=0)


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
    attn_bias  added to the scores, broadcasts to (*batch, m, n); -inf masks, NaN and +inf raise NonFiniteError

    Grouped queries: k may have fewer heads (axis -3) than q if their number divides; each serves consecutive queries.

    >>> P = softmax(torch.zeros(2, 4), torch.zeros(3, 4))
    >>> P(torch.tensor([[3.0], [0.0], [0.0]])).flatten().tolist()
    [1.0, 1.0]
    """
    masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask, "attn_bias": attn_bias}
    return Softmax(Scores.checked("Softmax", q, k, scale=scale, positive_scale=False, **masks))
