"""`hashed`: every rank computes an equal range of the sorted chunks of each round.

    hashes         of all positions, whole numbers, 2 rounds N (P-1)/P (shared queries and keys: half)
    queries        of its chunks, where they are held elsewhere, each once for all rounds:            k scalars
    keys, values   of its chunks and the one before, the same way:                                    k + d
    rows back      of each query, from every rank that has it in some round, with log-sum-exp:        d + 1

That is at most rounds N/P (2 k + 2 d + 1) + rounds chunk (k + d) scalars, and at most (P-1) N/P (2 k + 2 d + 1).  How
many rows are held elsewhere depends on the hashes: `traffic` counts them where it is given the orders.  All ranks sort
the hashes of all positions, so each knows what the others need; this work is not divided.
Orders differ from head to head, and so do the rows: the rows of all heads are one sequence of `Copies`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.distributed.collectives import exchange
from headwise.distributed.exchanges import Call, NoExchange, local_rows, sequence_mask
from headwise.distributed.slices import Slices, empty_rows, fetch
from headwise.operators._kernels import limits
from headwise.operators._kernels.hash_rounds import round_tensors
from headwise.operators._kernels.key_patterns import two_batch_axes
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators._kernels.rows_with_lse import blocks_with_lse, merged
from headwise.operators.sparse.hashed import Hashed, hashes


@final
@dataclass(frozen=True)
class Copies:
    """Rows of several sequences that are held alike, one sequence behind the other: row i of copy c is c n + i."""

    held: Slices
    copies: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.copies * length for length in self.held.lengths)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds each row, and the place at which it does."""
        owners, rows = self.held.locate(positions % self.held.n)
        return owners, positions // self.held.n * torch.tensor(self.held.lengths)[owners] + rows


