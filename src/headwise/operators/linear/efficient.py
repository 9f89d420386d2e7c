"""P = H L, H = softmax over features of s Q (rows sum to 1), L = softmax over keys of s K^T (rows sum to 1): O(n k d).

Efficient attention, Shen et al. 2018 (arXiv:1812.01243), which has s = 1; with s = 1/sqrt(k) it is the double softmax
of the "modified self-attention" of Verma with E = F = I.  Two softmaxes are not the softmax of a product: this is not
an approximation of exact attention but another operator of the same kind, to train with or to fit to a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.double_softmax import double_softmax, double_softmax_adjoint
from headwise.operators._kernels.queries_keys import Pair, pair
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.linear.efficient_causal import EfficientCausal, efficient_causal


@final
@dataclass(frozen=True, eq=False)
class Efficient(AttentionOperator):
    """(P v)_i = sum_c H_ic mean_c(v), mean_c the average of v over the keys weighted by exp(s k_jc).

    Rows are stochastic unless every key is padding.  Real rows of a padded sequence equal those of the shorter one.
    """

    both: Pair

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.both.batch, self.both.m, self.both.n))

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        keep = self.both.keep
        silent = keep is not None and not bool(keep.any(-1).all())
        return frozenset({Claim.NONNEGATIVE} if silent else {Claim.NONNEGATIVE, Claim.STOCHASTIC})

    def apply(self, v: Tensor) -> Tensor:
        return double_softmax(self.both, self.both.k, v, self.both.keep)

    def adjoint(self, u: Tensor) -> Tensor:
        return double_softmax_adjoint(self.both, self.both.k, u, self.both.keep)

    def cost(self, d: int) -> Cost:
        k, copies = self.both.k.shape[-1], self.both.batch.numel()
        return Cost((self.both.m + self.both.n) * k * d, (self.both.m + self.both.n) * k + k * d, 2).times(copies)


def efficient(
    q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = False, key_mask: Tensor | None = None
) -> Efficient | EfficientCausal:
    """P = softmax_features(scale q) softmax_keys(scale k)^T; scale 1/sqrt(k) by default, `key_mask` True at real keys.

    Causal, row i sees columns j <= i + n - m: the softmax over keys has another normaliser in every row.

    >>> P = efficient(torch.zeros(2, 4), torch.zeros(3, 4))
    >>> P(torch.tensor([[3.0], [0.0], [0.0]])).flatten().tolist()
    [1.0, 1.0]
    """
    if causal:
        return efficient_causal(q, k, scale=scale, key_mask=key_mask)
    return Efficient(pair("Efficient", q, k, scale=scale, key_mask=key_mask))
