"""Softmax over a pattern of keys: each rank fetches the keys that its queries attend to, and no others.

    window of w keys     a halo: (w - 1) 2 d scalars in all, causal from one side only
    leading keys         2 l d for those that attend to them; as queries, not causal, l d and a reduction of l (d + 2)
    fixed, c summaries   2 d c N / block, and what is missing of a block that two ranks share

Positions between what was fetched are left out, and what remains is attended to as a shorter sequence of the same
pattern: distances inside a window do not change, and neither do whole blocks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.distributed.collectives import tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.ring_softmax import everywhere
from headwise.distributed.slices import empty_rows, fetch, fetch_mask
from headwise.operators._kernels.key_patterns import KeyPattern
from headwise.operators._kernels.queries_keys import QueriesKeys, repeat_heads
from headwise.operators._kernels.sparse_blocks import Piece, Union
from headwise.operators._kernels.tiles import Tiles
from headwise.operators.masks import Mask
from headwise.operators.sparse.fixed import Fixed, own_blocks, summary_pieces
from headwise.operators.sparse.window import Window, window_pieces
from headwise.shapes import filled


@local_rows.register
def _(operator: Window, call: Call, v: Tensor) -> Tensor:
    """A halo on both sides, (w - 1) 2 d scalars, causal on one; and the leading keys, 2 l d."""
    pattern, scale = pattern_of(operator.union), operator.union.scale
    ahead = call.keys.n - call.queries.n

    def wanted_by(start: int, stop: int) -> Tensor:
        """Positions start..stop and their neighbours, behind the leading keys."""
        left, right = max(0, start + ahead - pattern.left), min(call.keys.n, stop + ahead + pattern.right)
        near = torch.arange(left, right)
        return torch.cat([torch.arange(min(pattern.leading, left)), near]) if stop > start else near[:0]

    def wanted(rank: int) -> Tensor:
        return torch.cat([wanted_by(*segment) for segment in call.queries.segments(rank)])

    k, values = fetch([call.k, v], call.keys, wanted, call.ranks)
    mask = fetch_mask(call.key_mask, call.keys, wanted, call.ranks)
    segments = call.queries.segments(call.rank)
    counts = [len(wanted_by(*segment)) for segment in segments]
    out, offset = [], 0
    for q, (start, stop), count in zip(call.queries.split(call.q, call.rank), segments, counts, strict=True):
        if stop > start:
            part = slice(offset, offset + count)
            behind = min(call.keys.n, stop + ahead + pattern.right) - (stop + ahead)
            # the last query counts as one at the last key, so the window of each lies further back
            near = pattern._replace(
                left=pattern.left + behind, right=pattern.right - behind, leading=min(pattern.leading, count)
            )
            pieces = partial(window_pieces, stop - start, count, *near[:3], operator.causal, q.device)
            some = None if mask is None else mask[..., part]
            union = union_over(q, k[..., part, :], scale, some, pieces, near, operator.causal)
            out.append(union.apply(values[..., part, :]))
        offset += count
    joined = _joined(out, operator, v, k, values)
    if not operator.leading or operator.causal:
        return joined
    return _with_global_rows(joined, operator, call, v, ahead)


def _with_global_rows(out: Tensor, operator: Window, call: Call, v: Tensor, ahead: int) -> Tensor:
    """The first queries attend to all keys: every rank has them, and the sums over its keys are added up."""
    count = max(0, operator.leading - ahead)
    if not count:
        return out
    (q,) = fetch([call.q], call.queries, lambda _: torch.arange(count), call.ranks)
    k = call.hide(repeat_heads(call.k, call.q, "Window"))
    rows = everywhere(q, k, v, operator.union.scale, call.key_mask, call.ranks)
    start, stop = call.queries.segments(call.rank)[0]
    stop = min(stop, count)
    if start < stop:  # in front of the first segment of this rank
        out = torch.cat([rows[..., start:stop, :], out[..., stop - start :, :]], dim=-2)
    return tied(out, rows)


@local_rows.register
def _(operator: Fixed, call: Call, v: Tensor) -> Tensor:
    """Summaries of all other blocks (causal: of earlier ones), 2 d c N / block scalars, and parts of own blocks."""
    pattern, scale = pattern_of(operator.union), operator.union.scale
    n, block, summaries = call.keys.n, operator.block, operator.summaries
    if not call.square:
        raise NoExchange("Fixed: queries and keys are sliced differently")

    def near(start: int, stop: int) -> tuple[int, int]:
        return start // block * block, min(n, -(-stop // block) * block)

    def remote(start: int, stop: int) -> Tensor:
        """The summaries of whole blocks outside those of start..stop."""
        if not pattern.every:
            return torch.arange(0)
        left, right = near(start, stop)
        blocks = torch.arange(n // block)
        others = blocks < left // block
        if not operator.causal:
            others |= blocks >= -(-right // block)
        return (blocks[others, None] * block + torch.arange(block - summaries, block)).flatten()

    def wanted_by(start: int, stop: int) -> Tensor:
        return torch.cat([remote(start, stop), torch.arange(*near(start, stop))]) if stop > start else torch.arange(0)

    def wanted(rank: int) -> Tensor:
        return torch.cat([wanted_by(*segment) for segment in call.queries.segments(rank)])

    k, values = fetch([call.k, v], call.keys, wanted, call.ranks)
    mask = fetch_mask(call.key_mask, call.keys, wanted, call.ranks)
    segments = call.queries.segments(call.rank)
    out, offset = [], 0
    for q, (start, stop) in zip(call.queries.split(call.q, call.rank), segments, strict=True):
        if stop > start:
            (left, right), count = near(start, stop), len(wanted_by(start, stop))
            part = slice(offset, offset + count)
            offset += count
            queries = filled(q, (0, 0, start - left, right - stop))
            some = None if mask is None else mask[..., part]
            pieces = partial(_fixed_pieces, right - left, count, pattern, operator, q.device)
            behind = pattern._replace(leading=count - (right - left))
            union = union_over(queries, k[..., part, :], scale, some, pieces, behind, operator.causal)
            out.append(union.apply(values[..., part, :])[..., start - left : stop - left, :])
    return _joined(out, operator, v, k, values)


def _fixed_pieces(n: int, total: int, pattern: KeyPattern, operator: Fixed, device: torch.device) -> list[Piece]:
    """The last n of `total` positions in their blocks, and the positions before them, other summaries, for all."""
    leading = total - n
    pieces = (
        own_blocks(n, operator.block, operator.causal)
        if pattern.block
        else [Piece(Tiles(0, n, 1, 1), Tiles(0, n, 1, 1), first=True)]
    )
    if pattern.every:
        pieces += summary_pieces(n, operator.block, operator.summaries, operator.causal, device, first=False)
    pieces = [replace(piece, columns=replace(piece.columns, start=piece.columns.start + leading)) for piece in pieces]
    if leading:
        pieces.append(Piece(Tiles(0, 1, 0, n), Tiles(0, 1, 0, leading), first=False))
    return pieces


def pattern_of(union: Union) -> KeyPattern:
    assert union.pattern is not None
    return union.pattern


def union_over(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, pieces: partial, pattern: KeyPattern | None, causal: bool
) -> Union:
    """The operator of queries and fetched keys."""
    keys = repeat_heads(k, q, "Window")
    masks = Mask(q.shape[-2], keys.shape[-2], key_mask=mask)
    return Union.of(QueriesKeys(q, masks.hide(keys), scale, masks), pieces, pattern, causal)


def _joined(parts: list[Tensor], operator: Window | Fixed, v: Tensor, *fetched: Tensor) -> Tensor:
    """The rows of all segments, in the graph of what was fetched even where there are none."""
    if not parts:
        return empty_rows(v, torch.broadcast_shapes(operator.shape[:-2], v.shape[:-2]), v.shape[-1], *fetched)
    return tied(torch.cat(parts, dim=-2), *fetched)
