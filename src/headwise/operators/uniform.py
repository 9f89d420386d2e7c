"""P = 1 1^T / n, the mean; causal, the running mean: what softmax becomes when every score is equal.

It is the attractor of rank collapse and the cheapest attention there is: O(n d), no m x n tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.masks import Mask
from headwise.shapes import whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Uniform(AttentionOperator):
    """P_ij = M_ij / C_i: every key that query i attends to (M_ij = 1) has the same weight, C_i = sum_j M_ij.

    A query without keys gives a row of zeros, and then P does not claim to be stochastic.

    >>> uniform(3, 3, causal=True).dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """

    mask: Mask

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.mask.batch, self.mask.m, self.mask.n))

    @property
    def claims(self) -> frozenset[Claim]:
        mask = self.mask
        claims = weights_claim(stochastic=not mask.has_empty_rows(), causal=mask.causal)
        symmetric = not mask.causal and mask.key_mask is None and mask.m == mask.n
        return claims | {Claim.SYMMETRIC} if symmetric else claims

    def apply(self, v: Tensor) -> Tensor:
        # half precision cannot count beyond 2048: sums and counts are kept in float32 until the end
        x = self.mask.hide(v).to(torch.promote_types(v.dtype, torch.float32))
        m, square = self.mask.m, self.mask.overlap
        if self.mask.causal:
            sums = torch.nn.functional.pad(x.cumsum(-2)[..., -square:, :], (0, 0, m - square, 0))
        else:
            sums = x.sum(-2, keepdim=True).expand(*x.shape[:-2], m, x.shape[-1])
        return self.mask.average(sums).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """Column j gathers u_i / C_i from the rows that attend to it: a sum, or, causal, a running sum from the end."""
        x = self.mask.average(u.to(torch.promote_types(u.dtype, torch.float32)))
        n, square = self.mask.n, self.mask.overlap
        if self.mask.causal:
            sums = x[..., -square:, :].flip(-2).cumsum(-2).flip(-2)
            # every query attends to the keys before the causal square
            sums = torch.cat([sums[..., :1, :].expand(*sums.shape[:-2], n - square, sums.shape[-1]), sums], dim=-2)
        else:
            sums = x.sum(-2, keepdim=True).expand(*x.shape[:-2], n, x.shape[-1])
        return self.mask.hide(sums).to(u.dtype)

    def cost(self, d: int) -> Cost:
        """One addition for every entry of v."""
        depth = self.mask.n if self.mask.causal else 1
        return Cost(self.mask.n * d, self.mask.n * d, depth).times(self.mask.batch.numel())

    def adjoint_cost(self, d: int) -> Cost:
        """One addition for every entry of u."""
        depth = self.mask.m if self.mask.causal else 1
        return Cost(self.mask.overlap * d if self.mask.causal else self.mask.m * d, self.mask.m * d, depth).times(
            self.mask.batch.numel()
        )


@supports(CAUSAL, KEY_MASK, instead="softmax with q = 0")
def uniform(m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Uniform:
    """P_ij = M_ij / C_i, the mean over the visible keys.  `key_mask` (*batch, n), True = attend."""
    whole_numbers("Uniform", least=0, m=m, n=n)
    if m < 1 or n < 1:
        raise ShapeError(f"Uniform: m has {m}, n has {n}: an empty axis has no attention")
    return Uniform(Mask.checked("Uniform", m, n, causal=causal, key_mask=key_mask))
