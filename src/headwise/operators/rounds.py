"""softmax over the union of each position itself and, round by round, the keys that a sort has brought near it.

Round r orders queries and keys; block t of the ordered queries meets blocks t - 1 and t of the ordered keys, where the
mask of the round allows.  A pair belongs to the first round that has it, so nothing is counted twice.
Tensors of the kernel: q, k (b, n, c), v (b, n, c), own (b, n) the scores of positions with themselves, and whole
numbers: orders of queries and of keys (b, rounds, t * size) with n for "nobody", masks (b, rounds, t, size, 2 size).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor


@final
@dataclass(frozen=True)
class Rounds:
    size: int
    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, own, order_q, order_k, masks = tensors
        out, lse = v.clone(), own.clone()
        for i, there, mask in self._each(order_q, masks):
            rows, keys, values = self._blocks(q, there), self._band(k, order_k[:, i]), self._band(v, order_k[:, i])
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows, keys, values, 0.0, False, attn_mask=_additive(mask, q.dtype), scale=self.scale
            )
            # back to where the queries came from; "nobody" falls off the end
            part_lse = part_lse.masked_fill(~mask.any(-1), -math.inf)
            part = _scatter(part.flatten(1, 2), there, q.shape[1])
            part_lse = _scatter(part_lse.flatten(1).unsqueeze(-1), there, q.shape[1]).squeeze(-1)
            merged = torch.logaddexp(lse, part_lse)
            out.mul_((lse - merged).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - merged).exp_().unsqueeze(-1))
            lse = merged
        return out, lse

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, own, order_q, order_k, masks, out, lse = tensors
        n = q.shape[1]
        itself = (own - lse).exp()
        down = itself * (pull * (v - out)).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), itself.unsqueeze(-1) * pull
        for i, there, mask in self._each(order_q, masks):
            rows, keys, values = self._blocks(q, there), self._band(k, order_k[:, i]), self._band(v, order_k[:, i])
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                self._blocks(pull, there),
                rows,
                keys,
                values,
                self._blocks(out, there),
                self._blocks(lse.unsqueeze(-1), there).squeeze(-1),
                0.0,
                False,
                attn_mask=_additive(mask, q.dtype),
                scale=self.scale,
            )
            dq += _scatter(parts[0].flatten(1, 2), there, n)
            for total, part in ((dk, parts[1]), (dv, parts[2])):
                total += _scatter(self._unband(part), order_k[:, i], n)
        return dq, dk, dv, down

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v, own, order_q, order_k, masks = tensors
        itself, weights = self.weights(q, k, own, order_q, order_k, masks)
        out = itself.unsqueeze(-1) * v
        for i, p in enumerate(weights):
            part = p @ self._band(v, order_k[:, i])
            out = out + _scatter(part.flatten(1, 2), order_q[:, i], q.shape[1])
        return out

    def plain_adjoint(self, u: Tensor, *tensors: Tensor) -> Tensor:
        q, k, own, order_q, order_k, masks = tensors
        itself, weights = self.weights(q, k, own, order_q, order_k, masks)
        out = itself.unsqueeze(-1) * u
        for i, p in enumerate(weights):
            part = self._unband(p.mT @ self._blocks(u, order_q[:, i]))
            out = out + _scatter(part, order_k[:, i], k.shape[1])
        return out

    def weights(
        self, q: Tensor, k: Tensor, own: Tensor, order_q: Tensor, order_k: Tensor, masks: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """P_ii (b, n), and the entries of P in the blocks of each round (b, t, size, 2 size)."""
        n, scores, top = q.shape[1], [], own.detach()
        for i, there, mask in self._each(order_q, masks):
            s = self.scale * (self._blocks(q, there) @ self._band(k, order_k[:, i]).mT)
            s = s.masked_fill(~mask, -math.inf)
            highest = s.detach().amax(-1).flatten(1).unsqueeze(-1)
            reached = _scatter(mask.any(-1).flatten(1).unsqueeze(-1).to(q.dtype), there, n).squeeze(-1) > 0
            highest = _scatter(highest.masked_fill(highest == -math.inf, 0), there, n).squeeze(-1)
            top = torch.where(reached, torch.maximum(top, highest), top)
            scores.append(s)
        itself = (own - top).exp()
        total, parts = itself, []
        for i, there, _ in self._each(order_q, masks):
            w = (scores[i] - self._blocks(top.unsqueeze(-1), there)).exp()
            total = total + _scatter(w.sum(-1).flatten(1).unsqueeze(-1), there, n).squeeze(-1)
            parts.append(w)
        shares = [
            w / self._blocks(total.unsqueeze(-1), there, fill=1.0)
            for w, (_, there, _) in zip(parts, self._each(order_q, masks), strict=True)
        ]
        return itself / total, shares

    def _each(self, order_q: Tensor, masks: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        return [(i, order_q[:, i], masks[:, i]) for i in range(order_q.shape[1])]

    def _blocks(self, x: Tensor, order: Tensor, *, fill: float = 0.0) -> Tensor:
        """Rows of x (b, n, c) in `order`, (b, t, size, c)."""
        return _take(x, order, fill).unflatten(1, (-1, self.size))

    def _band(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of x in `order`, each block behind the one before it: (b, t, 2 size, c)."""
        rows = F.pad(_take(x, order, 0.0), (0, 0, self.size, 0))
        return rows.unfold(1, 2 * self.size, self.size).mT

    def _unband(self, x: Tensor) -> Tensor:
        """The transpose of that: (b, t, 2 size, c) -> (b, t * size, c), overlapping halves added."""
        before, own = x[:, 1:, : self.size], x[:, :, self.size :]
        return (own + F.pad(before, (0, 0, 0, 0, 0, 1))).flatten(1, 2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _take(x: Tensor, order: Tensor, fill: float) -> Tensor:
    """x (b, n, c) at `order` (b, l), `fill` where that is n."""
    x = F.pad(x, (0, 0, 0, 1), value=fill)
    b, n, c = x.shape
    first = n * torch.arange(b, device=x.device).unsqueeze(-1)
    return x.reshape(b * n, c).index_select(0, (order + first).flatten()).reshape(b, -1, c)


def _scatter(x: Tensor, order: Tensor, n: int) -> Tensor:
    """The transpose: x (b, l, c) to rows `order` of (b, n, c); no row is named twice."""
    b, _, c = x.shape
    first = (n + 1) * torch.arange(b, device=x.device).unsqueeze(-1)
    out = x.new_zeros(b * (n + 1), c).index_copy(0, (order + first).flatten(), x.reshape(-1, c))
    return out.reshape(b, n + 1, c)[:, :n]
