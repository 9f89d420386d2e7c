"""P_ij = [exp(s q_i . k_j) near i + sum_t exp(s q_i . (E k)_t + b_t) F_tj] / Z_i: near keys one by one, the others in r
slots, and one normaliser Z for both.

A window and a low-rank rest under one softmax, so that a head needs no weight between near and far: the slots of
Linformer (Wang et al. 2020) are r more keys beside those of a band (Beltagy et al. 2020).
A slot that stands for c keys has a bias b = log c.  O(n (width + r) (k + d)).  Not causal: a slot mixes positions.

The causal form (`window_low_rank_blocks`) has r slots for every block of b positions.  A query attends to the `width`
keys up to itself and to the slots of earlier blocks, all of whose keys come before it: O(n (width + r n / b) (k + d)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError, UnsupportedError
from headwise.operators._kernels.prefix_sums import blocked
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.slots import BlockSlotOperator, Shortened, SlotOperator, shorten, shorten_blocks
from headwise.operators._kernels.sparse_blocks import Piece, Union
from headwise.operators._kernels.tiles import Tiles
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.linear.projections import Projection
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.softmax import Softmax
from headwise.operators.sparse.fixed import summary_pieces
from headwise.operators.sparse.window import Window, window, window_pieces
from headwise.shapes import all_finite, broadcasts_to, same_kind, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class WindowLowRank(SlotOperator):
    """P = W [F; I], W a window over the slots and the keys in one row, in which every query attends to all slots."""

    qk: QueriesKeys
    short: Shortened
    slot_bias: Tensor | None  # (*batch, r)
    width: int
    leading: int

    @property
    def claims(self) -> frozenset[Claim]:
        if not self.short.f.averages:
            return frozenset()
        return self._inner().claims

    def apply(self, v: Tensor) -> Tensor:
        return self._inner().apply(_joined(self.short.values(v), v))

    def adjoint(self, u: Tensor) -> Tensor:
        r = self.short.e.slots
        out = self._inner().adjoint(u)
        return out[..., r:, :] + self.short.adjoint(out[..., :r, :])

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        copies, inner = self.batch.numel(), self._inner()
        shortening = Cost(self.short.multiply_adds(d, copies, adjoint=adjoint), copies * self.short.e.slots * d)
        return shortening + (inner.adjoint_cost(d) if adjoint else inner.cost(d))

    def _inner(self) -> Window | Softmax:
        """W (*batch, m, r + n): one more column of q and k adds the bias to a slot's scores and nothing to a key's."""
        r, scale = self.short.e.slots, self.qk.scale
        keys = _joined(_with_bias(self.short.keys(), self.slot_bias, scale), F.pad(self.qk.k, (0, 1)))
        keys = keys.expand(*torch.broadcast_shapes(self.shape[:-2], keys.shape[:-2]), *keys.shape[-2:])
        key_mask = None
        if self.qk.key_mask is not None and self.short.filled is not None:
            key_mask = _joined(self.short.filled.unsqueeze(-1), self.qk.key_mask.unsqueeze(-1)).squeeze(-1)
        queries = F.pad(self.qk.q, (0, 1), value=1.0)
        return window(queries, keys, self.width, leading=r + self.leading, scale=scale, key_mask=key_mask)


@final
@dataclass(frozen=True, eq=False)
class WindowLowRankBlocks(BlockSlotOperator):
    """P = W [I; F], W a softmax over the keys of a causal window and the slots of earlier blocks, as keys from n on."""

    qk: QueriesKeys
    short: Shortened
    slot_bias: Tensor | None  # (*batch, r)
    width: int
    leading: int

    @property
    def claims(self) -> frozenset[Claim]:
        if not self.short.f.averages:
            return frozenset({Claim.CAUSAL})
        empty = self.qk.key_mask is not None and bool(self._union().empty_rows().any())
        return weights_claim(stochastic=not empty, causal=True)

    def apply(self, v: Tensor) -> Tensor:
        return self._union().apply(_joined(v, self.short.values(blocked(v, self.short.e.length)).flatten(-3, -2)))

    def adjoint(self, u: Tensor) -> Tensor:
        keys, slots = self._union().adjoint(self._expand(u)).split([self.qk.n, self._slots], dim=-2)
        slots = self.short.adjoint(slots.unflatten(-2, (-1, self.short.e.slots)))
        return keys + slots.flatten(-3, -2)[..., : self.qk.n, :]

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        copies, union = self.batch.numel(), self._union()
        shortening = self.short.multiply_adds(d, copies * self.blocks, adjoint=adjoint)
        return union.cost(d).times(copies // union.shape[:-2].numel()) + Cost(shortening, copies * self._slots * d)

    @property
    def _slots(self) -> int:
        return self.blocks * self.short.e.slots

    def _union(self) -> Union:
        qk, r = self.qk, self.short.e.slots
        slots = _with_bias(
            self.short.keys(), None if self.slot_bias is None else self.slot_bias.unsqueeze(-2), qk.scale
        )
        key_mask, filled = qk.key_mask, self.short.filled
        if filled is not None:
            key_mask = torch.ones(qk.n, dtype=torch.bool, device=qk.k.device) if key_mask is None else key_mask
            key_mask = _joined(key_mask.unsqueeze(-1), filled.flatten(-2).unsqueeze(-1)).squeeze(-1)
        pieces = partial(_causal_pieces, qk.n, self.width, self.leading, self.short.e.length, r, qk.q.device)
        keys = _joined(F.pad(qk.k, (0, 1)), slots.flatten(-3, -2))
        return Union(F.pad(qk.q, (0, 1), value=1.0), keys, qk.scale, pieces, key_mask)


Either = TypeVar("Either", WindowLowRank, WindowLowRankBlocks)


def _causal_pieces(n: int, width: int, leading: int, block: int, r: int, device: torch.device) -> list[Piece]:
    """The window of every query, and the slots of earlier blocks, which are keys from n on."""
    near = window_pieces(n, n, width - 1, 0, leading, True, device)
    if torch.compiler.is_compiling():
        return [*near, *_earlier_slots(n, block, r, device)]
    return [*near, *summary_pieces(n, block, r, True, device, first=False, keys=n)]


def _earlier_slots(n: int, block: int, r: int, device: torch.device) -> list[Piece]:
    """All queries against all slots under a mask: for a symbolic n, `summary_pieces` take minutes to trace."""
    visible = (n - 1) // block
    if not visible:
        return []
    i, slot = torch.arange(n, device=device)[:, None], torch.arange(visible * r, device=device)
    return [Piece(Tiles(0, 1, 0, n), Tiles(n, 1, 0, visible * r), first=False, mask=slot // r < i // block)]


def _with_bias(slots: Tensor, slot_bias: Tensor | None, scale: float) -> Tensor:
    """One more column (*batch, r, k + 1), which adds the bias to a slot's scores where queries have a one."""
    column = slots.new_zeros(slots.shape[-2]) if slot_bias is None else slot_bias.to(slots.dtype) / scale
    batch = torch.broadcast_shapes(slots.shape[:-2], column.shape[:-1])
    column = column.expand(*batch, slots.shape[-2]).unsqueeze(-1)
    return torch.cat([slots.expand(*batch, *slots.shape[-2:]), column], dim=-1)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Rows of the second after those of the first, batch axes broadcast."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (first, second)], dim=-2)


