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

from headwise.distributed.collectives import Ranks, exchange, largest, summed
from headwise.distributed.slices import Slices
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators._kernels.scores import Scores, attend_with_lse
from headwise.operators.masks import Mask


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

    def pairs(self, source: int) -> list[tuple[slice, slice, int | None]]:
        """Rows of queries and keys that meet, and, where only some pairs may, by how much keys may be ahead."""
        found = []
        ahead = self.keys.n - self.queries.n  # the last query is at the last key
        first_row = 0
        for start, stop in self.queries.segments(self.ranks.rank):
            first_key = 0
            for left, right in self.keys.segments(source):
                rows, keys = slice(first_row, first_row + stop - start), slice(first_key, first_key + right - left)
                first_key += right - left
                if stop <= start or right <= left:
                    continue
                reach = start + ahead - left  # the first query attends to keys up to this one
                if not self.causal or reach >= right - left - 1:
                    found.append((rows, keys, None))
                elif reach + (stop - start) > 0:
                    found.append((rows, keys, reach))
            first_row += stop - start
        return found


def ring_softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, ring: Ring) -> Tensor:
    """softmax(scale q k^T) v for the rows of this rank: q (*batch, m, k), k and v (*batch, n, ·) its slices."""
    mask = () if key_mask is None else (key_mask,)
    return _RingSoftmax.apply(ring, q, k, v, *mask)  # type: ignore[return-value]


def everywhere(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None, ranks: Ranks) -> Tensor:
    """softmax(scale q k^T) v over the keys of all ranks, for r queries that every rank has: r (d + 2) scalars reduced.

    Two reductions: the largest score of every query, then its sum of exponentials beside its sum of values.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    hidden = None if key_mask is None else ~key_mask.unsqueeze(-2)
    scores = scale * (q.to(compute) @ k.to(compute).mT)
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    batch = torch.broadcast_shapes(scores.shape[:-2], v.shape[:-2])
    shape = (*scores.shape[:-1], 1)
    top = scores.detach().amax(-1, keepdim=True) if k.shape[-2] else scores.new_full(shape, -math.inf)
    top = largest(top, ranks)
    weights = (scores - top.masked_fill(top == -math.inf, 0)).exp()
    sums = weights.sum(-1, keepdim=True).expand(*batch, *shape[-2:])
    values = weights @ (v if hidden is None else v.masked_fill(hidden.mT, 0)).to(compute)
    total = summed(torch.cat([sums, values.expand(*batch, *values.shape[-2:])], dim=-1), ranks)
    return (total[..., 1:] / total[..., :1].masked_fill(total[..., :1] == 0, 1)).to(v.dtype)


class _RingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(_spread(k, q).shape[:-2], q.shape[:-2], v.shape[:-2])
        compute = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*batch, q.shape[-2], v.shape[-1], dtype=compute)
        lse = out.new_full(out.shape[:-1], -math.inf)
        packed = _packed(k, v, *mask)
        for source, block in ring.blocks(packed):
            keys, values, visible = _unpacked(block, k, v, *mask)
            for rows, columns, ahead in ring.pairs(source):
                part, part_lse = attend_with_lse(*_part(ring, q, keys, values, visible, rows, columns, ahead))
                _merge(out[..., rows, :], lse[..., rows], part, part_lse)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, *mask)
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        ring, (q, k, v, out, lse, *mask) = ctx.ring, ctx.saved_tensors
        g = gradients[0].to(out.dtype)
        delta = (g * out).sum(-1, keepdim=True)
        shift = lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)
        dq, packed = q.new_zeros(*out.shape[:-1], q.shape[-1], dtype=out.dtype), _packed(k, v, *mask)
        dk, dv = torch.zeros_like(k, dtype=out.dtype), torch.zeros_like(v, dtype=out.dtype)
        for source, block in ring.blocks(packed):
            keys, values, visible = _unpacked(block, k, v, *mask)
            dkeys, dvalues = (torch.zeros_like(x, dtype=out.dtype) for x in (keys, values))
            for rows, columns, ahead in ring.pairs(source):
                scores, x = _part(ring, q, keys, values, visible, rows, columns, ahead)
                first = rows.start
                for start, stop in scores.chunks():
                    part = scores.rows(start, stop)
                    some = slice(first + start, first + stop)
                    seen = slice(columns.start, columns.start + part.n)
                    p = (part.to(out.dtype).dense() - shift[..., some, :]).exp()
                    pull, value = g[..., some, :], x[..., : part.n, :].to(out.dtype)
                    ds = p * (pull @ value.mT - delta[..., some, :]) * ring.scale
                    dq[..., some, :] += ds @ part.k.to(out.dtype)
                    dkeys[..., seen, :] += _fold(ds.mT @ part.q.to(out.dtype), dkeys[..., seen, :])
                    dvalues[..., seen, :] += _fold(p.mT @ pull, dvalues[..., seen, :])
            if source != ring.ranks.rank:
                back = ring.returned(_packed(dkeys, dvalues), source)
                dkeys, dvalues, _ = _unpacked(back, dk, dv)
            dk, dv = dk + dkeys, dv + dvalues
        return None, _fold(dq, q).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *(None for _ in mask)


def _part(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    rows: slice,
    columns: slice,
    ahead: int | None,
) -> tuple[Scores, Tensor]:
    """The scores of some queries against some keys, and the values of these."""
    m, n = rows.stop - rows.start, columns.stop - columns.start
    key_mask = None if visible is None else visible[..., columns]
    mask = Mask(m, n, ahead is not None, key_mask, _ahead=ahead)
    keys = mask.hide(_spread(k[..., columns, :], q))
    return Scores(q[..., rows, :], keys, ring.scale, mask), mask.hide(v[..., columns, :])


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part to the softmax so far, in place; -inf are rows without a key so far."""
    merged = torch.logaddexp(lse, part_lse)
    shift = merged.masked_fill(merged == -math.inf, 0)
    out.mul_((lse - shift).exp().unsqueeze(-1)).add_(part.to(out.dtype) * (part_lse - shift).exp().unsqueeze(-1))
    lse.copy_(merged)


def _spread(k: Tensor, q: Tensor) -> Tensor:
    """Grouped queries: heads of k repeated, after it has been received."""
    return repeat_heads(k, q, "Softmax")


def _fold(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_spread` and of broadcasting: sums of x over the axes along which `like` was repeated."""
    if like.dim() > 2 and like.shape[-3] not in (1, x.shape[-3]):
        x = x.unflatten(-3, (like.shape[-3], -1)).sum(-3)
    return x.sum_to_size(like.shape)


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
