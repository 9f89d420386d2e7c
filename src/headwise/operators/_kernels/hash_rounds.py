"""softmax over the union of each position itself and, round by round, the keys that a sort placed near it.

Round r orders queries and keys; block t of the ordered queries meets blocks t - 1 and t of the ordered keys, where the
mask of the round allows.  A pair belongs to the first round that has it, so nothing is counted twice.
Tensors of the kernel: q, k (b, n, c), v (b, n, c), own (b, n) the scores of positions with themselves, and, for every
round, whole numbers: the order of queries (b, rounds, t size) and of keys (b, rounds, size + t size), the place of each
position in either (b, rounds, n), and masks (b, rounds, t, size, 2 size).  Where an order has more places than there
are positions it names some position, which the mask hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.operators._kernels import limits


@final
@dataclass(frozen=True)
class Rounds:
    size: int
    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return in_groups(self._forward, self._entries(tensors[0]), tensors)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return in_groups(self._pull, self._entries(pull), (pull, *tensors))

    def _entries(self, q: Tensor) -> int:
        """Scores of one round and one member of the batch."""
        return q.shape[1] * 2 * self.size

    def _forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, own, *others = tensors
        out, lse = v.clone(), own.clone()
        for order_q, order_k, place_q, _, mask in _each(others):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                self._blocks(q, order_q),
                self._band(k, order_k),
                self._band(v, order_k),
                0.0,
                False,
                attn_mask=_additive(mask, q.dtype),
                scale=self.scale,
            )
            # back to where the queries came from
            part = _take(part.flatten(1, 2), place_q)
            part_lse = part_lse.flatten(1).gather(1, place_q)
            merged = torch.logaddexp(lse, part_lse)
            out.mul_((lse - merged).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - merged).exp_().unsqueeze(-1))
            lse = merged
        return out, lse

    def _pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, own, *others, out, lse = tensors
        itself = (own - lse).exp()
        down = itself * (pull * (v - out)).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), itself.unsqueeze(-1) * pull
        for order_q, order_k, place_q, place_k, mask in _each(others):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                self._blocks(pull, order_q),
                self._blocks(q, order_q),
                self._band(k, order_k),
                self._band(v, order_k),
                self._blocks(out, order_q),
                lse.gather(1, order_q).unflatten(1, (-1, self.size)),
                0.0,
                False,
                attn_mask=_additive(mask, q.dtype),
                scale=self.scale,
            )
            dq += _take(parts[0].flatten(1, 2), place_q)
            dk += _take(self._unband(parts[1]), place_k)
            dv += _take(self._unband(parts[2]), place_k)
        return dq, dk, dv, down

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v, own, *others = tensors
        itself, weights = self.weights(q, k, own, others)
        out = itself.unsqueeze(-1) * v
        for p, (_, order_k, place_q, _, _) in zip(weights, _each(others), strict=True):
            out = out + _take((p @ self._band(v, order_k)).flatten(1, 2), place_q)
        return out

    def plain_adjoint(self, u: Tensor, *tensors: Tensor) -> Tensor:
        q, k, own, *others = tensors
        itself, weights = self.weights(q, k, own, others)
        out = itself.unsqueeze(-1) * u
        for p, (order_q, _, _, place_k, _) in zip(weights, _each(others), strict=True):
            out = out + _take(self._unband(p.mT @ self._blocks(u, order_q)), place_k)
        return out

    def weights(self, q: Tensor, k: Tensor, own: Tensor, others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """P_ii (b, n), and the entries of P in the blocks of each round (b, t, size, 2 size)."""
        scores, top = [], own.detach()
        for order_q, order_k, place_q, _, mask in _each(others):
            s = self.scale * (self._blocks(q, order_q) @ self._band(k, order_k).mT)
            s = s.masked_fill(~mask, limits.HIDDEN)
            top = torch.maximum(top, s.detach().amax(-1).flatten(1).gather(1, place_q))
            scores.append(s)
        itself = (own - top).exp()
        total, parts = itself, []
        for s, (order_q, _, place_q, _, mask) in zip(scores, _each(others), strict=True):
            w = (s - top.gather(1, order_q).unflatten(1, (-1, self.size)).unsqueeze(-1)).exp().masked_fill(~mask, 0)
            total = total + w.sum(-1).flatten(1).gather(1, place_q)
            parts.append(w)
        shares = [
            w / total.gather(1, order_q).unflatten(1, (-1, self.size)).unsqueeze(-1)
            for w, (order_q, *_) in zip(parts, _each(others), strict=True)
        ]
        return itself / total, shares

    def _blocks(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of x (b, n, c) in `order`, (b, t, size, c)."""
        return _take(x, order).unflatten(1, (-1, self.size))

    def _band(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of x in `order`, each block behind the one before it: (b, t, 2 size, c)."""
        return _take(x, order).unfold(1, 2 * self.size, self.size).mT

    def _unband(self, x: Tensor) -> Tensor:
        """The transpose of that: (b, t, 2 size, c) -> (b, t * size, c), overlapping halves added."""
        before, own = x[:, 1:, : self.size], x[:, :, self.size :]
        return (own + F.pad(before, (0, 0, 0, 0, 0, 1))).flatten(1, 2)


def in_groups(work: Callable[..., tuple[Tensor, ...]], entries: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`work` on limits.HASH_ENTRIES scores at a time."""
    size = max(1, limits.HASH_ENTRIES // entries)
    if size >= tensors[0].shape[0]:
        return work(*tensors)
    parts = [work(*group) for group in zip(*(x.split(size) for x in tensors), strict=True)]
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def _each(others: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Orders, places and mask of one round after the other."""
    return list(zip(*(x.unbind(1) for x in others), strict=True))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    # finite: an empty row then has a log-sum-exp that vanishes beside any other
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), limits.HIDDEN, dtype=dtype))


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x (b, n, c) at `order` (b, l): (b, l, c)"""
    b, n, c = x.shape
    first = n * torch.arange(b, device=x.device).unsqueeze(-1)
    return x.reshape(b * n, c).index_select(0, (order + first).flatten()).reshape(b, -1, c)
