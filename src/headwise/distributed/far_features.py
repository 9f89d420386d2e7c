"""`near_far`: near blocks by a halo, far keys by their states.

A rank fetches the blocks beside its own, 2 block 2 d scalars (causal: half of it), and the leading keys.  Of far keys
it needs, for each of r features, the log-sum-exp of exp(s b . k) and the mean of the values under it.  The keys of all
ranks are cut where some rank's halo ends, every piece has one state, and the states are gathered: r (d + 1) scalars for
each piece of another rank, of which aligned slices have two if causal and three otherwise.
"""

from __future__ import annotations

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
from headwise.operators.linear.near_far import NearFar, _merged, _near
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax

Range = tuple[int, int]


@local_rows.register
def _(operator: NearFar, call: Call, v: Tensor) -> Tensor:
    """A halo of blocks, 4 block d scalars, and r (d + 1) for every piece of the other ranks; causal, half a halo."""
    if not call.square:
        raise NoExchange("NearFar: queries and keys are sliced differently")
    n, leading, compute = call.keys.n, operator.leading, torch.promote_types(v.dtype, torch.float32)
    k = call.hide(repeat_heads(call.k, call.q, "NearFar"))
    x = call.hide(v).to(compute)
    near = {rank: [_near_range(operator, n, s) for s in call.keys.segments(rank)] for rank in range(call.ranks.size)}

    def wanted(rank: int) -> Tensor:
        return torch.cat([torch.arange(leading), *(torch.arange(*found) for found in near[rank])])

    keys, values = fetch([k.to(compute), x], call.keys, wanted, call.ranks)
    mask = fetch_mask(call.key_mask, call.keys, wanted, call.ranks)
    # pieces of the keys of every rank, cut where the near keys of some rank begin or end
    cuts = sorted({end for ranges in near.values() for found in ranges for end in found})
    pieces = {rank: _pieces(call.keys.segments(rank), leading, n, cuts) for rank in near}
    states = gathered(_states(operator, call, k.to(compute), x, pieces), call.ranks).flatten(0, 1)
    most = max(1, *(len(found) for found in pieces.values()))
    out, offset = [], leading
    segments = call.keys.segments(call.rank)
    for q, (start, stop), found in zip(call.keys.split(call.q, call.rank), segments, near[call.rank], strict=True):
        count = found[1] - found[0]
        rows = slice(offset, offset + count)
        offset += count
        if stop > max(start, leading):
            far = [
                rank * most + i
                for rank, ranges in pieces.items()
                for i, (left, right) in enumerate(ranges)
                if right <= found[0] or (left >= found[1] and not operator.causal)
            ]
            ahead = None if mask is None else mask[..., :leading]
            some = None if mask is None else mask[..., rows]
            inside = _far_rows(operator, q.to(compute), keys, values, (rows, some, ahead), found, start, states[far])
            out.append((max(start, leading), inside))
        if start < min(stop, leading) and operator.causal:
            visible = None if mask is None else mask[..., :leading]
            count = min(stop, leading) - start
            causal = Mask(count, leading, True, visible, _ahead=start)
            scores = Scores(q[..., :count, :].to(compute), keys[..., :leading, :], operator.qk.scale, causal)
            out.append((start, Softmax(scores).apply(values[..., :leading, :])))
    batch = torch.broadcast_shapes(operator.shape[:-2], v.shape[:-2])
    if leading and not operator.causal:
        (q,) = fetch([call.q], call.queries, lambda _: torch.arange(leading), call.ranks)
        rows = everywhere(q, k, v, operator.qk.scale, call.key_mask, call.ranks).to(compute)
        out += [
            (start, rows[..., start : min(stop, leading), :]) for start, stop in segments if start < min(stop, leading)
        ]
        values = tied(values, rows)
    if not out:
        return empty_rows(v, batch, v.shape[-1], keys, values, states)
    ordered = [part.expand(*batch, *part.shape[-2:]) for _, part in sorted(out, key=lambda pair: pair[0])]
    return tied(torch.cat(ordered, dim=-2), keys, values, states).to(v.dtype)


