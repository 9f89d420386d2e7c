"""P_ij = [exp(s q_i . k_j) near i + sum_t exp(s q_i . (E k)_t + b_t) F_tj] / Z_i: near keys one by one, the others in r
slots, and one normaliser Z for both.

A window and a low-rank rest under one softmax, so that a head needs no weight between near and far: the slots of
Linformer (Wang et al. 2020) are r more keys beside those of a band (Beltagy et al. 2020).
A slot that stands for c keys has a bias b = log c.  O(n (width + r) (k + d)).  Not causal: a slot mixes positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError, UnsupportedError
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.slots import Shortened, SlotOperator, shorten
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Projection
from headwise.operators.masks import CAUSAL, KEY_MASK, supports
from headwise.operators.sparse.window import Window, window
from headwise.shapes import all_finite, broadcast_batch, broadcasts_to, same_kind, whole_numbers


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
        slots = self.short.values(v)
        batch = torch.broadcast_shapes(slots.shape[:-2], v.shape[:-2])
        rows = [x.expand(*batch, *x.shape[-2:]) for x in (slots, v)]
        return self._inner().apply(torch.cat(rows, dim=-2))

    def adjoint(self, u: Tensor) -> Tensor:
        r = self.short.e.slots
        out = self._inner().adjoint(u)
        return out[..., r:, :] + self.short.adjoint(out[..., :r, :])

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        copies, inner = self.batch.numel(), self._inner()
        shortening = Cost(self.short.multiply_adds(d, copies, adjoint=adjoint), copies * self.short.e.slots * d)
        return shortening + (inner.adjoint_cost(d) if adjoint else inner.cost(d))

    def _inner(self) -> Window:
        """W (*batch, m, r + n): one more column of q and k adds the bias to a slot's scores and nothing to a key's."""
        slots, r, scale = self.short.keys(), self.short.e.slots, self.qk.scale
        column = slots.new_zeros(r) if self.slot_bias is None else self.slot_bias.to(slots.dtype) / scale
        batch = torch.broadcast_shapes(self.shape[:-2], column.shape[:-1])
        slots = slots.expand(*batch, *slots.shape[-2:])
        slots = torch.cat([slots, column.expand(*batch, r).unsqueeze(-1)], dim=-1)
        keys = F.pad(self.qk.k, (0, 1))
        keys = torch.cat([slots, keys.expand(*batch, *keys.shape[-2:])], dim=-2)
        key_mask = None
        if self.qk.key_mask is not None and self.short.filled is not None:
            key_mask = torch.cat([x.expand(*batch, x.shape[-1]) for x in (self.short.filled, self.qk.key_mask)], dim=-1)
        queries = F.pad(self.qk.q, (0, 1), value=1.0)
        return window(queries, keys, self.width, leading=r + self.leading, scale=scale, key_mask=key_mask)


@supports(KEY_MASK, instead={CAUSAL: "window, projected_blocks or near_far"})
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
    whole_numbers("WindowLowRank", least=0, width=width, leading=leading)
    if width < 1 or not 0 <= leading <= qk.n:
        raise ShapeError(
            f"WindowLowRank: width must be at least 1 and leading between 0 and n = {qk.n}, but they are {width} and "
            f"{leading}"
        )
    if qk.m > qk.n:
        raise UnsupportedError(
            f"WindowLowRank: the last query sits at the last key, so m = {qk.m} queries need at least as many keys, "
            f"but n has {qk.n}; use projected"
        )
    if slot_bias is not None:
        same_kind("WindowLowRank", slot_bias=slot_bias)
        all_finite("WindowLowRank", slot_bias=slot_bias)
        batch = broadcast_batch("WindowLowRank", q_and_k=qk.batch, projections=short.batch)
        broadcasts_to("WindowLowRank", "slot_bias", slot_bias, (*batch, e.slots))
    return WindowLowRank(qk, short, slot_bias, width, leading)
