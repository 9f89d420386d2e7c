"""P = softmax over slots of s Q (E K)^T, times F: keys and values shortened to r slots, E and F in R^(r x n).

Linformer, Wang et al. 2020 (arXiv:2006.04768): E and F learned, shared by heads, by layers, or by keys and values.
O(n r (k + d)): linear in n for a fixed r.  Rows of P sum to one when those of F do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import UnsupportedError
from headwise.operators._kernels.queries_keys import Pair, pair
from headwise.operators._kernels.scores import Scores
from headwise.operators._kernels.slots import Shortened, shortened
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Projection
from headwise.operators.softmax import Softmax
from headwise.shapes import broadcast_batch


@final
@dataclass(frozen=True, eq=False)
class Projected(AttentionOperator):
    """Exact attention to r slots instead of n keys."""

    both: Pair
    short: Shortened

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.batch, self.both.m, self.both.n))

    @property
    def batch(self) -> torch.Size:
        return broadcast_batch("Projected", q_and_k=self.both.batch, projections=self.short.batch)

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        return self.short.claims

    def apply(self, v: Tensor) -> Tensor:
        return self._slots().apply(self.short.values(v))

    def adjoint(self, u: Tensor) -> Tensor:
        u = u.expand(*broadcast_batch("Projected", operator=self.batch, u=u.shape[:-2]), *u.shape[-2:])
        return self.short.adjoint(self._slots().adjoint(u))

    def cost(self, d: int) -> Cost:
        copies = self.batch.numel()
        attention = self._slots().cost(d).times(copies // self._slots().shape[:-2].numel())
        return Cost(self.short.multiply_adds(d, copies), copies * self.short.e.slots * d) + attention

    def adjoint_cost(self, d: int) -> Cost:
        copies = self.batch.numel()
        attention = self._slots().adjoint_cost(d).times(copies // self._slots().shape[:-2].numel())
        return Cost(self.short.adjoint_multiply_adds(d, copies), copies * self.short.e.slots * d) + attention

    def _slots(self) -> Softmax:
        """Attention of the queries to the slots."""
        filled = self.short.filled
        keep = None if filled is None else filled.unsqueeze(-2)
        return Softmax(Scores(self.both.q, self.short.keys(), self.both.scale, keep=keep))


def projected(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Projected:
    """P = softmax_slots(scale q (e k)^T) f, with f = e unless given (shared by keys and values).

    A learned projection is `dense(matrix)`; (h, r, n) is one for each head.  `key_mask` (*batch, n), True at real keys,
    as in `factored`: real rows equal those of the shorter sequence under the same columns of e and f (not `Hadamard`).
    """
    if causal:
        raise UnsupportedError(
            "Projected: a projection mixes positions, so a query would see later ones; use projected_blocks, whose "
            "queries see the keys of their own block exactly and projections of earlier blocks only"
        )
    both = pair("Projected", q, k, scale=scale, key_mask=key_mask)
    return Projected(both, shortened("Projected", both, e, f))
