"""P v for the rows of one rank: what every operator needs from the other ranks.

`local_rows(operator, call, v)` chooses by the type of the operator, which was built for the whole sequence with q and k
on the meta device: it says what P is, `call` holds the slices of q, k and the key mask.  Operators that are not
registered are applied with all positions of some heads (or, if they read neither q nor k, of some columns of v).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import singledispatch
from typing import Any, final

import torch
from torch import Tensor

from headwise.distributed.collectives import Ranks, exchange
from headwise.distributed.ring_softmax import Ring, ring_softmax
from headwise.distributed.slices import Slices
from headwise.errors import UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.compose import Product, Sum
from headwise.operators.softmax import Softmax


@final
@dataclass(frozen=True, eq=False)
class Call:
    """What this rank holds of q, k and the key mask, and who holds the other positions."""

    ranks: Ranks
    queries: Slices
    keys: Slices
    q: Tensor  # (*batch, m, k)
    k: Tensor  # (*batch, n, k)
    key_mask: Tensor | None  # (*batch, n), True = attend

    def hide(self, x: Tensor) -> Tensor:
        """x (*batch, n, c) with the rows of masked keys set to zero."""
        return x if self.key_mask is None else torch.where(self.key_mask.unsqueeze(-1), x, 0)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def square(self) -> bool:
        """Whether queries and keys are the same positions, held alike."""
        return self.queries == self.keys


class NoExchange(UnsupportedError):
    """No cheaper exchange than that of heads or columns is known for this operator; raised before any collective."""


@singledispatch
def local_rows(operator: AttentionOperator, call: Call, v: Tensor) -> Tensor:
    """(P v)_i for the positions i of this rank, from its rows of v."""
    raise NoExchange(f"{type(operator).__name__}: no exchange but that of heads is known")


@local_rows.register
def _(operator: Softmax, call: Call, v: Tensor) -> Tensor:
    """Keys and values of one rank after the other: 2 d N (P-1)/P scalars."""
    mask = operator.scores.mask
    if mask.pair_mask is not None or mask.attn_bias is not None:
        raise NoExchange("Softmax: a pair_mask or attn_bias has m x n entries")
    ring = Ring(call.ranks, call.queries, call.keys, operator.scores.scale, mask.causal)
    return ring_softmax(call.q, call.k, v, call.key_mask, ring)


@local_rows.register
def _(operator: Product, call: Call, v: Tensor) -> Tensor:
    """The exchanges of its factors, one after the other; all of them square."""
    if not call.square:
        raise NoExchange("Product: factors between queries and keys are on other positions")
    for factor in reversed(operator.factors):
        v = local_rows(factor, call, v)
    return v


@local_rows.register
def _(operator: Sum, call: Call, v: Tensor) -> Tensor:
    """The exchanges of its terms."""
    parts = [local_rows(term, call, v) for term in operator.terms]
    return torch.stack(torch.broadcast_tensors(*parts)).sum(0)


def by_heads(x: Tensor, axis: int, held: Slices, ranks: Ranks) -> Tensor:
    """All positions of some entries of `axis` for some positions of all: x (*batch, n, c) -> rows N, in sequence.

    axis -3: heads, axis -1: columns; a rank gets the next part of them.
    """
    counts, lengths = Slices.even(x.shape[axis], ranks.size).lengths, held.lengths
    first = x.movedim(axis, 0)
    rest = _rest(x, axis)
    flat = first.reshape(-1)
    send = [count * lengths[ranks.rank] * rest for count in counts]
    receive = [counts[ranks.rank] * length * rest for length in lengths]
    got = exchange(flat, send, receive, ranks).split(receive)
    shape = list(first.shape)
    shape[0] = counts[ranks.rank]
    parts = []
    for part, length in zip(got, lengths, strict=True):
        shape[_rows(axis, x.dim())] = length
        parts.append(part.reshape(shape).movedim(0, axis))
    return held.in_sequence(torch.cat(parts, dim=-2))


def by_positions(x: Tensor, axis: int, total: int, held: Slices, ranks: Ranks) -> Tensor:
    """The inverse: x (*batch, N, c) with a part of `axis` -> the rows of this rank with all `total` entries of it."""
    counts, lengths = Slices.even(total, ranks.size).lengths, held.lengths
    rest = _rest(x, axis)
    rows = held.by_rank(x).split(list(lengths), dim=-2)
    flat = torch.cat([part.movedim(axis, 0).reshape(-1) for part in rows])
    send = [counts[ranks.rank] * length * rest for length in lengths]
    receive = [count * lengths[ranks.rank] * rest for count in counts]
    got = exchange(flat, send, receive, ranks).split(receive)
    shape = list(x.movedim(axis, 0).shape)
    shape[_rows(axis, x.dim())] = lengths[ranks.rank]
    parts = []
    for part, count in zip(got, counts, strict=True):
        shape[0] = count
        parts.append(part.reshape(shape).movedim(0, axis))
    return torch.cat(parts, dim=axis)


def _rest(x: Tensor, axis: int) -> int:
    """Entries of x for one position and one entry of `axis`."""
    axes = [size for at, size in enumerate(x.shape) if at not in (x.dim() - 2, x.dim() + axis)]
    return torch.Size(axes).numel()


def _rows(axis: int, dims: int) -> int:
    """Where the axis of positions is after `movedim(axis, 0)`."""
    return dims - 2 if axis == -3 else dims - 1


def sequence_mask(call: Call) -> Tensor | None:
    """The key mask of the whole sequence (*batch, N), one byte for each key of another rank."""
    if call.key_mask is None:
        return None
    rows = call.key_mask.movedim(-1, 0).to(torch.uint8)
    flat = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    sent = flat.repeat(call.ranks.size, 1)
    got = exchange(sent, [len(flat)] * call.ranks.size, call.keys.lengths, call.ranks)
    return call.keys.in_sequence(got.reshape(-1, *rows.shape[1:]).movedim(0, -1).bool(), dim=-1)


def columns(operator: AttentionOperator, call: Call, v: Tensor) -> Tensor:
    """An operator that reads neither q nor k, applied to some columns of all rows: 2 d N (P-1)/P^2 scalars."""
    d = v.shape[-1]
    if d < call.ranks.size:
        raise UnsupportedError(
            f"sequence_parallel: {type(operator).__name__} is applied to columns of v that are dealt out to the ranks, "
            f"but there are d = {d} columns for {call.ranks.size} ranks; use fewer ranks or stack heads as columns"
        )
    out = operator(by_heads(v, -1, call.keys, call.ranks))
    return by_positions(out, -1, d, call.queries, call.ranks)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an operator, its parts included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
