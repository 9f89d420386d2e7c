"""P_ij = [exp(s q_i . k_j) near i + sum_t exp(s q_i . (E k)_t + b_t) F_tj] / Z_i: near keys one by one, the others in r
slots, and one normaliser Z for both.

A window with a low-rank rest under one softmax, so that a head which now looks near and now far needs no weight between
the two: the slots of Linformer (Wang et al. 2020) stand beside the keys of a band (Beltagy et al. 2020) as r more keys.
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
from headwise.operators._kernels.queries_keys import Pair, pair
from headwise.operators._kernels.slots import Shortened, shortened
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Projection
from headwise.operators.sparse.window import Window, window
from headwise.shapes import all_finite, broadcast_batch, broadcasts_to


@final
@dataclass(frozen=True, eq=False)
class WindowLowRank(AttentionOperator):
    """P = W [F; I], W a window over the slots and the keys in one row, whose slots every query sees."""

    both: Pair
    short: Shortened
    bias: Tensor | None  # (*batch, r)
    width: int
    tokens: int

    @property
    def shape(self) -> torch.Size:
        batch = broadcast_batch("WindowLowRank", q_and_k=self.both.batch, projections=self.short.batch)
        return torch.Size((*batch, self.both.m, self.both.n))

    @property
    def like(self) -> Tensor:
        return self.both.q

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

    def cost(self, d: int) -> Cost:
        copies, r = self.shape[:-2].numel(), self.short.e.slots
        return Cost(self.short.multiply_adds(d, copies), copies * r * d) + self._inner().cost(d)

    def adjoint_cost(self, d: int) -> Cost:
        copies, r = self.shape[:-2].numel(), self.short.e.slots
        return Cost(self.short.adjoint_multiply_adds(d, copies), copies * r * d) + self._inner().adjoint_cost(d)

    def _inner(self) -> Window:
        """W (*batch, m, r + n): one more column of q and k adds the bias to a slot's scores and nothing to a key's."""
        slots, r, scale = self.short.keys(), self.short.e.slots, self.both.scale
        column = slots.new_zeros(r) if self.bias is None else self.bias.to(slots.dtype) / scale
        batch = torch.broadcast_shapes(self.shape[:-2], column.shape[:-1])
        slots = slots.expand(*batch, *slots.shape[-2:])
        slots = torch.cat([slots, column.expand(*batch, r).unsqueeze(-1)], dim=-1)
        keys = F.pad(self.both.k, (0, 1))
        keys = torch.cat([slots, keys.expand(*batch, *keys.shape[-2:])], dim=-2)
        seen = None
        if self.both.keep is not None and self.short.filled is not None:
            seen = torch.cat([x.expand(*batch, x.shape[-1]) for x in (self.short.filled, self.both.keep)], dim=-1)
        queries = F.pad(self.both.q, (0, 1), value=1.0)
        return window(queries, keys, self.width, tokens=r + self.tokens, scale=scale, key_mask=seen)


def window_low_rank(
    q: Tensor,
    k: Tensor,
    width: int,
    e: Projection,
    f: Projection | None = None,
    bias: Tensor | None = None,
    *,
    tokens: int = 0,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> WindowLowRank:
    """Each query sees `width` keys about itself and the first `tokens`, as in `window`, and all r slots of e and f.

    bias     added to the scores of the slots, (*batch, r); -inf is not allowed, a large negative number shuts a slot
    key_mask  boolean (*batch, n), True at real keys, as in `window` and `projected`; empty slots are not seen
    """
    if causal:
        raise UnsupportedError(
            "WindowLowRank: a slot mixes positions, so a query would see later ones; use window, or projected_blocks"
        )
    both = pair("WindowLowRank", q, k, scale=scale, key_mask=key_mask)
    short = shortened("WindowLowRank", both, e, f)
    if width < 1 or not 0 <= tokens <= both.n:
        raise ShapeError(
            f"WindowLowRank: width must be at least 1 and tokens between 0 and n = {both.n}, but they are {width} and "
            f"{tokens}"
        )
    if both.m > both.n:
        raise UnsupportedError(
            f"WindowLowRank: the last query sits at the last key, so m = {both.m} queries need at least as many keys, "
            f"but n has {both.n}; use projected"
        )
    if bias is not None:
        all_finite("WindowLowRank", bias=bias)
        batch = broadcast_batch("WindowLowRank", q_and_k=both.batch, projections=short.batch)
        broadcasts_to("WindowLowRank", "bias", bias, (*batch, e.slots))
    return WindowLowRank(both, short, bias, width, tokens)
