"""P = H L F, H = softmax over features of s Q, L = softmax over slots of s (E K)^T, E and F in R^(r x n).

The double softmax with projected keys and values of Verma, "Revisiting Linformer with a modified self-attention with
linear complexity".  H (L (F V)) costs O(n k d) and no r; forming E K and F V costs O(n r d) for dense E and F, which
the source leaves out: its "independent of the projection" holds for the sparse projections (see `projections`), for
which both are O(n d).  Its own choice, E = 2^-n R, makes L uniform and every output row the same; E and F are yours.
Rows of P sum to one when those of F do.  Not an approximation of softmax attention: another operator to train with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import UnsupportedError
from headwise.operators._kernels.double_softmax import double_softmax, double_softmax_adjoint
from headwise.operators._kernels.queries_keys import Pair, pair
from headwise.operators._kernels.slots import Shortened, shortened
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Projection
from headwise.shapes import broadcast_batch


@final
@dataclass(frozen=True, eq=False)
class Factored(AttentionOperator):
    """Keys and values are shortened to r slots, then attended to as in efficient attention."""

    both: Pair
    short: Shortened

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.batch, self.both.m, self.both.n))

    @property
    def batch(self) -> torch.Size:
        return broadcast_batch("Factored", q_and_k=self.both.batch, projections=self.short.batch)

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        return self.short.claims

    def apply(self, v: Tensor) -> Tensor:
        return double_softmax(self.both, self.short.keys(), self.short.values(v), self.short.filled).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        u = u.expand(*broadcast_batch("Factored", operator=self.batch, u=u.shape[:-2]), *u.shape[-2:])
        return self.short.adjoint(double_softmax_adjoint(self.both, self.short.keys(), u, self.short.filled))

    def cost(self, d: int) -> Cost:
        """E K and F v, then two products; nothing but the projections knows of r beyond r k d."""
        return self._cost(d, self.short.multiply_adds(d, self.batch.numel()))

    def adjoint_cost(self, d: int) -> Cost:
        return self._cost(d, self.short.adjoint_multiply_adds(d, self.batch.numel()))

    def _cost(self, d: int, shortening: int) -> Cost:
        copies, k, r = self.batch.numel(), self.both.k.shape[-1], self.short.e.slots
        return Cost(copies * (self.both.m + r) * k * d + shortening, copies * (r * (k + d) + k * d), 3)


def factored(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Factored:
    """P = softmax_features(scale q) softmax_slots(scale e k)^T f, with f = e unless given.

    `key_mask` (*batch, n), True at real keys: missing rows of k and v are zero before the projection, means are over
    those that are there, and empty slots get no weight.  Real rows then equal those of the shorter sequence under the
    same columns of e and f; not for `Hadamard`, which fills up to another power of two.
    """
    if causal:
        raise UnsupportedError(
            "Factored: a projection mixes positions, so a query would see later ones; use factored_blocks, which "
            "projects earlier blocks only, or efficient with causal=True"
        )
    both = pair("Factored", q, k, scale=scale, key_mask=key_mask)
    return Factored(both, shortened("Factored", both, e, f))
