"""Operators that read neither q nor k: the rows of v that a rank needs are known from the positions alone.

    shift, offset          one row for each query that is held elsewhere: |o| d scalars
    toeplitz, short reach  a halo as wide as its nonzero weights: reach d
    any other              some columns of all rows, there and back: 2 d N (P-1)/P^2 (`exchanges.columns`)

The last is the transposition that a Kronecker product needs along its first axis, for any grid, mask and slice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.distributed.collectives import tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.slices import fetch, fetch_mask
from headwise.operators.relative.offset import Offset
from headwise.operators.relative.shift import Shift
from headwise.operators.relative.toeplitz import Toeplitz, ToeplitzSoftmax, toeplitz, toeplitz_softmax


@local_rows.register
def _(operator: Shift, call: Call, v: Tensor) -> Tensor:
    """|o| d scalars along a sequence: the rows of v at other ranks' positions."""
    return _chosen_rows(operator.sources(), call, v)


@local_rows.register
def _(operator: Offset, call: Call, v: Tensor) -> Tensor:
    """|o| d scalars: the rows of v at other ranks' positions."""
    if operator.index.dim() > 1 or operator.index.is_meta:
        raise NoExchange("Offset: with a key_mask every sequence of the batch has its own rows")
    return _chosen_rows(operator.index, call, v)


def _chosen_rows(sources: Tensor, call: Call, v: Tensor) -> Tensor:
    """Row sources_i of v for every query i, zeros for -1."""

    def own(rank: int) -> Tensor:
        return sources[call.queries.positions(rank)]

    (rows,) = fetch([v], call.keys, lambda rank: own(rank)[own(rank) >= 0], call.ranks)
    present = (own(call.rank) >= 0).to(v.device)
    if bool(present.all()):
        return rows
    at = torch.where(present, present.cumsum(0) - 1, rows.shape[-2])
    return torch.cat([rows, rows.new_zeros(*rows.shape[:-2], 1, rows.shape[-1])], dim=-2).index_select(-2, at)


@local_rows.register
def _(operator: Toeplitz, call: Call, v: Tensor) -> Tensor:
    """A halo over the relative positions whose weights are not all zero, if that is less than columns would be."""
    weights = operator.weights
    visible = weights.detach() != 0

    def part(start: int, m: int, n: int, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
        return toeplitz(weights[..., start : start + m + n - 1], m, n).apply

    return _banded(visible, call, v, None, part)


@local_rows.register
def _(operator: ToeplitzSoftmax, call: Call, v: Tensor) -> Tensor:
    """A halo over the relative positions whose logits are not all -inf, if that is less than columns would be."""
    logits = operator.logits
    visible = logits.detach() > -torch.inf

    def part(start: int, m: int, n: int, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
        return toeplitz_softmax(logits[..., start : start + m + n - 1], m, n, key_mask=mask).apply

    return _banded(visible, call, v, call.key_mask, part)


def _banded(
    visible: Tensor,
    call: Call,
    v: Tensor,
    key_mask: Tensor | None,
    part: Callable[[int, int, int, Tensor | None], Callable[[Tensor], Tensor]],
) -> Tensor:
    """Rows of a Toeplitz matrix are Toeplitz again: those of a segment, over the keys from its first to its last one.

    `part(start, m, n, mask)` applies the m x n matrix whose weights begin at entry `start`.
    """
    m, n, size = call.queries.n, call.keys.n, call.ranks.size
    at = visible.reshape(-1, visible.shape[-1]).any(0).nonzero().flatten() - (m - 1)
    least, most = (int(at[0]), int(at[-1])) if len(at) else (0, -1)
    if (max(0, -least) + max(0, most)) * size * size > 2 * n * (size - 1):
        raise NoExchange("Toeplitz: weights reach over more keys than an exchange of columns would send")

    def span(start: int, stop: int) -> tuple[int, int]:
        left, right = min(n, max(0, start + least)), max(0, min(n, stop + most))
        return left, max(left, right) if stop > start else left

    def wanted(rank: int) -> Tensor:
        return torch.cat([torch.arange(*span(*segment)) for segment in call.queries.segments(rank)])

    (values,) = fetch([v], call.keys, wanted, call.ranks)
    mask = fetch_mask(key_mask, call.keys, wanted, call.ranks)
    batch = torch.broadcast_shapes(visible.shape[:-1], v.shape[:-2], () if mask is None else mask.shape[:-1])
    out, offset = [], 0
    for start, stop in call.queries.segments(call.rank):
        left, right = span(start, stop)
        rows = slice(offset, offset + right - left)
        offset += right - left
        if stop > start and right > left:
            x, some = values[..., rows, :], None if mask is None else mask[..., rows]
            out.append(part(left - stop + m, stop - start, right - left, some)(x).expand(*batch, -1, v.shape[-1]))
        else:
            out.append(v.new_zeros(*batch, stop - start, v.shape[-1]))
    return tied(torch.cat(out, dim=-2), values)
