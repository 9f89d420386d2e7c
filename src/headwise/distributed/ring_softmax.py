"""Softmax attention over sharded keys: blocks of keys and values pass by, results are merged by their log-sum-exps.

    out = sum_s exp(lse_s - lse) out_s,    lse = log sum_s exp(lse_s),    s over the ranks that hold keys

In step t a rank receives the keys and values of the rank t places ahead, while it uses those of the step before: it
holds its own block and two others at a time (Liu et al. 2023, Ring Attention; the sums are those of Milakov &
Gimelshein 2018).  2 d N (P-1)/P scalars received for each head and rank.  Backward, the same blocks pass again and
their gradients go back: twice as many.
Under a causal mask, pairs of segments that hide one another are skipped; zig-zag slices give all ranks the same work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.distributed.collectives import Ranks, exchange, largest
from headwise.distributed.partial_softmax import Part, attend_part, part_gradients
from headwise.distributed.slices import Slices
from headwise.operators._kernels.queries_keys import repeat_heads


@final
@dataclass(frozen=True, eq=False)
class Ring:
    """What a call of `ring_softmax` knows besides its tensors."""

    ranks: Ranks
    queries: Slices
    keys: Slices
    scale: float
    causal: bool

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its block) for all ranks, this one first; blocks (rows, ...) travel while the one before is used."""
        block, size = own, self.ranks.size
        for step in range(size):
            work, following = None, own
            if step + 1 < size:
                send, receive = [0] * size, [0] * size
                source = (self.ranks.rank + step + 1) % size
                send[(self.ranks.rank - step - 1) % size] = len(own)
                receive[source] = self.keys.lengths[source]
                following = own.new_empty(receive[source], *own.shape[1:])
                work = self.ranks.call(dist.all_to_all_single, following, own, receive, send, async_op=True)
            yield (self.ranks.rank + step) % size, block
            if work is not None:
                with self.ranks.saying("all_to_all_single"):
                    work.wait()
            block = following

    def returned(self, x: Tensor, source: int) -> Tensor:
        """x, made of the block of rank `source`, sent there; what was made of this rank's block is received."""
        size = self.ranks.size
        send, receive = [0] * size, [0] * size
        send[source] = len(x)
        receive[(2 * self.ranks.rank - source) % size] = self.keys.lengths[self.ranks.rank]
        return exchange(x, send, receive, self.ranks)

    def pairs(self, source: int) -> list[tuple[slice, slice, bool]]:
        """Rows of queries and keys that meet, and whether causality hides some of these pairs."""
        found = []
        ahead = self.keys.n - self.queries.n  # of all, too, the last query is at the last key
        first_row = 0
        for start, stop in self.queries.segments(self.ranks.rank):
            first_key = 0
            for left, right in self.keys.segments(source):
                m, n = stop - start, right - left
                reach = start + ahead - left if self.causal else n  # the first query attends to keys up to this one
                none, some = (min(m, max(0, x)) for x in (-reach, n - 1 - reach))  # queries that see no, not all keys
                if n and none < some:
                    last = first_key + reach + some
                    found.append((slice(first_row + none, first_row + some), slice(first_key, last), True))
                if n and some < m:
                    found.append((slice(first_row + some, first_row + m), slice(first_key, first_key + n), False))
                first_key += n
            first_row += stop - start
        return found


def ring_softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, ring: Ring) -> Tensor:
    """softmax(scale q k^T) v for the rows of this rank: q (*batch, m, k), k and v (*batch, n, ·) its slices."""
    mask = () if key_mask is None else (key_mask,)
    return _RingSoftmax.apply(ring, q, k, v, *mask)  # type: ignore[return-value]


def everywhere(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None, ranks: Ranks) -> Tensor:
    """softmax(scale q k^T) v over the keys of all ranks, for r queries that every rank has: r (d + 2) scalars reduced.

    Two reductions: the largest log-sum-exp of every query, then its sums of exponentials and of values.
    """
    mask = () if key_mask is None else (key_mask,)
    return _Everywhere.apply(ranks, scale, q, k, v, *mask)  # type: ignore[return-value]


