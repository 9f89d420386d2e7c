"""q' = q A_q, k' = k A_k with r < k dimensions whose products are nearest to q.k, where attention depends on them.

Scores of a row that move by ds change its attention by Var_{j ~ P_i}(ds_j), twice the Kullback-Leibler divergence to
second order.  For the heads of a group, which share A_k, the solver of growth (solve.py) minimises

    sum_h E_i Var_{j ~ P_i}( q_i^T (1 - A_q A_k^T) k_j )  ~  sum_h || C_q^(1/2) (1 - A_q A_k^T) C_k^(1/2) ||^2,

C_q = E q q^T and C_k = E_i Cov_{j ~ P_i}(k_j).  With rotary positions only whole pairs of dimensions may go, with their
frequencies, so that scores still depend on distances alone: of the pairs' parts s_c of the scores, the covariance
K = E_i Cov_{j ~ P_i}(s_c, s_c') is all that is needed.  Pairs are dropped one by one, each time the one that is missed
least, and those kept are scaled by w with least (1 - w)^T K (1 - w), w = 0 for those that go.  Where only some
dimensions turn (GPT-NeoX, Phi), the others are narrowed by the solver, and the width is split where both lose least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from headwise.growth.metric import Root, root
from headwise.growth.normal_equations import take_rows, visible_rows
from headwise.growth.solve import truncate
from headwise.models.widths.widened_attention import WidenedCall

ROWS = 64
"""Query rows of a sequence, drawn at random, behind the statistics."""

LEVELS = (1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of its width that a layer may keep."""


