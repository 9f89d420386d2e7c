"""P = H L F, H = softmax over features of s Q, L = softmax over slots of s (E K)^T, E and F in R^(r x n).

The double softmax with projected keys and values of Verma, "Revisiting Linformer with a modified self-attention with
linear complexity".  H (L (F V)) costs O(n k d) and no r; forming E K and F V costs O(n r d) for dense E and F and
O(n d) for the sparse ones (see `projections`): only then is the cost "independent of the projection", as the paper
says.  Its choice E = 2^-n R makes L uniform and every output row the same; here E and F are arguments.
Rows of P sum to one when those of F do.  It does not approximate softmax attention.

The causal form (`factored_blocks`) shortens blocks of b positions by E and F in R^(r x b):

    out_i = sum_c H_ic ( sum_(j <= i, own block) e_jc v_j + sum_(earlier blocks t) exp(s E k_t)_c^T F v_t ) / Z_ic

exact inside the query's own block, projected before it.  With r = b and E = F = I it is `efficient(causal=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels.double_softmax import double_softmax, double_softmax_adjoint
from headwise.operators._kernels.prefix_sums import Blocks, blocked, blocked_absence
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.slots import BlockSlotOperator, Shortened, SlotOperator, shorten, shorten_blocks
from headwise.operators.linear.projections import Projection
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports


@final
@dataclass(frozen=True, eq=False)
class Factored(SlotOperator):
    """Keys and values are shortened to r slots, then attended to as in efficient attention."""

    qk: QueriesKeys
    short: Shortened

    def apply(self, v: Tensor) -> Tensor:
        return double_softmax(self.qk, self.short.keys(), self.short.values(v), self.short.filled).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.short.adjoint(
            double_softmax_adjoint(self.qk, self.short.keys(), self._expand(u), self.short.filled)
        )

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        """E K and F v, then two products; nothing but the projections depends on r beyond r k d."""
        copies, k, r = self.batch.numel(), self.qk.k.shape[-1], self.short.e.slots
        shortening = self.short.multiply_adds(d, copies, adjoint=adjoint)
        return Cost(copies * (self.qk.m + r) * k * d + shortening, copies * (r * (k + d) + k * d), 3)


@final
@dataclass(frozen=True, eq=False)
class FactoredBlocks(BlockSlotOperator):
    """The double softmax over the own block's keys up to the query and projections of earlier blocks."""

    qk: QueriesKeys
    short: Shortened

    def apply(self, v: Tensor) -> Tensor:
        compute = torch.promote_types(v.dtype, torch.float32)
        block = self.short.e.length
        x = blocked(self.qk.mask.hide(v.to(compute)), block)
        features = torch.softmax(self.qk.q.to(compute) * self.qk.scale, dim=-1)
        out = self.running(compute).attend(blocked(features, block), x, self.short.values(x))
        return out.flatten(-3, -2)[..., : self.qk.n, :].to(v.dtype)

    def _cost(self, d: int, *, adjoint: bool) -> Cost:
        """The adjoint is the derivative of `apply`: once forward, and back through all but the weights in blocks."""
        k, r, block = self.qk.k.shape[-1], self.short.e.slots, self.short.e.length
        copies = self.batch.numel() * self.blocks
        states, inside = copies * (block + r) * k * d, copies * block * block
        work = states + inside * (k + d) + self.short.multiply_adds(d, copies)
        forward = Cost(work, copies * (2 * k * d + block * (block + 4 * k)), self.blocks)
        if not adjoint:
            return forward
        back = states + inside * d + self.short.f.adjoint_multiply_adds(d * copies)
        return forward + Cost(back, copies * 2 * k * d, self.blocks)

    def running(self, dtype: torch.dtype) -> Blocks:
        """Running sums in which every block leaves its slots to later ones."""
        keys = self.short.k.to(dtype) * self.qk.scale
        slots = self.short.keys().to(dtype) * self.qk.scale
        hidden = blocked_absence(self.qk.key_mask, self.qk.n, self.short.e.length, keys.device)
        filled = self.short.filled
        if filled is None:
            filled = torch.ones(self.blocks, self.short.e.slots, dtype=torch.bool, device=keys.device)
        return Blocks(keys, hidden, slots, ~filled.unsqueeze(-1))


@supports(KEY_MASK, instead={CAUSAL: "factored_blocks, which projects earlier blocks only, or efficient"})
def factored(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Factored:
    """P = softmax_features(scale q) softmax_slots(scale e k)^T f, with f = e unless given.

    `key_mask` (*batch, n), True = attend: masked rows of k and v are zero before the projection, means are over the
    other positions, and empty slots get no weight.  Real rows then equal those of the shorter sequence under the same
    columns of e and f; not for `Hadamard`, which pads to another power of two.
    """
    qk = QueriesKeys.checked("Factored", q, k, scale=scale, key_mask=key_mask)
    return Factored(qk, shorten("Factored", qk, e, f))


@supports(KEY_MASK, always_causal=True, instead={CAUSAL: "factored"}, one_length="its blocks are cut for one length")
def factored_blocks(
    q: Tensor,
    k: Tensor,
    e: Projection,
    f: Projection | None = None,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> FactoredBlocks:
    """Causal `factored`: e and f (e unless given) shorten earlier blocks of e.length positions.

    `key_mask` (*batch, n), True = attend; with padding at the end, real rows equal those of the shorter sequence.
    """
    qk = QueriesKeys.checked("FactoredBlocks", q, k, scale=scale, key_mask=key_mask)
    qk.require_square("FactoredBlocks", "efficient with causal=True, or window, for new queries against a cache")
    operator = FactoredBlocks(qk, shorten_blocks("FactoredBlocks", qk, e, f))
    operator.running(torch.promote_types(k.dtype, torch.float32)).check("FactoredBlocks")
    return operator
