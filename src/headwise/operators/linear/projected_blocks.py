"""Causal Linformer: softmax over the own block's keys up to the query, and projections of earlier blocks.

    P_i = softmax over [ s q_i . k_j (j <= i, own block) ; s q_i . (E k_t) (earlier blocks t) ], slots to values by F

E and F in R^(r x b) shorten one block of b positions each.  A projection over the whole sequence would let a query see
later positions; in blocks none does.  O(n (b + r n / b) (k + d)): O(n^1.5) for blocks of sqrt(n r).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.prefix_sums import blocked
from headwise.operators._kernels.queries_keys import Pair, pair, self_attention
from headwise.operators._kernels.slots import Shortened, block_slots
from headwise.operators._kernels.sparse_blocks import Union
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Projection
from headwise.operators.sparse.fixed import own_blocks, summary_pieces
from headwise.shapes import broadcast_batch


@final
@dataclass(frozen=True, eq=False)
class ProjectedBlocks(AttentionOperator):
    """One softmax over exact keys and slots: the slots are n + 1, n + 2, ... in a longer row of keys."""

    both: Pair
    short: Shortened

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.batch, self.both.m, self.both.n))

    @property
    def batch(self) -> torch.Size:
        learned = self.short.batch[:-1]  # without the axis of blocks
        return broadcast_batch("ProjectedBlocks", q_and_k=self.both.batch, projections=learned)

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
        return self._union().apply(_beside(v, self.short.values(blocked(v, self.short.e.length))))

    def adjoint(self, u: Tensor) -> Tensor:
        u = u.expand(*broadcast_batch("ProjectedBlocks", operator=self.batch, u=u.shape[:-2]), *u.shape[-2:])
        keys, slots = self._union().adjoint(u).split([self.both.n, self._slots], dim=-2)
        slots = self.short.adjoint(slots.unflatten(-2, (-1, self.short.e.slots)))
        return keys + slots.flatten(-3, -2)[..., : self.both.n, :]

    def cost(self, d: int) -> Cost:
        return self._cost(d, self.short.multiply_adds(d, self.batch.numel() * self.short.k.shape[-3]))

    def adjoint_cost(self, d: int) -> Cost:
        return self._cost(d, self.short.adjoint_multiply_adds(d, self.batch.numel() * self.short.k.shape[-3]))

    def _cost(self, d: int, shortening: int) -> Cost:
        union = self._union()
        copies = self.batch.numel() // union.shape[:-2].numel()
        return union.cost(d).times(copies) + Cost(shortening, self.batch.numel() * self._slots * d)

    @property
    def _slots(self) -> int:
        return self.short.k.shape[-3] * self.short.e.slots

    def _union(self) -> Union:
        both, block, r = self.both, self.short.e.length, self.short.e.slots
        keep, filled = both.keep, self.short.filled
        if filled is not None:
            keep = torch.ones(both.n, dtype=torch.bool, device=both.k.device) if keep is None else keep
            filled = filled.flatten(-2)
            batch = torch.broadcast_shapes(keep.shape[:-1], filled.shape[:-1])
            keep = torch.cat([keep.expand(*batch, -1), filled.expand(*batch, -1)], dim=-1)
        later = summary_pieces(both.n, block, r, True, both.q.device, first=False, keys=both.n)
        pieces = (*own_blocks(both.n, block, True), *later)
        return Union(both.q, _beside(both.k, self.short.keys()), both.scale, pieces, keep)


def projected_blocks(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> ProjectedBlocks:
    """e and f (e unless given) shorten blocks of e.length positions; always causal, whatever `causal` says.

    `key_mask` (*batch, n), True at real keys; where it follows, real rows equal those of the shorter sequence.
    """
    del causal  # there is no other form; `projected` is the one that sees everything
    both = pair("ProjectedBlocks", q, k, scale=scale, key_mask=key_mask)
    self_attention("ProjectedBlocks", both, "window, or softmax, for new queries against a cache")
    return ProjectedBlocks(both, block_slots("ProjectedBlocks", both, e, f))


def _beside(x: Tensor, slots: Tensor) -> Tensor:
    """(*batch, n, c) and (*batch, t, r, c) in one row of n + t r."""
    slots = slots.flatten(-3, -2)
    batch = torch.broadcast_shapes(x.shape[:-2], slots.shape[:-2])
    return torch.cat([y.expand(*batch, *y.shape[-2:]) for y in (x, slots)], dim=-2)
