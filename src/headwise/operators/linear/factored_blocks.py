"""Causal `factored`: the double softmax over the own block's keys up to the query and projections of earlier blocks.

    out_i = sum_c H_ic ( sum_(j <= i, own block) e_jc v_j + sum_(earlier blocks t) exp(s E k_t)_c^T F v_t ) / Z_ic

E and F in R^(r x b) shorten one block of b positions each, so that no query sees a later position: exact inside its own
block, projected before it.  With r = b and E = F = I it is `efficient` with causal=True.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.prefix_sums import Blocks, blocked, blocked_absence
from headwise.operators._kernels.queries_keys import Pair, pair, self_attention
from headwise.operators._kernels.slots import Shortened, block_slots, slot_absence
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Projection
from headwise.shapes import broadcast_batch


@final
@dataclass(frozen=True, eq=False)
class FactoredBlocks(AttentionOperator):
    """Entries are >= 0 and rows sum to one when those of F are and do, and every query sees a real key."""

    both: Pair
    short: Shortened

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.batch, self.both.m, self.both.n))

    @property
    def batch(self) -> torch.Size:
        learned = self.short.batch[:-1]  # without the axis of blocks
        return broadcast_batch("FactoredBlocks", q_and_k=self.both.batch, projections=learned)

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        if not self.short.f.averages:
            return frozenset({Claim.CAUSAL})
        seen = self.both.keep is None or bool(self.both.keep[..., 0].all())
        return frozenset({Claim.CAUSAL, Claim.NONNEGATIVE} | ({Claim.STOCHASTIC} if seen else set()))

    def apply(self, v: Tensor) -> Tensor:
        compute = torch.promote_types(v.dtype, torch.float32)
        x = v.to(compute) if self.both.keep is None else v.to(compute).masked_fill(~self.both.keep.unsqueeze(-1), 0)
        block = self.short.e.length
        x = blocked(x, block)
        features = torch.softmax(self.both.q.to(compute) * self.both.scale, dim=-1)
        out = self._blocks(compute).attend(blocked(features, block), x, self.short.values(x))
        return out.flatten(-3, -2)[..., : self.both.n, :].to(v.dtype)

    def cost(self, d: int) -> Cost:
        k, r, block, count = self.both.k.shape[-1], self.short.e.slots, self.short.e.length, self.short.k.shape[-3]
        work = count * ((block + r) * k * d + block * block * (k + d)) * self.batch.numel()
        work += self.short.multiply_adds(d, self.batch.numel() * count)
        return Cost(work, count * (2 * k * d + block * (block + 4 * k)) * self.batch.numel(), count)

    def adjoint_cost(self, d: int) -> Cost:
        """The derivative of `apply`: once forward, and back through all but the weights inside blocks."""
        k, r, block, count = self.both.k.shape[-1], self.short.e.slots, self.short.e.length, self.short.k.shape[-3]
        copies = self.batch.numel()
        back = count * ((block + r) * k * d + block * block * d) * copies
        back += self.short.f.adjoint_multiply_adds(d * copies * count)
        return self.cost(d) + Cost(back, count * 2 * k * d * copies, count)

    def _blocks(self, dtype: torch.dtype) -> Blocks:
        keys = blocked(self.both.k.to(dtype) * self.both.scale, self.short.e.length)
        hidden = blocked_absence(self.both.keep, self.both.n, self.short.e.length, keys.device)
        return Blocks(keys, hidden, self.short.keys().to(dtype) * self.both.scale, slot_absence(self.short))


def factored_blocks(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> FactoredBlocks:
    """e and f (e unless given) shorten blocks of e.length positions; always causal, whatever `causal` says.

    `key_mask` (*batch, n), True at real keys; where it follows, real rows equal those of the shorter sequence.
    """
    del causal  # there is no other form; `factored` is the one that sees everything
    both = pair("FactoredBlocks", q, k, scale=scale, key_mask=key_mask)
    self_attention("FactoredBlocks", both, "efficient with causal=True, or window, for new queries against a cache")
    operator = FactoredBlocks(both, block_slots("FactoredBlocks", both, e, f))
    operator._blocks(torch.promote_types(k.dtype, torch.float32)).check("FactoredBlocks")
    return operator
