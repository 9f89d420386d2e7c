"""Linear attention: a state for each feature, summed over the ranks; causal, over the ranks before.

    efficient      log-sum-exp of each key feature and the mean of the values under it: d^2 + 2 d scalars reduced
    dot_product    K^T V: d^2 reduced
    uniform        the sum of the values: d reduced (with a key mask, and the number of visible keys)

Causal: the states of all segments are gathered, (P - 1) times as many scalars (zig-zag: twice as many segments), and
each rank adds those before its own.  Backward, gradients of states go the same ways.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.distributed.collectives import gathered, largest, summed, tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.slices import Slices
from headwise.operators._kernels import limits
from headwise.operators._kernels.prefix_sums import blocked, rises_little
from headwise.operators._kernels.queries_keys import QueriesKeys, repeat_heads
from headwise.operators.dot_product import DotProduct
from headwise.operators.linear.efficient import Efficient, EfficientCausal
from headwise.operators.masks import Mask
from headwise.operators.uniform import Uniform


def mean_values(k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None, call: Call) -> Tensor:
    """softmax over all keys of scale k, transposed, times v: (*batch, k, d) from the slices of all ranks."""
    scores = _scores(k, scale, key_mask, v.dtype)
    top = largest(scores.detach().amax(-2, keepdim=True), call.ranks)
    weights = (scores - top).exp()[..., :-1, :]  # without the row of nothing
    if key_mask is not None:
        weights = weights.masked_fill(~key_mask.unsqueeze(-1), 0)
    state = weights.mT @ _with_ones(v.to(scores.dtype))
    state = summed(state, call.ranks)
    return state[..., 1:] / state[..., :1].masked_fill(state[..., :1] == 0, 1)


@local_rows.register
def _(operator: Efficient, call: Call, v: Tensor) -> Tensor:
    """k (d + 2) scalars reduced: the largest score, the sum of exponentials and the values of each feature."""
    k = call.hide(repeat_heads(call.k, call.q, "Efficient"))
    means = mean_values(k, call.hide(v), operator.qk.scale, call.key_mask, call)
    return (torch.softmax(call.q.to(means.dtype) * operator.qk.scale, dim=-1) @ means).to(v.dtype)


@local_rows.register
def _(operator: EfficientCausal, call: Call, v: Tensor) -> Tensor:
    """k (d + 1) scalars gathered from every segment of the other ranks."""
    if not call.square:
        raise NoExchange("EfficientCausal: queries and keys are sliced differently")
    scale, segments = operator.qk.scale, call.keys.segments(call.rank)
    k, values = call.hide(repeat_heads(call.k, call.q, "EfficientCausal")), call.hide(v)
    batch = torch.broadcast_shapes(k.shape[:-2], call.q.shape[:-2], v.shape[:-2])
    k, values = (x.expand(*batch, *x.shape[-2:]) for x in (k, values))
    parts = list(
        zip(
            call.keys.split(call.q, call.rank),
            call.keys.split(k, call.rank),
            call.keys.split(values, call.rank),
            [None] * len(segments) if call.key_mask is None else call.keys.split(call.key_mask, call.rank, dim=-1),
            strict=True,
        )
    )
    states = []
    for _, keys, x, mask in parts:
        scores = _scores(keys, scale, mask, v.dtype)
        lse = scores.logsumexp(-2, keepdim=True)
        means = (scores - lse).exp()[..., :-1, :].mT @ x.to(scores.dtype)
        states.append(torch.cat([lse.mT, means], dim=-1))
    all_states = gathered(torch.stack(states), call.ranks)
    out = []
    for (q, keys, x, mask), earlier in zip(parts, _earlier(call.keys, call.rank), strict=True):
        before = all_states.flatten(0, 1)[earlier.to(v.device)]
        rows = _running_means(q, keys, x, mask, before, scale)
        out.append(rows)
    return tied(torch.cat(out, dim=-2), all_states).to(v.dtype)


def _running_means(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, before: Tensor, scale: float) -> Tensor:
    """Rows of one segment: their own running means and those of earlier segments, weighted by their sums."""
    compute = before.dtype
    features = torch.softmax(q.to(compute) * scale, dim=-1)
    if not v.shape[-2]:
        return v.to(compute)
    masks = Mask(q.shape[-2], k.shape[-2], True, mask)
    operator = EfficientCausal(QueriesKeys(q, k, scale, masks))
    blocks = operator.blocks(compute)
    if not rises_little(k, scale):
        blocks.check("EfficientCausal")
    own, carried = features, 0.0
    if len(before):
        lse, means = before[..., 0], before[..., 1:]
        share = torch.softmax(lse, dim=0).unsqueeze(-1)
        running = _scores(k, scale, mask, compute)[..., :-1, :].logcumsumexp(-2)
        own = features * torch.sigmoid(running - lse.logsumexp(0).unsqueeze(-2))
        carried = (features - own) @ (share * means).sum(0)
    size = blocks.keys.shape[-2]
    x = blocked(v.to(compute), size)
    return blocks.attend(blocked(own, size), x, x).flatten(-3, -2)[..., : v.shape[-2], :] + carried


@local_rows.register
def _(operator: DotProduct, call: Call, v: Tensor) -> Tensor:
    """k d scalars reduced; causal, gathered from every segment of the other ranks."""
    if operator.mask.pair_mask is not None or (operator.mask.causal and not call.square):
        raise NoExchange("DotProduct: a pair_mask has m x n entries, and causality needs one slicing")
    compute = torch.promote_types(v.dtype, torch.float32)
    q, k = call.q.to(compute), call.hide(call.k).to(compute)
    return _averaged(q, k, call.hide(v).to(compute), operator.mask.causal, call).to(v.dtype)


@local_rows.register
def _(operator: Uniform, call: Call, v: Tensor) -> Tensor:
    """d scalars reduced; causal, gathered from every segment of the other ranks."""
    if operator.mask.causal and not call.square:
        raise NoExchange("Uniform: causality needs one slicing of queries and keys")
    compute = torch.promote_types(v.dtype, torch.float32)
    x = call.hide(v).to(compute)
    ones = x.new_ones(1, 1)
    rows, columns = (ones.expand(s.lengths[call.rank], 1) for s in (call.queries, call.keys))
    return _averaged(rows, columns, x, operator.mask.causal, call).to(v.dtype)


def _averaged(q: Tensor, k: Tensor, v: Tensor, causal: bool, call: Call) -> Tensor:
    """sum_j M_ij q_i . k_j v_j / C_i, from sums of k_j v_j^T over the ranks, or over the segments before."""
    if not causal:
        sums = q @ summed(k.mT @ v, call.ranks)
        if call.key_mask is None:
            return sums / call.keys.n
        return sums / summed(call.key_mask.sum(-1).to(v.dtype), call.ranks).clamp(min=1)[..., None, None]
    parts = list(zip(*(call.keys.split(x, call.rank) for x in (q, k, v)), strict=True))
    states = gathered(torch.stack([keys.mT @ x for _, keys, x in parts]), call.ranks).flatten(0, 1)
    earlier = [index.to(v.device) for index in _earlier(call.keys, call.rank)]
    out = []
    for (rows, keys, x), index in zip(parts, earlier, strict=True):
        inside = DotProduct.triangle(rows, keys, x) if x.shape[-2] else x
        out.append(inside + rows @ states[index].sum(0))
    if call.key_mask is None:
        counts = call.keys.positions(call.rank).to(v.device) + 1
    else:
        masks = call.keys.split(call.key_mask, call.rank, dim=-1)
        totals = gathered(torch.stack([mask.sum(-1, keepdim=True) for mask in masks]), call.ranks).flatten(0, 1)
        running = [mask.cumsum(-1) + totals[i].sum(0) for mask, i in zip(masks, earlier, strict=True)]
        counts = torch.cat(running, dim=-1).clamp(min=1)
    return tied(torch.cat(out, dim=-2), states) / counts.to(v.dtype).unsqueeze(-1)


def _scores(k: Tensor, scale: float, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scale k, hidden where masked, and one hidden row more, so that an empty slice has a state too."""
    scores = k.to(torch.promote_types(dtype, torch.float32)) * scale
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask.unsqueeze(-1), limits.HIDDEN)
    nothing = scores.new_full((*scores.shape[:-2], 1, scores.shape[-1]), limits.HIDDEN)
    return torch.cat([scores, nothing], dim=-2)


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v.new_ones(*v.shape[:-1], 1), v], dim=-1)


def _earlier(held: Slices, rank: int) -> list[Tensor]:
    """For each segment of this rank, which of all segments, rank after rank, end before it begins."""
    segments = [segment for other in range(len(held.lengths)) for segment in held.segments(other)]
    return [
        torch.tensor([i for i, (a, b) in enumerate(segments) if b <= start and b > a], dtype=torch.int64)
        for start, _ in held.segments(rank)
    ]
