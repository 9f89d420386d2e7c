"""Attention to r slots or landmarks: sums over the positions of all ranks, then every rank has all slots.

    projected      r slots of keys and values: 2 r d scalars
    factored       the same; with means of segments, a state of the slots instead: d^2 + 2 d
    nystrom        r landmarks of queries and of keys gathered, r rows over all keys reduced: 3 r d

A dense projection or a sketch is a sum over positions: each rank applies its own columns, and the parts are reduced.
Slots of a mean, a filter or the identity have few positions in a row: the rank of the first one fetches the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.distributed.collectives import summed, tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.ring_softmax import everywhere
from headwise.distributed.running_states import mean_values
from headwise.distributed.slices import Slices, empty_rows, fetch, fetch_mask
from headwise.operators._kernels.double_softmax import double_softmax
from headwise.operators._kernels.queries_keys import QueriesKeys, repeat_heads
from headwise.operators._kernels.scores import Scores
from headwise.operators._kernels.slots import Shortened
from headwise.operators.linear.factored import Factored
from headwise.operators.linear.nystrom import Nystrom
from headwise.operators.linear.projected import Projected
from headwise.operators.linear.projections import (
    Convolution,
    CountSketch,
    Dense,
    Identity,
    Pooling,
    Projection,
    pooling,
)
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax


@local_rows.register
def _(operator: Projected, call: Call, v: Tensor) -> Tensor:
    """r (k + d) scalars: the slots of keys and values; with a key mask r more, whether a slot has a visible key."""
    e, f = _known(operator.short.e), _known(operator.short.f)
    k = repeat_heads(call.k, call.q, "Projected")
    keys, filled = _all_slots(e, k, call.key_mask, call.keys, call)
    values, filled_too = _all_slots(f, v, call.key_mask, call.keys, call)
    if filled is not None and filled_too is not None:
        filled = filled & filled_too
    if not call.q.shape[-2]:
        return _nothing(call, keys, values)
    mask = Mask(call.q.shape[-2], e.slots, key_mask=filled)
    return tied(Softmax(Scores(call.q, keys, operator.qk.scale, mask)).apply(values), keys, values)


@local_rows.register
def _(operator: Factored, call: Call, v: Tensor) -> Tensor:
    """As `projected`; with e = f of segments, a state of the slots, k (d + 2) scalars and what segments share."""
    e, f = _known(operator.short.e), _known(operator.short.f)
    k, scale = repeat_heads(call.k, call.q, "Factored"), operator.qk.scale
    if f is e and not isinstance(e, (Dense, CountSketch)):
        keys, values, filled = _own_slots(e, k, v, call.key_mask, call.keys, call)
        keys, values = (x if filled is None else torch.where(filled.unsqueeze(-1), x, 0) for x in (keys, values))
        means = mean_values(keys, values, scale, filled, call)
        return (torch.softmax(call.q.to(means.dtype) * scale, dim=-1) @ means).to(v.dtype)
    keys, filled = _all_slots(e, k, call.key_mask, call.keys, call)
    values, filled_too = _all_slots(f, v, call.key_mask, call.keys, call)
    if filled is not None and filled_too is not None:
        filled = filled & filled_too
    if not call.q.shape[-2]:
        return _nothing(call, keys, values)
    qk = QueriesKeys(call.q, k, scale, Mask(call.q.shape[-2], k.shape[-2]))
    return double_softmax(qk, keys, values, filled).to(v.dtype)


@local_rows.register
def _(operator: Nystrom, call: Call, v: Tensor) -> Tensor:
    """2 r k scalars gathered, r (d + 2) reduced, for r landmarks."""
    compute = torch.promote_types(v.dtype, torch.float32)
    k = call.hide(repeat_heads(call.k, call.q, "Nystrom"))
    # as many as the operator has: ceil(n / r) positions in a segment, again
    segments = [
        pooling(held.n, -(-held.n // landmarks.shape[-2]))
        for held, landmarks in ((call.queries, operator.landmark_q), (call.keys, operator.landmark_k))
    ]
    mask_q = call.key_mask if call.queries.n == call.keys.n else None
    if mask_q is not None and not call.square:
        raise NoExchange("Nystrom: queries are masked like keys, but are sliced differently")
    near_q, filled_q = _all_slots(segments[0], call.q, mask_q, call.queries, call)
    near_k, filled_k = _all_slots(segments[1], k, call.key_mask, call.keys, call)
    scale = operator.qk.scale
    right = everywhere(near_q.to(compute), k.to(compute), v.to(compute), scale, call.key_mask, call.ranks)
    if filled_q is not None:
        right = torch.where(filled_q.unsqueeze(-1), right, 0)
    if not call.q.shape[-2]:
        return _nothing(call, near_q, near_k, right)
    qk = QueriesKeys(call.q, near_k, scale, Mask(call.q.shape[-2], near_k.shape[-2]))
    local = Nystrom(qk, near_q, near_k, filled_q, filled_k, operator.iterations)
    left, _ = local._sides(compute)
    return left.apply(local._between(compute) @ right).to(v.dtype)


def _known(projection: Projection) -> Projection:
    if not isinstance(projection, (Dense, CountSketch, Pooling, Identity, Convolution)):
        raise NoExchange(f"{type(projection).__name__}: mixes all positions")
    return projection


def _nothing(call: Call, *others: Tensor) -> Tensor:
    """No rows, of the width of the last of `others`."""
    batch = torch.broadcast_shapes(call.q.shape[:-2], *(x.shape[:-2] for x in others))
    return empty_rows(call.q, batch, others[-1].shape[-1], *others)


def _all_slots(
    projection: Projection, x: Tensor, mask: Tensor | None, held: Slices, call: Call
) -> tuple[Tensor, Tensor | None]:
    """E x (*batch, r, c) of the whole sequence on every rank, and which slots have a visible position."""
    if isinstance(projection, (Dense, CountSketch)):
        return _reduced(projection, x, mask, held, call)
    own, _, filled = _own_slots(projection, x, x[..., :0], mask, held, call)
    spans = [_Spans.of(projection, held, rank) for rank in range(call.ranks.size)]
    slots = Slices(tuple(span.count for span in spans))
    order = torch.cat([span.slots for span in spans]).argsort()
    # as if the slots of rank 0, rank 1, ... were a sequence
    (keys,) = fetch([own], slots, lambda _: order, call.ranks)
    return keys, fetch_mask(filled, slots, lambda _: order, call.ranks)


def _reduced(
    projection: Dense | CountSketch, x: Tensor, mask: Tensor | None, held: Slices, call: Call
) -> tuple[Tensor, Tensor | None]:
    """The sum over the ranks of each one's columns of E times its rows of x."""
    if isinstance(projection, Dense):
        part: Projection = Dense(held.cut(projection.matrix, call.rank, dim=-1))
    else:
        slot, sign = (held.cut(y, call.rank, dim=-1) for y in (projection.slot, projection.sign))
        part = CountSketch(slot, sign, projection.r)
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(compute) if mask is None else x.to(compute).masked_fill(~mask.unsqueeze(-1), 0)
    out = summed(part.apply(rows), call.ranks).to(x.dtype)
    if mask is None:
        return out, None
    return out, summed(part.support(mask).to(compute), call.ranks) > 0


