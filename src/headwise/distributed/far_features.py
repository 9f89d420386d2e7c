"""`near_far`: near blocks by a halo, far keys by their states.

A rank fetches the blocks beside its own, 2 block 2 d scalars (causal: half of it), and the leading keys.  Of far keys
it needs, for each of r features, the log-sum-exp of exp(s b . k) and the mean of the values under it.  The keys of all
ranks are cut where some rank's halo ends, every piece has one state, and the states are gathered: r (d + 1) scalars for
each piece of another rank, of which aligned slices have two if causal and three otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.distributed.collectives import gathered, tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.ring_softmax import everywhere
from headwise.distributed.slices import empty_rows, fetch, fetch_mask
from headwise.operators._kernels import limits
from headwise.operators._kernels.queries_keys import QueriesKeys, repeat_heads
from headwise.operators._kernels.scores import Scores
from headwise.operators.linear.near_far import NearFar
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax

Range = tuple[int, int]
"""(start, stop) of positions."""

Parts = list[tuple[int, Tensor]]
"""(first position, rows from there on) in the order of the sequence."""


@local_rows.register
def _(operator: NearFar, call: Call, v: Tensor) -> Tensor:
    """A halo of blocks, 4 block d scalars, and r (d + 1) for every piece of the other ranks; causal, half a halo."""
    if not call.square:
        raise NoExchange("NearFar: queries and keys are sliced differently")
    leading, causal, compute = operator.leading, operator.causal, torch.promote_types(v.dtype, torch.float32)
    k = call.hide(repeat_heads(call.k, call.q, "NearFar")).to(compute)
    x, q = call.hide(v).to(compute), call.q.to(compute)
    held = [call.keys.segments(rank) for rank in range(call.ranks.size)]
    near = [[_near_range(operator, call.keys.n, segment) for segment in segments] for segments in held]
    elsewhere = [_elsewhere(*pair, leading) for pair in zip(held, near, strict=True)]

    def wanted(rank: int) -> Tensor:
        return torch.cat([torch.arange(0), *(torch.arange(*found) for found in elsewhere[rank])])

    def parts(own: Tensor, fetched: Tensor) -> Parts:
        rows = *call.keys.split(own, call.rank), *fetched.split([j - i for i, j in elsewhere[call.rank]], dim=-2)
        starts = (start for start, _ in (*held[call.rank], *elsewhere[call.rank]))
        return sorted(zip(starts, rows, strict=True), key=lambda part: part[0])

    fetched = fetch([k, x], call.keys, wanted, call.ranks)
    keys, values = parts(k, fetched[0]), parts(x, fetched[1])
    mask, visible = fetch_mask(call.key_mask, call.keys, wanted, call.ranks), None
    if mask is not None and call.key_mask is not None:
        visible = parts(call.key_mask.unsqueeze(-1), mask.unsqueeze(-1))

    def some(q: Tensor, *ranges: Range) -> tuple[QueriesKeys, Tensor]:
        """Queries and the keys of some ranges, and the values of these."""
        chosen, key_mask = _rows(keys, ranges), None if visible is None else _rows(visible, ranges).squeeze(-1)
        mask = Mask(q.shape[-2], chosen.shape[-2], causal, key_mask)
        return QueriesKeys(q, chosen, operator.qk.scale, mask), _rows(values, ranges)

    a, b, c = (y.to(compute) for y in (operator.a, operator.b, operator.c))
    pieces, states = _states(operator, call, k, x, held, near)
    out = []
    for rows, (start, stop), found in zip(call.keys.split(q, call.rank), held[call.rank], near[call.rank], strict=True):
        if found[0] < found[1]:
            first = start if causal else max(start, leading)
            if first > start:
                rows = rows.split([first - start, stop - first], dim=-2)[1]
            if found[1] > stop:  # more queries, so that the last one is at the last key
                rows = torch.cat([rows, rows.new_zeros(*rows.shape[:-2], found[1] - stop, rows.shape[-1])], dim=-2)
            ranges = [(0, found[1])] if found[0] == leading else [(0, leading), found]
            qk, y = some(rows, *ranges)
            far = [i for i, piece in pieces if _is_far(piece, found, causal)]
            inside = NearFar(qk, a, b, c, operator.block, leading).last_rows(y, _merged(states[far]) if far else None)
            if found[1] > stop:
                inside = inside.split([stop - first, found[1] - stop], dim=-2)[0]
            out.append((first, inside))
        elif causal and start < stop:
            qk, y = some(rows, (0, stop))
            out.append((start, Softmax(Scores(qk.q, qk.k, qk.scale, qk.mask)).apply(y)))
    batch, ties = torch.broadcast_shapes(operator.shape[:-2], v.shape[:-2]), [*fetched, states]
    if leading and not causal:
        (ahead,) = fetch([call.q], call.queries, lambda _: torch.arange(leading), call.ranks)
        ahead = everywhere(ahead, k, v, operator.qk.scale, call.key_mask, call.ranks).to(compute)
        ties.append(ahead)
        out += [(i, ahead[..., i : min(j, leading), :]) for i, j in held[call.rank] if i < min(j, leading)]
    if not out:
        return empty_rows(v, batch, v.shape[-1], *ties)
    ordered = [part.expand(*batch, *part.shape[-2:]) for _, part in sorted(out, key=lambda part: part[0])]
    return tied(ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=-2), *ties).to(v.dtype)


def _near_range(operator: NearFar, n: int, segment: Range) -> Range:
    """The positions of the blocks of a segment and of those beside them, without the leading ones; causal, up to it."""
    leading, block = operator.leading, operator.block
    start, stop = max(segment[0], leading) - leading, segment[1] - leading
    if stop <= start:
        return leading, leading
    first = max(0, start // block - 1)
    return leading + first * block, segment[1] if operator.causal else min(n, leading + (-(-stop // block) + 1) * block)


def _elsewhere(segments: Sequence[Range], near: Sequence[Range], leading: int) -> list[Range]:
    """The near and the leading positions that are not in the segments of a rank."""
    wanted = (0, leading), *near
    ends = sorted({end for found in (*segments, *wanted) for end in found})

    def inside(at: int, ranges: Sequence[Range]) -> bool:
        return any(start <= at < stop for start, stop in ranges)

    return [(i, j) for i, j in pairwise(ends) if inside(i, wanted) and not inside(i, segments)]


def _rows(parts: Parts, ranges: Sequence[Range]) -> Tensor:
    """The rows at the positions of some ranges."""
    found = []
    for left, right in ranges:
        for start, x in parts:
            begin, end = max(left - start, 0), min(right - start, x.shape[-2])
            if begin < end:
                found.append(x[..., begin:end, :])
    return found[0] if len(found) == 1 else torch.cat(found, dim=-2)


def _is_far(piece: Range, found: Range, causal: bool) -> bool:
    """Whether keys are far from all queries of a segment with the near positions `found`, and visible to them."""
    return found[0] < found[1] and (piece[1] <= found[0] or (piece[0] >= found[1] and not causal))


def _states(
    operator: NearFar,
    call: Call,
    k: Tensor,
    x: Tensor,
    held: Sequence[Sequence[Range]],
    near: Sequence[Sequence[Range]],
) -> tuple[list[tuple[int, Range]], Tensor]:
    """The pieces of all ranks, and log-sum-exp and mean of each feature: (pieces, *batch, r, 1 + d)."""
    # cut where the near keys of some rank begin or end
    cuts = sorted({end for ranges in near for found in ranges for end in found})
    pieces = [_pieces(segments, operator.leading, cuts) for segments in held]
    most = max(1, *map(len, pieces))
    batch = torch.broadcast_shapes(operator.b.shape[:-2], k.shape[:-2], x.shape[:-2])
    empty = F.pad(x.new_full((*batch, operator.b.shape[-2], 1), limits.HIDDEN), (0, x.shape[-1]))
    needed = [
        any(_is_far(piece, found, operator.causal) for ranges in near for found in ranges)
        for piece in pieces[call.rank]
    ]
    states = [empty] * most
    if any(needed):
        # keys first: the gradient of k.mT would be laid out column by column, and slow to add
        scores = operator.qk.scale * (k @ operator.b.to(k.dtype).mT).mT.contiguous()
        if call.key_mask is not None:
            scores = scores.masked_fill(~call.key_mask.unsqueeze(-2), limits.HIDDEN)
        n, row = k.shape[-2], 0
        starts = {}
        for start, stop in held[call.rank]:
            starts[start, stop] = row - start
            row += stop - start
        for i, (left, right) in enumerate(pieces[call.rank]):
            if not needed[i]:
                continue
            begin = left + next(shift for (start, stop), shift in starts.items() if start <= left < stop)
            some = scores[..., begin : begin + right - left]
            lse = some.logsumexp(-1, keepdim=True)
            # a product with all rows: the gradient of a part of them would be as large
            means = F.pad((some - lse).exp(), (begin, n - begin - right + left)) @ x
            states[i] = torch.cat([y.expand(*batch, *y.shape[-2:]) for y in (lse, means)], dim=-1)
    # in the graph of k and v on every rank, also where no other needs a state
    own = torch.stack(states) if any(needed) else tied(torch.stack(states), k, x)
    places = [(rank * most + i, piece) for rank, found in enumerate(pieces) for i, piece in enumerate(found)]
    return places, gathered(own, call.ranks).flatten(0, 1)


def _pieces(segments: Sequence[Range], leading: int, cuts: Sequence[int]) -> list[Range]:
    """The segments of a rank after the leading positions, cut."""
    found = []
    for start, stop in segments:
        start = max(start, leading)
        ends = [cut for cut in cuts if start < cut < stop]
        found += [(i, j) for i, j in pairwise([start, *ends, stop]) if j > i]
    return found


def _merged(states: Tensor) -> tuple[Tensor, Tensor]:
    """(pieces, *batch, r, 1 + d): log-sum-exp and mean over all of them; -inf where all keys are masked."""
    lse = states[..., 0].logsumexp(0)
    share = torch.softmax(states[..., 0], dim=0).unsqueeze(-1)
    return lse.masked_fill(lse < limits.HIDDEN / 2, -math.inf), (share * states[..., 1:]).sum(0)
