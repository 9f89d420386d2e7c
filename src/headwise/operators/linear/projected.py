"""P = softmax over slots of s Q (E K)^T, times F: keys and values shortened to r slots, E and F in R^(r x n).

Linformer, Wang et al. 2020 (arXiv:2006.04768): E and F learned, shared by heads, by layers, or by keys and values.
O(n r (k + d)): linear in n for a fixed r.  Rows of P sum to one when those of F do.

The causal form (`projected_blocks`) shortens blocks of b positions by E and F in R^(r x b):

    P_i = softmax over [ s q_i . k_j (j <= i, own block) ; s q_i . (E k_t) (earlier blocks t) ], slots to values by F

A projection over the whole sequence would let a query attend to later positions; in blocks none does.
O(n (b + r n / b) (k + d)): O(n^1.5) for blocks of sqrt(n r).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.prefix_sums import blocked
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.scores import Scores
from headwise.operators._kernels.slots import BlockSlotOperator, Shortened, SlotOperator, shorten, shorten_blocks
from headwise.operators._kernels.sparse_blocks import Piece, Union
from headwise.operators.linear.projections import Projection
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax
from headwise.operators.sparse.fixed import own_blocks, summary_pieces


@final
@dataclass(frozen=True, eq=False)
class Projected(SlotOperator):
    """Softmax attention to r slots instead of n keys."""

    qk: QueriesKeys
    short: Shortened

    def apply(self, v: Tensor) -> Tensor:
        return self._slots().apply(self.short.values(v))

    def adjoint(self, u: Tensor) -> Tensor:
        return self.short.adjoint(self._slots().adjoint(self._expand(u)))

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        copies, slots = self.batch.numel(), self._slots()
        attention = slots.adjoint_cost(d) if adjoint else slots.cost(d)
        shortening = Cost(self.short.multiply_adds(d, copies, adjoint=adjoint), copies * self.short.e.slots * d)
        return shortening + attention.times(copies // slots.shape[:-2].numel())

    def _slots(self) -> Softmax:
        """Attention of the queries to the slots."""
        mask = Mask(self.qk.m, self.short.e.slots, key_mask=self.short.filled)
        return Softmax(Scores(self.qk.q, self.short.keys(), self.qk.scale, mask))


@final
@dataclass(frozen=True, eq=False)
class ProjectedBlocks(BlockSlotOperator):
    """One softmax over exact keys and slots: the slots are keys n + 1, n + 2, ... of a longer sequence."""

    qk: QueriesKeys
    short: Shortened

    def apply(self, v: Tensor) -> Tensor:
        return self._union().apply(_append_slots(v, self.short.values(blocked(v, self.short.e.length))))

    def adjoint(self, u: Tensor) -> Tensor:
        keys, slots = self._union().adjoint(self._expand(u)).split([self.qk.n, self._slots], dim=-2)
        slots = self.short.adjoint(slots.unflatten(-2, (-1, self.short.e.slots)))
        return keys + slots.flatten(-3, -2)[..., : self.qk.n, :]

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        copies, union = self.batch.numel(), self._union()
        shortening = self.short.multiply_adds(d, copies * self.blocks, adjoint=adjoint)
        attention = union.cost(d).times(copies // union.shape[:-2].numel())
        return attention + Cost(shortening, copies * self._slots * d)

    @property
    def _slots(self) -> int:
        return self.blocks * self.short.e.slots

    def _union(self) -> Union:
        qk, block, r = self.qk, self.short.e.length, self.short.e.slots
        key_mask, filled = qk.key_mask, self.short.filled
        if filled is not None:
            key_mask = torch.ones(qk.n, dtype=torch.bool, device=qk.k.device) if key_mask is None else key_mask
            filled = filled.flatten(-2)
            batch = torch.broadcast_shapes(key_mask.shape[:-1], filled.shape[:-1])
            key_mask = torch.cat([x.expand(*batch, -1) for x in (key_mask, filled)], dim=-1)
        pieces = partial(_pieces, qk.n, block, r, qk.q.device)
        return Union(qk.q, _append_slots(qk.k, self.short.keys()), qk.scale, pieces, key_mask)


@supports(KEY_MASK, instead={CAUSAL: "projected_blocks, which projects earlier blocks only"})
def projected(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Projected:
    """P = softmax_slots(scale q (e k)^T) f, with f = e unless given (shared by keys and values).

    A learned projection is `dense(matrix)`; (h, r, n) is one for each head.  `key_mask` (*batch, n), True = attend, as
    in `factored`: real rows equal those of the shorter sequence under the same columns of e and f (not `Hadamard`).
    """
    qk = QueriesKeys.checked("Projected", q, k, scale=scale, key_mask=key_mask)
    return Projected(qk, shorten("Projected", qk, e, f))


@supports(KEY_MASK, always_causal=True, instead={CAUSAL: "projected"}, one_length="its blocks are cut for one length")
def projected_blocks(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> ProjectedBlocks:
    """Causal `projected`: e and f (e unless given) shorten earlier blocks of e.length positions.

    `key_mask` (*batch, n), True = attend; with padding at the end, real rows equal those of the shorter sequence.
    """
    qk = QueriesKeys.checked("ProjectedBlocks", q, k, scale=scale, key_mask=key_mask)
    qk.require_square("ProjectedBlocks", "window, or softmax, for new queries against a cache")
    return ProjectedBlocks(qk, shorten_blocks("ProjectedBlocks", qk, e, f))


def _pieces(n: int, block: int, r: int, device: torch.device) -> list[Piece]:
    """Own blocks, and the slots of earlier ones."""
    return [*own_blocks(n, block, True), *summary_pieces(n, block, r, True, device, first=False, keys=n)]


def _append_slots(x: Tensor, slots: Tensor) -> Tensor:
    """(*batch, n, c) and (*batch, t, r, c) as one sequence of n + t r."""
    slots = slots.flatten(-3, -2)
    batch = torch.broadcast_shapes(x.shape[:-2], slots.shape[:-2])
    return torch.cat([y.expand(*batch, *y.shape[-2:]) for y in (x, slots)], dim=-2)