@final
@dataclass(frozen=True, eq=False)
class _Spans:
    """The slots whose first position a rank holds, segment by segment, and the positions that they are made of."""

    firsts: list[tuple[int, int]]  # (first, last) slot of each segment
    ranges: list[tuple[int, int]]  # (start, stop) positions
    count: int

    @classmethod
    def of(cls, projection: Projection, held: Slices, rank: int) -> _Spans:
        stride, width = _geometry(projection)
        firsts, ranges = [], []
        for start, stop in held.segments(rank):
            first, last = -(-start // stride), -(-stop // stride)
            firsts.append((first, max(first, last)))
            end = min(held.n, (last - 1) * stride + width)
            ranges.append((first * stride, max(first * stride, end)) if last > first else (0, 0))
        return cls(firsts, ranges, sum(last - first for first, last in firsts))

    @property
    def slots(self) -> Tensor:
        return torch.cat([torch.arange(first, last) for first, last in self.firsts])

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges])


def _own_slots(
    projection: Projection, k: Tensor, v: Tensor, mask: Tensor | None, held: Slices, call: Call
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slots of k and v that begin at this rank's positions, which fetches what it does not hold of them."""

    def wanted(rank: int) -> Tensor:
        return _Spans.of(projection, held, rank).positions

    spans = _Spans.of(projection, held, call.rank)
    keys, values = fetch([k, v], held, wanted, call.ranks)
    visible = fetch_mask(mask, held, wanted, call.ranks)
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []
    offset = 0
    for (first, last), (start, stop) in zip(spans.firsts, spans.ranges, strict=True):
        rows = slice(offset, offset + stop - start)
        offset += stop - start
        some = None if visible is None else visible[..., rows]
        x, y = keys[..., rows, :], values[..., rows, :]
        if last > first:
            part = _part(projection, stop - start)
            short = Shortened(x, part, part, some)
            count = last - first
            filled = short.filled
            x, y = short.keys()[..., :count, :], short.values(y)[..., :count, :]
            some = None if filled is None else filled[..., :count]
        found.append((x, y, some))
    x, y, some = zip(*found, strict=True)
    filled = None if mask is None else torch.cat([z for z in some if z is not None], dim=-1)
    return tied(torch.cat(x, dim=-2), keys), tied(torch.cat(y, dim=-2), values), filled


def _geometry(projection: Projection) -> tuple[int, int]:
    """Positions from one slot to the next, and in one slot."""
    if isinstance(projection, Pooling):
        return projection.size, projection.size
    if isinstance(projection, Convolution):
        return projection.stride, projection.weight.shape[0]
    return 1, 1


def _part(projection: Projection, n: int) -> Projection:
    """The same projection of n positions that begin with a slot."""
    if isinstance(projection, Pooling):
        return Pooling(n, min(projection.size, n))
    if isinstance(projection, Convolution):
        return Convolution(n, projection.stride, projection.weight)
    return Identity(n)
