"""The rounds of hashed attention by torch's fused attention on sorted copies.

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
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.operators._kernels import limits
from headwise.shapes import filled


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
                attn_mask=additive(mask, q.dtype),
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
                attn_mask=additive(mask, q.dtype),
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


def round_tensors(
    order_q: Tensor,
    order_k: Tensor,
    key_mask: Tensor | None,
    size: int,
    causal: bool,
    chunks: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Orders, places and masks as above, of orders (b, rounds, n) and key_mask (b, n).

    Orders and masks of the query chunks first .. last alone, if `chunks` = (first, last).
    """
    n = order_q.shape[-1]
    positions = torch.arange(n, device=order_q.device).expand(order_q.shape)
    place_q, place_k = (torch.zeros_like(x).scatter(-1, x, positions) for x in (order_q, order_k))
    order_q, order_k = (filled(x, (0, -n % size), value=n) for x in (order_q, order_k))
    order_k = F.pad(order_k, (size, 0), value=n)
    if chunks is not None:
        first, last = chunks
        order_q, order_k = order_q[..., first * size : last * size], order_k[..., first * size : (last + 1) * size]
    tensors = order_q, order_k, place_q // size, place_k // size
    shown = () if key_mask is None else (F.pad(key_mask, (0, 1)),)
    # a few members of the batch at a time
    (masks,) = in_groups(partial(_masks, n, size, causal), n * 2 * size, (*tensors, *shown))
    return order_q.clamp(max=n - 1), order_k.clamp(max=n - 1), place_q, place_k, masks


def _masks(n: int, chunk: int, causal: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """A pair counts if it is real, not later if causal, not a position with itself, and in no earlier round."""
    order_q, order_k, chunk_q, chunk_k, *key_mask = tensors
    rounds = order_q.shape[1]
    # the smaller the numbers, the faster they are compared
    small = torch.int8 if n // chunk <= 100 else torch.int16 if n // chunk < 2**14 else torch.int32
    chunk_q, chunk_k = (F.pad(x.to(small), (0, 1), value=-9) for x in (chunk_q, chunk_k))
    order_k = order_k.unfold(-1, 2 * chunk, chunk)  # (b, rounds, t, 2 chunk)
    order_q = order_q.unflatten(-1, (-1, chunk))  # (b, rounds, t, chunk)
    found = []
    for i in range(rounds):
        there, here = order_q[:, i], order_k[:, i]
        real = key_mask[0].gather(-1, here.flatten(1)).reshape(here.shape) if key_mask else here < n
        rows, columns = there.int().unsqueeze(-1), here.int().unsqueeze(-2)
        mask = columns < rows if causal else columns != rows
        mask = mask & real.unsqueeze(-2)
        mask = mask & (rows < n) if n % chunk else mask
        for earlier in range(i):  # met then: the key's chunk was the query's, or the one before
            a = chunk_q[:, earlier].gather(-1, there.flatten(1)).reshape(there.shape).unsqueeze(-1)
            b = chunk_k[:, earlier].gather(-1, here.flatten(1)).reshape(here.shape).unsqueeze(-2)
            mask = mask & ((a - b) >> 1 != 0)
        found.append(mask)
    return (torch.stack(found, dim=1),)


def _each(others: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Orders, places and mask of one round after the other."""
    return list(zip(*(x.unbind(1) for x in others), strict=True))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where a query may attend, limits.HIDDEN elsewhere."""
    # finite: an empty row then has a log-sum-exp that vanishes beside any other
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), limits.HIDDEN, dtype=dtype))


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x (b, n, c) at `order` (b, l): (b, l, c)"""
    b, n, c = x.shape
    first = n * torch.arange(b, device=x.device).unsqueeze(-1)
    return x.reshape(b * n, c).index_select(0, (order + first).flatten()).reshape(b, -1, c)