@final
class SiteStatistics:
    """C_q (h, k, k) and C_k (h_kv, k, k), and K (h_kv, pairs, pairs) of pairs that turn, of one attention module."""

    def __init__(self, call: WidenedCall, pairs: Sequence[tuple[int, int]]) -> None:
        self.heads, self.key_heads, self.width = call.q.shape[1], call.k.shape[1], call.q.shape[-1]
        self.value_width = call.v.shape[-1]
        self.pairs = list(pairs)
        sums = {"dtype": torch.float64, "device": call.q.device}
        self.c_q = torch.zeros(self.heads, self.width, self.width, **sums)
        self.c_k = torch.zeros(self.key_heads, self.width, self.width, **sums)
        self.between = torch.zeros(self.key_heads, len(self.pairs), len(self.pairs), **sums)
        self.rows = 0  # of each head
        self._draws = torch.Generator().manual_seed(0)

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def fixed(self) -> list[int]:
        """The dimensions that do not turn with the position."""
        turning = {i for pair in self.pairs for i in pair}
        return [i for i in range(self.width) if i not in turning]

    def levels(self) -> list[int]:
        """The widths to choose from: whole pairs where all dimensions turn, and at least one pair where some do."""
        steps = [int(self.width * share) for share in LEVELS]
        if self.pairs:
            steps = [step if self.fixed else step - step % 2 for step in steps if step >= 2]
        return sorted({step for step in steps if step > 0})

    @torch.no_grad()
    def add(self, call: WidenedCall) -> None:
        """Add the sampled rows of one call."""
        b, _, m, _ = call.q.shape
        self.rows += b * min(m, ROWS)
        rows = torch.randperm(m, generator=self._draws)[:ROWS].sort().values.to(call.q.device)
        q, k = call.q.index_select(2, rows).float(), call.k.float()
        shared = k.repeat_interleave(self.group, 1)
        scores = call.scaling * q @ shared.mT
        if call.mask.attn_bias is not None:
            scores = scores + take_rows(call.mask.attn_bias, rows).float()
        visible = visible_rows(call.mask, rows)
        scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
        p = scores.softmax(-1).nan_to_num(0)
        for i in range(b):
            for h in range(self.heads):
                self._add_head(h, q[i, h].double(), k[i, h // self.group].double(), p[i, h].double())

    def _add_head(self, h: int, q: Tensor, k: Tensor, p: Tensor) -> None:
        g = h // self.group
        if self.pairs:
            first, second = (list(side) for side in zip(*self.pairs, strict=True))
            parts = q[:, None, first] * k[:, first] + q[:, None, second] * k[:, second]  # (m, n, pairs)
            mean = torch.einsum("mn,mnc->mc", p, parts)
            weighted = (parts - mean[:, None]) * p.sqrt().unsqueeze(-1)
            weighted = weighted.flatten(0, 1)
            self.between[g] += weighted.mT @ weighted
        self.c_q[h] += q.mT @ q
        mean = p @ k
        self.c_k[g] += (k * p.sum(0)[:, None]).mT @ k - mean.mT @ mean

    def maps(self, width: int) -> tuple[Tensor, Tensor]:
        """A_q (h, k, width) and A_k (h_kv, k, width)."""
        found = [self._map(g, width) for g in range(self.key_heads)]
        return torch.cat([q for q, _ in found]), torch.stack([k for _, k in found])

    def _map(self, g: int, width: int) -> tuple[Tensor, Tensor]:
        """The best split of the width between dimensions that do not turn and pairs, whose covariance is left out."""
        fixed, splits = self.fixed, []
        for count in range(min(1, len(self.pairs)), min(len(self.pairs), width // 2) + 1):
            if width - 2 * count > len(fixed):
                continue
            kept, scale, pair_loss = best_pairs(self.between[g], count) if self.pairs else ([], [], 0.0)
            a_q, a_k, fixed_loss = self._fixed_map(g, width - 2 * count)
            splits.append((pair_loss + fixed_loss, kept, scale, a_q, a_k))
        _, kept, scale, a_q, a_k = min(splits, key=lambda split: split[0])
        query_map, key_map = (x.new_zeros(*x.shape[:-2], self.width, width) for x in (a_q, a_k))
        query_map[..., fixed, : a_q.shape[-1]], key_map[fixed, : a_k.shape[-1]] = a_q, a_k
        for i, (c, w) in enumerate(zip(kept, scale, strict=True)):
            for side, dimension in enumerate(self.pairs[c]):
                column = a_q.shape[-1] + 2 * i + side
                query_map[:, dimension, column], key_map[dimension, column] = float(w), 1
        return query_map, key_map

    def _fixed_map(self, g: int, width: int) -> tuple[Tensor, Tensor, float]:
        """A_q (group, fixed, width), A_k (fixed, width), and what they lose, in the unit of K."""
        fixed = self.fixed
        c_q = self.c_q[g * self.group : (g + 1) * self.group][:, fixed][:, :, fixed]
        c_k = self.c_k[g][fixed][:, fixed]
        one = torch.eye(len(fixed), dtype=c_k.dtype, device=c_k.device)
        if width == len(fixed):
            return one.expand(self.group, -1, -1), one, 0.0
        if width == 0:
            a_q, a_k = c_q[..., :0], c_k[:, :0]
        else:
            a_q, a_k = subspace(c_q, c_k, width)
        lost = one - a_q @ a_k.mT
        loss = (c_q @ lost * (lost @ c_k)).sum() / (self.rows * self.group)
        return a_q, a_k, float(loss)


def subspace(c_q: Tensor, c_k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A_q (g, k, r) and A_k (k, r) with least sum_h ||C_q^(1/2) (1 - A_q A_k^T) C_k^(1/2)||, C_q (g, k, k)."""
    roots = [root(c, 1e-9) for c in c_q]
    q = Root(torch.stack([x.root for x in roots]), torch.stack([x.inverse for x in roots]), roots[0].rank)
    one = torch.eye(len(c_k), dtype=c_k.dtype, device=c_k.device).expand(len(c_q), -1, -1)
    factors = truncate(one, width, q, root(c_k, 1e-9))
    return factors.wq, factors.wk


def best_pairs(between: Tensor, count: int) -> tuple[list[int], Tensor, float]:
    """`count` pairs to keep, in order, the factors w of their scores with least (1 - w)^T K (1 - w), and that.

    Backward elimination: the pair without which least squares of the whole score on the others gets worse least,
    by w_c^2 / (K^-1)_cc.
    """
    size = len(between)
    ridge = 1e-9 * between.diagonal().mean().clamp(min=torch.finfo(between.dtype).tiny)
    inverse = torch.linalg.inv(between + ridge * torch.eye(size, dtype=between.dtype, device=between.device))
    kept, w = list(range(size)), inverse @ between.sum(1)
    while len(kept) > count:
        c = int((w.square() / inverse.diagonal()).argmin())
        column, corner = inverse[:, c].clone(), inverse[c, c].clone()
        w = w - column * (w[c] / corner)
        inverse = inverse - torch.outer(column, column) / corner
        rest = [i for i in range(len(kept)) if i != c]
        kept, w, inverse = [kept[i] for i in rest], w[rest], inverse[rest][:, rest]
    lost = torch.ones_like(between[0])
    lost[kept] -= w
    return kept, w, float(lost @ between @ lost)