@supports(KEY_MASK, instead={CAUSAL: "window_low_rank_blocks, which has slots of earlier blocks only"})
def window_low_rank(
    q: Tensor,
    k: Tensor,
    width: int,
    e: Projection,
    f: Projection | None = None,
    slot_bias: Tensor | None = None,
    *,
    leading: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> WindowLowRank:
    """Each query attends to `width` keys about itself, the first `leading` keys, and all r slots of e and f.

    slot_bias  added to the scores of the slots, (*batch, r); finite: a large negative number closes a slot
    key_mask   boolean (*batch, n), True = attend, as in `window` and `projected`; empty slots are masked
    """
    qk = QueriesKeys.checked("WindowLowRank", q, k, scale=scale, key_mask=key_mask)
    short = shorten("WindowLowRank", qk, e, f)
    if qk.m > qk.n:
        raise UnsupportedError(
            f"WindowLowRank: the last query sits at the last key, so m = {qk.m} queries need at least as many keys, "
            f"but n has {qk.n}; use projected"
        )
    return _checked(WindowLowRank(qk, short, slot_bias, width, leading))


@supports(
    KEY_MASK, always_causal=True, instead={CAUSAL: "window_low_rank"}, one_length="its blocks are cut for one length"
)
def window_low_rank_blocks(
    q: Tensor,
    k: Tensor,
    width: int,
    e: Projection,
    f: Projection | None = None,
    slot_bias: Tensor | None = None,
    *,
    leading: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> WindowLowRankBlocks:
    """Causal `window_low_rank`: e and f (e unless given) shorten earlier blocks of e.length positions to r slots each.

    Each query attends to itself and the width - 1 keys before it, to the first `leading` keys, and to all slots of
    blocks before its own, which may hold keys of the window too.  `slot_bias` (*batch, r) is the same for all blocks.

    >>> from headwise.operators.linear.projections import pooling
    >>> window_low_rank_blocks(torch.zeros(4, 2), torch.zeros(4, 2), 1, pooling(2, 2)).dense()
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000, 0.0000],
            [0.2500, 0.2500, 0.5000, 0.0000],
            [0.2500, 0.2500, 0.0000, 0.5000]])
    """
    qk = QueriesKeys.checked("WindowLowRankBlocks", q, k, scale=scale, key_mask=key_mask)
    qk.require_square("WindowLowRankBlocks", "window, or softmax, for new queries against a cache")
    short = shorten_blocks("WindowLowRankBlocks", qk, e, f)
    return _checked(WindowLowRankBlocks(qk, short, slot_bias, width, leading))


def _checked(operator: Either) -> Either:
    """The operator, if its sizes fit."""
    owner, n, width, leading = type(operator).__name__, operator.qk.n, operator.width, operator.leading
    whole_numbers(owner, least=0, width=width, leading=leading)
    if width < 1 or not 0 <= leading <= n:
        raise ShapeError(
            f"{owner}: width must be at least 1 and leading between 0 and n = {n}, but they are {width} and {leading}"
        )
    slot_bias = operator.slot_bias
    if slot_bias is not None:
        same_kind(owner, slot_bias=slot_bias)
        all_finite(owner, slot_bias=slot_bias)
        broadcasts_to(owner, "slot_bias", slot_bias, (*operator.batch, operator.short.e.slots))
    return operator