@final
@dataclass(frozen=True, eq=False)
class SortedChunks:
    """Orders (copies, rounds, n) of queries and keys, whose chunks are dealt out to the ranks."""

    order_q: Tensor
    order_k: Tensor
    size: int
    ranks: int

    def chunks(self, rank: int) -> tuple[int, int]:
        """(first, last) of the query chunks of a rank, the same in all rounds."""
        ((first, last),) = Slices.even(-(-self.order_q.shape[-1] // self.size), self.ranks).segments(rank)
        return first, last

    def queries(self, rank: int) -> Tensor:
        """The rows of `Copies` in those chunks, each once."""
        first, last = self.chunks(rank)
        return self._rows(self.order_q[..., first * self.size : last * self.size])

    def keys(self, rank: int) -> Tensor:
        """The same of the keys, with the chunk before."""
        first, last = self.chunks(rank)
        first = max(0, first - 1) if first < last else last
        return self._rows(self.order_k[..., first * self.size : last * self.size])

    def _rows(self, order: Tensor) -> Tensor:
        return self.flat(order).unique().cpu()

    def flat(self, order: Tensor) -> Tensor:
        """Positions (copies, rounds, l) as rows of `Copies`."""
        copies, n = self.order_q.shape[0], self.order_q.shape[-1]
        return order + n * torch.arange(copies, device=order.device).reshape(-1, 1, 1)


@local_rows.register
def _(operator: Hashed, call: Call, v: Tensor) -> Tensor:
    """At most rounds N/P (2 k + 2 d + 1) scalars and rounds chunk (k + d), less what is held or met twice."""
    if not call.square:
        raise NoExchange("Hashed: queries and keys are sliced differently")
    batch = torch.broadcast_shapes(operator.shape[:-2], v.shape[:-2])
    k = call.q if operator.shared else call.hide(repeat_heads(call.k, call.q, "Hashed"))
    chunks, mask = _sorted_chunks(operator, call, k, batch), sequence_mask(call)
    mask = None if mask is None else two_batch_axes(mask, batch, trailing=1).flatten(0, 1)
    flat, ranks = Copies(call.keys, math.prod(batch)), range(call.ranks.size)
    met_q, met_k = ([rows(rank) for rank in ranks] for rows in (chunks.queries, chunks.keys))

    q, k, x = (y.expand(*batch, *y.shape[-2:]).flatten(0, -2) for y in (call.q, k, call.hide(v)))
    compute = torch.promote_types(v.dtype, torch.float32)
    keys, values = (y.to(compute) for y in fetch([k, x], flat, met_k.__getitem__, call.ranks))
    if operator.shared:  # the queries of a chunk are among its keys
        queries = keys.index_select(0, torch.searchsorted(met_k[call.rank], met_q[call.rank]).to(keys.device))
    else:
        queries = fetch([q], flat, met_q.__getitem__, call.ranks)[0].to(compute)
    if operator.shared and mask is not None:
        keys = torch.where(mask.flatten()[met_k[call.rank].to(mask.device)].unsqueeze(-1), keys, 0)
    places = _places(chunks, call.rank, met_q[call.rank], met_k[call.rank], mask, operator.qk.mask.causal)
    rows = _rows_of_chunks(places, queries, _normalised(operator, keys), values, operator.qk.scale)

    owners = flat.locate(met_q[call.rank])[0]
    send = torch.bincount(owners, minlength=call.ranks.size).tolist()
    given = rows.index_select(0, owners.argsort(stable=True).to(rows.device))
    located = [flat.locate(met) for met in met_q]
    returned = [place[owner == call.rank] for owner, place in located]
    got = exchange(given, send, [len(place) for place in returned], call.ranks)

    q, k, x = q.to(compute), _normalised(operator, k.to(compute)), x.to(compute)
    own = q.new_full(q.shape[:1], limits.SELF_SCORE) if operator.shared else operator.qk.scale * (q * k).sum(-1)
    if call.key_mask is not None:
        own = own.masked_fill(~two_batch_axes(call.key_mask, batch, trailing=1).flatten(), limits.HIDDEN)
    index = torch.cat([torch.arange(len(q)), *returned]).to(rows.device)
    out = merged(torch.cat([torch.cat([x, own.unsqueeze(-1)], dim=-1), got]), index, len(q))
    return out[:, :-1].reshape(*batch, call.q.shape[-2], v.shape[-1]).to(v.dtype)


def _sorted_chunks(operator: Hashed, call: Call, k: Tensor, batch: Sequence[int]) -> SortedChunks:
    """The order of all positions, from the hashes of all ranks."""
    with torch.no_grad():
        own = [
            hashes(x, operator.rotations, operator.shape[:-2], call.key_mask).mT.int()
            for x in ((k,) if operator.shared else (call.q, k))
        ]
    found = fetch(own, call.keys, lambda _: torch.arange(call.keys.n), call.ranks)
    orders = [two_batch_axes(x.mT.sort(dim=-1, stable=True).indices, batch).flatten(0, 1) for x in found]
    return SortedChunks(orders[0], orders[-1], operator.chunk, call.ranks.size)


def _normalised(operator: Hashed, k: Tensor) -> Tensor:
    return F.normalize(k, dim=-1) * math.sqrt(k.shape[-1]) if operator.shared else k


@final
@dataclass(frozen=True, eq=False)
class _Places:
    """Where the queries and keys of the chunks of one rank are among the rows that it has, for t chunks a round."""

    q: Tensor  # (copies, rounds, t size)
    k: Tensor  # (copies, rounds, size + t size)
    masks: Tensor  # (copies, rounds, t, size, 2 size)
    filled: int  # places of a round that hold a query; others, behind them, name any row


def _places(
    chunks: SortedChunks, rank: int, met_q: Tensor, met_k: Tensor, mask: Tensor | None, causal: bool
) -> _Places | None:
    (first, last), size, n = chunks.chunks(rank), chunks.size, chunks.order_q.shape[-1]
    if first == last:
        return None
    order_q, order_k, *_, masks = round_tensors(chunks.order_q, chunks.order_k, mask, size, causal, (first, last))
    at_q, at_k = (
        torch.searchsorted(met.to(order.device), chunks.flat(order).contiguous()).clamp(max=len(met) - 1)
        for met, order in ((met_q, order_q), (met_k, order_k))
    )
    return _Places(at_q, at_k, masks, min(n, last * size) - first * size)


def _rows_of_chunks(places: _Places | None, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """(P v, lse) of the queries of a rank over the keys that they meet in its chunks: (len(q), d + 1)."""
    if places is None:
        return empty_rows(v, (), v.shape[-1] + 1, q, k, v)
    size, found = places.masks.shape[-2], []
    for at_q, at_k, masks in zip(places.q.unbind(1), places.k.unbind(1), places.masks.unbind(1), strict=True):
        blocks = q[at_q].unflatten(1, (-1, size)).flatten(0, 1)
        keys, values = (x[at_k].unfold(1, 2 * size, size).mT.flatten(0, 1) for x in (k, v))
        rows = blocks_with_lse(blocks, keys, values, masks.flatten(0, 1), scale)
        found.append(rows.reshape(*at_q.shape, -1)[:, : places.filled])
    rows = torch.stack(found, dim=1)  # (copies, rounds, filled, d + 1)
    return merged(rows.flatten(0, 2), places.q[..., : places.filled].flatten(), len(q))
