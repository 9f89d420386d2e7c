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
from headwise.errors import UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.pair import pair
from headwise.operators.projections import Projection
from headwise.operators.shortened import Shortened, shortened
from headwise.operators.window import Window, window
from headwise.shapes import all_finite, broadcasts_to


@final
@dataclass(frozen=True, eq=False)
class WindowLowRank(AttentionOperator):
    """P = W [F; I], W a window over the slots and the keys in one row, whose slots every query sees."""

    inner: Window  # (*batch, m, r + n)
    short: Shortened

    @property
    def shape(self) -> torch.Size:
        *batch, m, n = self.inner.shape
        return torch.Size((*batch, m, n - self.short.e.slots))

    @property
    def claims(self) -> frozenset[Claim]:
        return self.inner.claims & self.short.claims

    def apply(self, v: Tensor) -> Tensor:
        slots = self.short.values(v)
        batch = torch.broadcast_shapes(slots.shape[:-2], v.shape[:-2])
        rows = [x.expand(*batch, *x.shape[-2:]) for x in (slots, v)]
        return self.inner.apply(torch.cat(rows, dim=-2))

    def adjoint(self, u: Tensor) -> Tensor:
        r = self.short.e.slots
        out = self.inner.adjoint(u)
        return out[..., r:, :] + self.short.adjoint(out[..., :r, :])

    def cost(self, d: int) -> Cost:
        copies, r = self.shape[:-2].numel(), self.short.e.slots
        return Cost(self.short.multiply_adds(d, copies), copies * r * d) + self.inner.cost(d)

    def adjoint_cost(self, d: int) -> Cost:
        copies, r = self.shape[:-2].numel(), self.short.e.slots
        return Cost(self.short.adjoint_multiply_adds(d, copies), copies * r * d) + self.inner.adjoint_cost(d)


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
    padding: Tensor | None = None,
) -> WindowLowRank:
    """Each query sees `width` keys about itself and the first `tokens`, as in `window`, and all r slots of e and f.

    bias     added to the scores of the slots, (*batch, r); -inf is not allowed, a large negative number shuts a slot
    padding  boolean (*batch, n), True at real keys, as in `window` and `projected`; empty slots are not seen
    """
    if causal:
        raise UnsupportedError(
            "WindowLowRank: a slot mixes positions, so a query would see later ones; use window, or projected_blocks"
        )
    both = pair("WindowLowRank", q, k, scale=scale, padding=padding)
    short = shortened("WindowLowRank", both, e, f)
    slots, keep = short.keys(), both.keep
    batch = torch.broadcast_shapes(both.k.shape[:-2], slots.shape[:-2])
    if bias is not None:
        all_finite("WindowLowRank", bias=bias)
        broadcasts_to("WindowLowRank", "bias", bias, (*batch, e.slots))
    # one more column adds the bias to a slot's scores and nothing to a key's
    column = slots.new_zeros(e.slots) if bias is None else bias.to(slots.dtype) / both.scale
    slots = torch.cat([slots, column.unsqueeze(-1).expand(*slots.shape[:-1], 1)], dim=-1)
    rows = [slots, F.pad(both.k, (0, 1))]
    keys = torch.cat([x.expand(*batch, *x.shape[-2:]) for x in rows], dim=-2)
    seen = None
    if keep is not None and short.filled is not None:
        masks = [short.filled, keep]
        shared = torch.broadcast_shapes(*(x.shape[:-1] for x in masks))
        seen = torch.cat([x.expand(*shared, x.shape[-1]) for x in masks], dim=-1)
    wide = F.pad(both.q, (0, 1), value=1.0)
    return WindowLowRank(window(wide, keys, width, tokens=e.slots + tokens, scale=both.scale, padding=seen), short)
