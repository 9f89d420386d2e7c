"""Attention to r slots or landmarks: sums over the positions of all ranks, then every rank has all slots.

    projected      r slots of keys and values: 2 r d scalars
    factored       the same; with means of segments, a state of the slots instead: d^2 + 2 d
    nystrom        r landmarks of queries and of keys gathered, r rows over all keys reduced: 3 r d

A dense projection or a sketch is a sum over positions: each rank applies its own columns, and the parts are reduced.
Slots of a mean, a filter or the identity have few positions in a row, most of them on one rank: only the sums of each
rank's positions are sent, and those of a slot that lies on two ranks are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.distributed.collectives import summed, tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.ring_softmax import everywhere
from headwise.distributed.running_states import mean_values
from headwise.distributed.slices import Slices, empty_rows, fetch
from headwise.operators._kernels.double_softmax import double_softmax, feature_rows
from headwise.operators._kernels.queries_keys import QueriesKeys, repeat_heads
from headwise.operators._kernels.scores import Scores
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
from headwise.shapes import filled


@local_rows.register
def _(operator: Projected, call: Call, v: Tensor) -> Tensor:
    """r (k + d) scalars: the slots of keys and values; with a key mask r more, whether a slot has a visible key."""
    e, f = _known(operator.short.e), _known(operator.short.f)
    k = repeat_heads(call.k, call.q, "Projected")
    keys, visible = _all_slots(e, k, call.key_mask, call.keys, call)
    values, visible_too = _all_slots(f, v, call.key_mask, call.keys, call)
    if visible is not None and visible_too is not None:
        visible = visible & visible_too
    if not call.q.shape[-2]:
        return _nothing(call, keys, values)
    mask = Mask(call.q.shape[-2], e.slots, key_mask=visible)
    return tied(Softmax(Scores(call.q, keys, operator.qk.scale, mask)).apply(values), keys, values)


@local_rows.register
def _(operator: Factored, call: Call, v: Tensor) -> Tensor:
    """As `projected`; with e = f of segments, a state of the slots, k (d + 2) scalars and what segments share."""
    e, f = _known(operator.short.e), _known(operator.short.f)
    k, scale = repeat_heads(call.k, call.q, "Factored"), operator.qk.scale
    if f is e and not isinstance(e, (Dense, CountSketch)):
        keys, slots = _own_slots(e, k, call.key_mask, call.keys, call)
        values, _ = _own_slots(e, v, call.key_mask, call.keys, call)
        return feature_rows(call.q, mean_values(keys, values, scale, slots, call), scale).to(v.dtype)
    keys, visible = _all_slots(e, k, call.key_mask, call.keys, call)
    values, visible_too = _all_slots(f, v, call.key_mask, call.keys, call)
    if visible is not None and visible_too is not None:
        visible = visible & visible_too
    if not call.q.shape[-2]:
        return _nothing(call, keys, values)
    qk = QueriesKeys(call.q, k, scale, Mask(call.q.shape[-2], k.shape[-2]))
    return double_softmax(qk, keys, values, visible).to(v.dtype)


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
    parts = _Parts.of(projection, held, call.ranks.size)
    return _added_up(projection, x, mask, held, call, parts, lambda _: torch.arange(len(parts.slots)))


def _own_slots(
    projection: Projection, x: Tensor, mask: Tensor | None, held: Slices, call: Call
) -> tuple[Tensor, Tensor | None]:
    """The slots whose first position this rank holds, from its parts and those of ranks that hold their other ones."""
    parts = _Parts.of(projection, held, call.ranks.size)
    owners, _ = held.locate(parts.slots * parts.stride)
    slots, visible = _added_up(
        projection, x, mask, held, call, parts, lambda rank: (owners == rank).nonzero().flatten()
    )
    own = parts.slots[owners == call.rank].unique().to(x.device)
    return slots.index_select(-2, own), None if visible is None else visible.index_select(-1, own)


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
class _Parts:
    """The slots that have positions on each rank, segment by segment: a slot that lies on two ranks has two parts."""

    stride: int  # positions from one slot to the next
    weight: Tensor | None  # of the positions of a slot; None for ones
    width: int
    ranges: list[list[tuple[int, int]]]  # (first, last) slot of each segment of each rank

    @classmethod
    def of(cls, projection: Projection, held: Slices, ranks: int) -> _Parts:
        if isinstance(projection, Convolution):
            stride, weight = projection.stride, projection.weight
            width = weight.shape[0]
        else:
            stride = width = projection.size if isinstance(projection, Pooling) else 1
            weight = None
        ranges = [
            [
                (max(0, -(-(start - width + 1) // stride)), -(-stop // stride)) if stop > start else (0, 0)
                for start, stop in held.segments(rank)
            ]
            for rank in range(ranks)
        ]
        return cls(stride, weight, width, ranges)

    @property
    def slots(self) -> Tensor:
        """The slot of every part, rank after rank."""
        return torch.cat([torch.arange(*pair) for ranges in self.ranges for pair in ranges])

    @property
    def held(self) -> Slices:
        return Slices(tuple(sum(last - first for first, last in ranges) for ranges in self.ranges))

    def sums(self, x: Tensor, weight: Tensor | None, held: Slices, rank: int) -> Tensor:
        """The parts of this rank: sums of its rows of x under `weight`."""
        found = []
        for rows, (start, _), (first, last) in zip(
            held.split(x, rank), held.segments(rank), self.ranges[rank], strict=True
        ):
            if last <= first:
                found.append(rows[..., :0, :])
                continue
            # rows before the first slot belong to none
            rows = rows[..., max(0, first * self.stride - start) :, :]
            before, slots = max(0, start - first * self.stride), last - first
            if weight is None:  # side by side
                rows = filled(rows, (0, 0, before, slots * self.width - before - rows.shape[-2]))
                found.append(rows.unflatten(-2, (slots, self.width)).sum(-2))
            else:
                rows = filled(rows, (0, 0, before, 0))
                found.append(Convolution(rows.shape[-2], self.stride, weight).apply(rows)[..., :slots, :])
        return torch.cat(found, dim=-2)


def _added_up(
    projection: Projection,
    x: Tensor,
    mask: Tensor | None,
    held: Slices,
    call: Call,
    parts: _Parts,
    wanted: Callable[[int], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """(*batch, r, c): the sums of the wanted parts at their slots, zeros elsewhere; means where they are means."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(compute) if mask is None else x.to(compute).masked_fill(~mask.unsqueeze(-1), 0)
    r, slots = projection.slots, parts.slots[wanted(call.rank)].to(x.device)

    def collected(y: Tensor) -> Tensor:
        (got,) = fetch([y], parts.held, wanted, call.ranks)
        return got.new_zeros(*got.shape[:-2], r, got.shape[-1]).index_add(-2, slots, got)

    out = collected(parts.sums(rows, parts.weight, held, call.rank))
    if mask is None:
        if isinstance(projection, Pooling):
            out = out / projection._sizes(out)
        return out.to(x.dtype), None
    weight = None if parts.weight is None else (parts.weight.detach() != 0).to(compute)
    counts = collected(parts.sums(mask.to(compute).unsqueeze(-1), weight, held, call.rank))
    if isinstance(projection, Pooling):
        out = out / counts.clamp(min=1)
    return out.to(x.dtype), counts.squeeze(-1) > 0
