"""P_ij = sum_c H_ic exp(s k_jc) / sum_(j' <= i) exp(s k_j'c) for j <= i: efficient attention over the past, exactly.

The softmax over keys has another normaliser at every query, so the means are running sums.  They are carried from one
block of positions to the next, and inside a block the weights are formed: O(n k d + n b (k + d)) for blocks of b.
Efficient attention is Shen et al. 2018; the split into a state and a block is that of chunked linear attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.prefix_sums import Blocks, blocked, blocked_absence
from headwise.operators._kernels.queries_keys import Pair, pair
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.shapes import filled

BLOCK = 64
"""Positions in a block: the work inside blocks then equals that on the states when k = d = 64."""


@final
@dataclass(frozen=True, eq=False)
class EfficientCausal(AttentionOperator):
    """Row i sees columns j <= i + n - m.  A query that sees no real key gives a row of zeros."""

    both: Pair

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.both.batch, self.both.m, self.both.n))

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        promised = frozenset({Claim.NONNEGATIVE, Claim.CAUSAL})
        first = max(0, self.both.n - self.both.m)  # the last key that the first query sees
        seen = self.both.keep is None or bool(self.both.keep[..., : first + 1].any(-1).all())
        return promised | {Claim.STOCHASTIC} if seen and self.both.m <= self.both.n else promised

    def apply(self, v: Tensor) -> Tensor:
        m, n = self.both.m, self.both.n
        compute = torch.promote_types(v.dtype, torch.float32)
        blocks = _blocks(self.both, compute)
        block = blocks.keys.shape[-2]
        x = v.to(compute) if self.both.keep is None else v.to(compute).masked_fill(~self.both.keep.unsqueeze(-1), 0)
        x = blocked(x, block)
        # queries sit at the last positions: zeros before them, and those before the first key see nothing
        features = torch.softmax(self.both.q.to(compute) * self.both.scale, dim=-1)[..., max(0, m - n) :, :]
        features = blocked(filled(features, (0, 0, max(0, n - m), 0)), block)
        out = blocks.attend(features, x, x).flatten(-3, -2)[..., max(0, n - m) : n, :]
        return filled(out, (0, 0, max(0, m - n), 0)).to(v.dtype)

    def cost(self, d: int) -> Cost:
        """States read and written, and the weights inside blocks, of which half are hidden."""
        k, copies = self.both.k.shape[-1], self.both.batch.numel()
        block = min(BLOCK, self.both.n)
        count = -(-self.both.n // block)
        work = count * block * (2 * k * d + block * (k + d))
        return Cost(work, count * (2 * k * d + block * (block + 4 * k)), count).times(copies)

    def adjoint_cost(self, d: int) -> Cost:
        """The derivative of `apply`: once forward, and back through all but the weights inside blocks."""
        k, copies = self.both.k.shape[-1], self.both.batch.numel()
        block = min(BLOCK, self.both.n)
        count = -(-self.both.n // block)
        return self.cost(d) + Cost(count * block * (2 * k * d + block * d), count * 2 * k * d, count).times(copies)


def efficient_causal(
    q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None
) -> EfficientCausal:
    """Efficient attention in which row i sees columns j <= i + n - m; `key_mask` (*batch, n) is True at real keys.

    Real rows of a padded sequence equal those of the shorter one, wherever the padding is.

    >>> efficient_causal(torch.zeros(3, 2), torch.zeros(3, 2)).dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    both = pair("EfficientCausal", q, k, scale=scale, key_mask=key_mask)
    _blocks(both, torch.promote_types(k.dtype, torch.float32)).check("EfficientCausal")
    return EfficientCausal(both)


def _blocks(both: Pair, dtype: torch.dtype) -> Blocks:
    """Every block leaves all its keys to later ones."""
    block = min(BLOCK, both.n)
    keys = blocked(both.k.to(dtype) * both.scale, block)
    whole = both.keep is None and both.n % block == 0
    hidden = None if whole else blocked_absence(both.keep, both.n, block, keys.device)
    return Blocks(keys, hidden, keys, hidden)
