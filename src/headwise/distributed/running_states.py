"""Linear attention: a state for each feature, summed over the ranks; causal, over the ranks before.

    efficient      log-sum-exp of each key feature and the mean of the values under it: d^2 + 2 d scalars reduced
    dot_product    K^T V: d^2 reduced
    uniform        the sum of the values: d reduced (with a key mask, and the number of visible keys)

Causal: the states of all segments are gathered, (P - 1) times as many scalars (zig-zag: twice as many segments), and
each rank adds those before its own.  Backward, gradients of states go the same ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.distributed.collectives import gathered, largest, summed, tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.slices import Slices
from headwise.operators._kernels import limits
from headwise.operators._kernels.double_softmax import feature_rows, key_states
from headwise.operators._kernels.prefix_sums import blocked, rises_little
from headwise.operators._kernels.queries_keys import QueriesKeys, repeat_heads
from headwise.operators.dot_product import DotProduct
from headwise.operators.linear.efficient import Efficient, EfficientCausal
from headwise.operators.masks import Mask
from headwise.operators.uniform import Uniform

APART = {torch.float32: 25.0, torch.float64: 40.0}
"""exp(-APART), times the number of features, is nothing beside 1."""


def mean_values(k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None, call: Call) -> Tensor:
    """softmax over all keys of scale k, transposed, times v: (*batch, k, d) from the slices of all ranks."""
    lse, means = key_states(k, v, key_mask, scale).tensor_split([1], dim=-1)
    weight = (lse - largest(lse, call.ranks)).exp()
    weight, sums = summed(torch.cat([weight, weight * means], dim=-1), call.ranks).tensor_split([1], dim=-1)
    return sums / weight


@local_rows.register
def _(operator: Efficient, call: Call, v: Tensor) -> Tensor:
    """k (d + 2) scalars reduced: the largest score, the sum of exponentials and the values of each feature."""
    k = repeat_heads(call.k, call.q, "Efficient")
    means = mean_values(k, v, operator.qk.scale, call.key_mask, call)
    return feature_rows(call.q, means, operator.qk.scale).to(v.dtype)


@local_rows.register
def _(operator: EfficientCausal, call: Call, v: Tensor) -> Tensor:
    """k (d + 1) scalars gathered from every segment of the other ranks."""
    if not call.square:
        raise NoExchange("EfficientCausal: queries and keys are sliced differently")
    scale, compute = operator.qk.scale, torch.promote_types(v.dtype, torch.float32)
    k = call.hide(repeat_heads(call.k, call.q, "EfficientCausal"))
    batch = torch.broadcast_shapes(k.shape[:-2], call.q.shape[:-2], v.shape[:-2])
    q, k, x = (x.to(compute).expand(*batch, *x.shape[-2:]) for x in (call.q, k, call.hide(v)))
    masks: Sequence[Tensor | None] = [None] * len(call.keys.segments(call.rank))
    if call.key_mask is not None:
        masks = call.keys.split(call.key_mask.expand(*batch, -1), call.rank, dim=-1)
    parts = list(zip(*(call.keys.split(y, call.rank) for y in (q, k, x)), masks, strict=True))
    unread = x.new_zeros(*batch, k.shape[-1], 1 + x.shape[-1])  # the state of the last segment
    states = [
        key_states(keys, values, mask, scale) if stop < call.keys.n else tied(unread, keys, values)
        for (_, keys, values, mask), (_, stop) in zip(parts, call.keys.segments(call.rank), strict=True)
    ]
    states = gathered(torch.stack(states), call.ranks)
    out = [
        _running_means(rows, keys, values, mask, states.flatten(0, 1)[index.to(v.device)], scale)
        for (rows, keys, values, mask), index in zip(parts, _earlier(call.keys, call.rank), strict=True)
    ]
    return tied(_joined(out).to(v.dtype), states)


def _running_means(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, before: Tensor, scale: float) -> Tensor:
    """Rows of one segment, the states (s, *batch, k, 1 + d) of earlier ones put before it as one key for each feature.

    Key c is the log-sum-exp of feature c there, and so much less in the other features that it has no weight in them;
    its value is the mean of feature c.
    """
    if not v.shape[-2]:
        return v
    rises = not rises_little(k, scale)
    if len(before):
        lse, width = before[..., 0], k.shape[-1]
        means = (torch.softmax(lse, dim=0).unsqueeze(-1) * before[..., 1:]).sum(0)
        lse = lse.logsumexp(0)
        if mask is not None:
            visible = lse[..., :1] > limits.HIDDEN / 2
            lse = torch.where(visible, lse, 0)
            mask = torch.cat([visible.expand(*visible.shape[:-1], width), mask], dim=-1)
        others = APART[k.dtype] * (1 - torch.eye(width, dtype=k.dtype, device=k.device))
        k = torch.cat([(lse.unsqueeze(-2) - others) / scale, k], dim=-2)
        v = torch.cat([means, v], dim=-2)
    operator = EfficientCausal(QueriesKeys(q, k, scale, Mask(q.shape[-2], k.shape[-2], True, mask)))
    if rises:
        operator.blocks(k.dtype).check("EfficientCausal")
    return operator.apply(v)


@local_rows.register
def _(operator: DotProduct, call: Call, v: Tensor) -> Tensor:
    """k d scalars reduced; causal, gathered from every segment of the other ranks."""
    if operator.mask.pair_mask is not None or (operator.mask.causal and not call.square):
        raise NoExchange("DotProduct: a pair_mask has m x n entries, and causality needs one slicing")
    compute = torch.promote_types(v.dtype, torch.float32)
    q, k, x = call.q.to(compute), call.hide(call.k).to(compute), call.hide(v).to(compute)
    if not operator.mask.causal:
        return (q @ summed(k.mT @ x, call.ranks) / _all_keys(call, x)).to(v.dtype)
    parts = []
    for part in zip(*(call.keys.split(y, call.rank) for y in (q, k, x)), strict=True):
        block = max(1, min(part[2].shape[-2], max(limits.DIAGONAL_BLOCK, k.shape[-1])))
        parts.append([blocked(y, block) for y in part])
    sums = [keys.mT @ values for _, keys, values in parts]  # of each block
    states = gathered(torch.stack([y.sum(-3) for y in sums]), call.ranks)
    out = []
    for (rows, keys, values), own, before in zip(parts, sums, _before(states, call), strict=True):
        running = torch.cat([before.unsqueeze(-3), own[..., :-1, :, :]], dim=-3).cumsum(-3)
        out.append(((rows @ keys.mT).tril() @ values + rows @ running).flatten(-3, -2))
    out = [y[..., : b - a, :] for y, (a, b) in zip(out, call.keys.segments(call.rank), strict=True)]
    return tied((_joined(out) / _running_keys(call, x)).to(v.dtype), states)


@local_rows.register
def _(operator: Uniform, call: Call, v: Tensor) -> Tensor:
    """d scalars reduced; causal, gathered from every segment of the other ranks."""
    if operator.mask.causal and not call.square:
        raise NoExchange("Uniform: causality needs one slicing of queries and keys")
    x = call.hide(v).to(torch.promote_types(v.dtype, torch.float32))
    if not operator.mask.causal:
        mean = summed(x.sum(-2, keepdim=True), call.ranks) / _all_keys(call, x)
        return mean.to(v.dtype).expand(*mean.shape[:-2], call.queries.lengths[call.rank], -1).contiguous()
    parts = call.keys.split(x, call.rank)
    states = gathered(torch.stack([part.sum(-2, keepdim=True) for part in parts]), call.ranks)
    out = _joined([part.cumsum(-2).add_(before) for part, before in zip(parts, _before(states, call), strict=True)])
    return tied((out / _running_keys(call, x)).to(v.dtype), states)


def _all_keys(call: Call, like: Tensor) -> Tensor:
    """The number of visible keys of all ranks."""
    if call.key_mask is None:
        return like.new_tensor(call.keys.n)
    return summed(call.key_mask.sum(-1).to(like.dtype), call.ranks).clamp(min=1)[..., None, None]


def _running_keys(call: Call, like: Tensor) -> Tensor:
    """The number of visible keys at and before each position of this rank, (*batch, n, 1)."""
    if call.key_mask is None:
        counts = call.keys.positions(call.rank).to(like.device) + 1
    else:
        masks = call.keys.split(call.key_mask, call.rank, dim=-1)
        totals = gathered(torch.stack([mask.sum(-1, keepdim=True) for mask in masks]), call.ranks)
        counts = [mask.cumsum(-1) + before for mask, before in zip(masks, _before(totals, call), strict=True)]
        counts = torch.cat(counts, dim=-1).clamp(min=1)
    return counts.to(like.dtype).unsqueeze(-1)


def _before(states: Tensor, call: Call) -> list[Tensor]:
    """For each segment of this rank, the sum of the gathered states (P, segments of a rank, ...) before it."""
    states = states.flatten(0, 1)
    return [states[index.to(states.device)].sum(0) for index in _earlier(call.keys, call.rank)]


def _earlier(held: Slices, rank: int) -> list[Tensor]:
    """For each segment of this rank, which of all segments, rank after rank, end before it begins."""
    segments = [segment for other in range(len(held.lengths)) for segment in held.segments(other)]
    return [
        torch.tensor([i for i, (a, b) in enumerate(segments) if b <= start and b > a], dtype=torch.int64)
        for start, _ in held.segments(rank)
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