def _near_range(operator: NearFar, n: int, segment: Range) -> Range:
    """The positions of the blocks of a segment and of those beside them, without the leading ones."""
    leading, block = operator.leading, operator.block
    start, stop = max(segment[0], leading) - leading, segment[1] - leading
    if stop <= start:
        return leading, leading
    first, last = max(0, start // block - 1), -(-stop // block) + (0 if operator.causal else 1)
    return leading + first * block, min(n, leading + last * block)


def _pieces(segments: tuple[Range, ...], leading: int, n: int, cuts: list[int]) -> list[Range]:
    found = []
    for start, stop in segments:
        start = max(start, leading)
        ends = [cut for cut in cuts if start < cut < stop]
        found += [(a, b) for a, b in zip([start, *ends], [*ends, stop], strict=True) if b > a]
    return found


def _states(operator: NearFar, call: Call, k: Tensor, x: Tensor, pieces: dict[int, list[Range]]) -> Tensor:
    """(pieces, *batch, r, 1 + d): log-sum-exp and mean of each feature; as many pieces as any rank has."""
    scores = operator.qk.scale * (k @ operator.b.to(k.dtype).mT)
    if call.key_mask is not None:
        scores = scores.masked_fill(~call.key_mask.unsqueeze(-1), limits.HIDDEN)
    batch = torch.broadcast_shapes(scores.shape[:-2], x.shape[:-2])
    offsets, offset = [], 0
    for start, stop in call.keys.segments(call.rank):
        offsets.append((start, stop, offset))
        offset += stop - start
    states = []
    for left, right in pieces[call.rank]:
        row = next(offset + left - start for start, stop, offset in offsets if start <= left < stop)
        s, values = scores[..., row : row + right - left, :], x[..., row : row + right - left, :]
        lse = s.logsumexp(-2, keepdim=True)
        means = (s - lse).exp().mT @ values
        states.append(torch.cat([lse.mT.expand(*batch, -1, 1), means.expand(*batch, *means.shape[-2:])], dim=-1))
    most = max(1, *(len(found) for found in pieces.values()))
    r, d = operator.b.shape[-2], x.shape[-1]
    empty = F.pad(x.new_full((*batch, r, 1), limits.HIDDEN), (0, d))
    # in the graph of k and v on every rank, also where it holds no key
    tie = tied(torch.stack([*states, *[empty] * (most - len(states))]), scores, x)
    return tie


def _far_rows(
    operator: NearFar,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    part: tuple[slice, Tensor | None, Tensor | None],
    found: Range,
    start: int,
    states: Tensor,
) -> Tensor:
    """Rows of a segment from its first position that is not leading on: `found` are its near positions."""
    (rows, mask, ahead), leading, scale = part, operator.leading, operator.qk.scale
    k, x = keys[..., rows, :], values[..., rows, :]
    n, dtype = k.shape[-2], x.dtype
    first = max(start, leading)
    q = q[..., first - start :, :]
    before, count = first - found[0], q.shape[-2]
    q = F.pad(q, (0, 0, before, n - before - count))
    masks = Mask(n, n, operator.causal, mask)
    a, b, c = (y.to(dtype) for y in (operator.a, operator.b, operator.c))
    local = NearFar(QueriesKeys(q, k, scale, masks), a, b, c, operator.block, 0)
    far = local._far()
    near, lse = _near(local._blocked(q), local._windows(k, 0.0), local._windows(x, 0.0), local._hidden(), scale)
    scores, means = [local._others(far, dtype)], [local._means(far, x)]
    if len(states):
        masses = states[..., 0].logsumexp(0)  # (*batch, r)
        share = torch.softmax(states[..., 0], dim=0).unsqueeze(-1)
        scores.append(local._blocked(scale * (q @ a.mT) + (c + masses).unsqueeze(-2)))
        means.append((share * states[..., 1:]).sum(0).unsqueeze(-3))
    if leading:
        s = scale * (q @ keys[..., :leading, :].mT)
        s = s if ahead is None else s.masked_fill(~ahead.unsqueeze(-2), limits.HIDDEN)
        scores.append(local._blocked(s))
        means.append(values[..., :leading, :].unsqueeze(-3))
    batch = torch.broadcast_shapes(near.shape[:-2], *(y.shape[:-2] for y in (*scores, *means)))
    scores, means = ([y.expand(*batch, *y.shape[-2:]) for y in parts] for parts in (scores, means))
    out = _merged(near, lse, torch.cat(scores, dim=-1), torch.cat(means, dim=-2))
    return out.flatten(-3, -2)[..., before : before + count, :]
