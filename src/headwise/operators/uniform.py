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
from headwise.operators.claims import Claim
from headwise.operators.masks import Visibility, visibility


@final
@dataclass(frozen=True, eq=False)
class Uniform(AttentionOperator):
    """P_ij = M_ij / C_i: every key that query i may see (M_ij = 1) has the same weight, C_i = sum_j M_ij.

    A query that sees no key gives a row of zeros, and then P is not claimed to be stochastic.

    >>> uniform(3, 3, causal=True).dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """

    seen: Visibility

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.seen.batch, self.seen.m, self.seen.n))

    @property
    def claims(self) -> frozenset[Claim]:
        promised = {Claim.NONNEGATIVE}
        if self.seen.leaves_no_row_empty():
            promised.add(Claim.STOCHASTIC)
        if self.seen.causal:
            promised.add(Claim.CAUSAL)
        elif self.seen.key_mask is None and self.seen.m == self.seen.n:
            promised.add(Claim.SYMMETRIC)
        return frozenset(promised)

    def apply(self, v: Tensor) -> Tensor:
        # half precision cannot count beyond 2048: sums and counts are kept in float32 until the end
        x = self.seen.hide(v).to(torch.promote_types(v.dtype, torch.float32))
        m, square = self.seen.m, self.seen.overlap
        if self.seen.causal:
            sums = torch.nn.functional.pad(x.cumsum(-2)[..., -square:, :], (0, 0, m - square, 0))
        else:
            sums = x.sum(-2, keepdim=True).expand(*x.shape[:-2], m, x.shape[-1])
        return self.seen.average(sums).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """Column j gathers u_i / C_i from the rows that see it: a sum, or, causal, a running sum from the end."""
        x = self.seen.average(u.to(torch.promote_types(u.dtype, torch.float32)))
        n, square = self.seen.n, self.seen.overlap
        if self.seen.causal:
            sums = x[..., -square:, :].flip(-2).cumsum(-2).flip(-2)
            # keys before the causal square are seen by every query
            sums = torch.cat([sums[..., :1, :].expand(*sums.shape[:-2], n - square, sums.shape[-1]), sums], dim=-2)
        else:
            sums = x.sum(-2, keepdim=True).expand(*x.shape[:-2], n, x.shape[-1])
        return self.seen.hide(sums).to(u.dtype)

    def cost(self, d: int) -> Cost:
        """One addition for every entry of v."""
        depth = self.seen.n if self.seen.causal else 1
        return Cost(self.seen.n * d, self.seen.n * d, depth).times(self.seen.batch.numel())

    def adjoint_cost(self, d: int) -> Cost:
        """One addition for every entry of u."""
        depth = self.seen.m if self.seen.causal else 1
        return Cost(self.seen.overlap * d if self.seen.causal else self.seen.m * d, self.seen.m * d, depth).times(
            self.seen.batch.numel()
        )


def uniform(m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Uniform:
    """The mean over the visible keys.  `key_mask` (*batch, n) is True at keys that exist."""
    if m < 1 or n < 1:
        raise ShapeError(f"Uniform: m has {m}, n has {n}: an empty axis has no attention")
    return Uniform(visibility("Uniform", m, n, causal=causal, key_mask=key_mask))