class _Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, scale: float, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        out, lse = attend_part(Part(q, k, v, *mask), scale, causal=False)
        top = largest(lse, ranks)
        shift = top.masked_fill(top == -math.inf, 0)
        weights = (lse - shift).exp().unsqueeze(-1)
        sums = torch.cat([weights, weights * out], dim=-1)
        ranks.call(dist.all_reduce, sums)
        total = sums[..., :1]
        out = sums[..., 1:] / total.masked_fill(total == 0, 1)
        ctx.ranks, ctx.scale = ranks, scale
        ctx.save_for_backward(q, k, v, out, total.log().squeeze(-1) + shift, *mask)
        return out.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, *mask = ctx.saved_tensors
        pull = gradients[0].to(out.dtype, copy=True, memory_format=torch.contiguous_format)
        ctx.ranks.call(dist.all_reduce, pull)
        part = Part(q, k, v, *mask)
        found = part_gradients(pull, part, ctx.scale, False, out, lse)
        return None, None, *(x.to(like.dtype) for x, like in zip(found, part[:3], strict=True)), *(None for _ in mask)


class _RingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(repeat_heads(k, q, "Softmax").shape[:-2], q.shape[:-2], v.shape[:-2])
        compute = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*batch, q.shape[-2], v.shape[-1], dtype=compute)
        lse = out.new_full(out.shape[:-1], -math.inf)
        for source, block in ring.blocks(_packed(k, v, *mask)):
            for rows, columns, causal in ring.pairs(source):
                part = _part(q, _unpacked(block, k, v, *mask), rows, columns)
                _merge(out[..., rows, :], lse[..., rows], *attend_part(part, ring.scale, causal))
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, *mask)
        return out.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring, (q, k, v, out, lse, *mask) = ctx.ring, ctx.saved_tensors
        g = gradients[0].to(out.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        for source, block in ring.blocks(_packed(k, v, *mask)):
            held = _unpacked(block, k, v, *mask)
            dkeys, dvalues = (torch.zeros_like(x, dtype=out.dtype) for x in held[:2])
            for rows, columns, causal in ring.pairs(source):
                part = _part(q, held, rows, columns)
                found = part_gradients(g[..., rows, :], part, ring.scale, causal, out[..., rows, :], lse[..., rows])
                for total, x in zip(
                    (dq[..., rows, :], dkeys[..., columns, :], dvalues[..., columns, :]), found, strict=True
                ):
                    total += x
            if source != ring.ranks.rank:
                back = ring.returned(_packed(dkeys, dvalues), source)
                dkeys, dvalues, _ = _unpacked(back, dk, dv)
            dk, dv = dk + dkeys, dv + dvalues
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *(None for _ in mask)


def _part(q: Tensor, held: tuple[Tensor, Tensor, Tensor | None], rows: slice, columns: slice) -> Part:
    """Some queries, and some of the keys, values and their mask."""
    k, v, mask = held
    return Part(q[..., rows, :], k[..., columns, :], v[..., columns, :], None if mask is None else mask[..., columns])


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part to the softmax so far, in place; -inf are rows without a key so far."""
    merged = torch.logaddexp(lse, part_lse)
    shift = merged.masked_fill(merged == -math.inf, 0)
    out.mul_((lse - shift).exp().unsqueeze(-1)).addcmul_(part, (part_lse - shift).exp().unsqueeze(-1))
    lse.copy_(merged)


def _packed(k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
    """Keys, values and mask as rows of one tensor, (n, ·)."""
    columns = (k, v, *(x.unsqueeze(-1).to(k.dtype) for x in mask))
    return torch.cat([x.movedim(-2, 0).reshape(x.shape[-2], _row(x)) for x in columns], dim=1)


def _unpacked(rows: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    shapes = [(*x.shape[:-2], x.shape[-1]) for x in (k, v, *(x.unsqueeze(-1) for x in mask))]
    parts = rows.split([math.prod(shape) for shape in shapes], dim=1)
    keys, values, *visible = (
        x.reshape(len(rows), *shape).movedim(0, -2) for x, shape in zip(parts, shapes, strict=True)
    )
    return keys, values, (visible[0].squeeze(-1) != 0) if visible else None


def _row(x: Tensor) -> int:
    """Numbers of one position over the whole batch."""
    return x.shape[:-2].numel() * x.shape[-1]
