"""P_ij = exp(s q_i . k_j) / sum over |i - j| <= w: softmax inside a band, the cost of which is linear in n.

Local attention: Luong et al. 2015; Beltagy et al. 2020 (Longformer), with global tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators._kernels.key_patterns import KeyPattern
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.sparse_blocks import BlockOperator, Piece, Union
from headwise.operators._kernels.tiles import Tiles
from headwise.operators.mask_support import CAUSAL, KEY_MASK, PAIR_MASK, supports
from headwise.operators.softmax import Softmax, softmax
from headwise.shapes import symbolic, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Window(BlockOperator):
    """Softmax over `width` neighbouring keys and the first `leading`, which are global.

    Blocks of queries meet overlapping bands of keys; rows near either end meet what there is of a band.
    """

    union: Union
    width: int
    leading: int
    causal: bool


@supports(CAUSAL, KEY_MASK, instead={PAIR_MASK: "softmax with a pair_mask that includes the window"})
def window(
    q: Tensor,
    k: Tensor,
    width: int,
    *,
    leading: int = 0,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Window | Softmax:
    """Each query attends to `width` keys: itself, width // 2 before, the rest after; causal, itself and those before.

    leading   number of first positions that are global: every query attends to them, they to all (causal: earlier)
    key_mask  boolean (*batch, n), True = attend; with padding at the end, real rows equal the shorter sequence's

    The last query is at the last key (position i + n - m for query i), so one new query against a cache works.

    >>> window(torch.zeros(4, 2), torch.zeros(4, 2), 3).dense()
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000],
            [0.0000, 0.3333, 0.3333, 0.3333],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    qk = QueriesKeys.checked("Window", q, k, scale=scale, key_mask=key_mask)
    whole_numbers("Window", least=0, width=width, leading=leading)
    if width < 1:
        raise ShapeError(f"Window: width must be at least 1 (a query attends to itself), but is {width}")
    if not 0 <= leading <= qk.n:
        raise ShapeError(f"Window: leading must be between 0 and n = {qk.n}, but is {leading}")
    if qk.m > qk.n:
        raise UnsupportedError(
            f"Window: the last query sits at the last key, so m = {qk.m} queries need at least as many keys, "
            f"but n has {qk.n}; use softmax with a pair_mask"
        )
    pattern = window_pattern(width, leading, causal)
    if symbolic(qk.m, qk.n):
        return under_mask(qk, causal, partial(_in_window, pattern, causal))
    pieces = partial(window_pieces, qk.m, qk.n, pattern.left, pattern.right, leading, causal, q.device)
    return Window(Union.of(qk, pieces, pattern, causal), width, leading, causal)


def under_mask(qk: QueriesKeys, causal: bool, pairs: Callable[[Tensor, Tensor], Tensor]) -> Softmax:
    """Softmax under pairs(i, j) as a mask, m x n scores: for torch.export with a symbolic length, without tiles."""
    i, j = (torch.arange(size, device=qk.q.device) for size in (qk.m, qk.n))
    mask = pairs((i + (qk.n - qk.m)).unsqueeze(-1), j)
    return softmax(qk.q, qk.k, scale=qk.scale, causal=causal, key_mask=qk.key_mask, pair_mask=mask)


def _in_window(pattern: KeyPattern, causal: bool, i: Tensor, j: Tensor) -> Tensor:
    near = ((j >= i - pattern.left) & (j <= i + pattern.right)) | (j < pattern.leading)
    return near if causal else near | (i < pattern.leading)


def window_pattern(width: int, leading: int, causal: bool) -> KeyPattern:
    """The query itself, width // 2 keys before it and the rest after it; causal, all before it."""
    before = width - 1 if causal else width // 2
    return KeyPattern(before, width - 1 - before, leading)


def window_pieces(
    m: int, n: int, before: int, after: int, leading: int, causal: bool, device: torch.device
) -> tuple[Piece, ...]:
    """Every query against `before` keys before it, itself, `after` keys after it, and the first `leading`."""
    ahead = n - m
    global_queries = 0 if causal else max(0, leading - ahead)  # leading positions as queries: they attend to everything

    def everything(first: int, last: int, keys: int, fresh: bool) -> list[Piece]:
        if first >= last or not keys:
            return []
        return [Piece(Tiles(first - ahead, 1, 0, last - first), Tiles(0, 1, 0, keys), first=fresh)]

    # bands begin after the leading keys; before that, leading keys and neighbours are one masked block
    start = min(n, max(ahead + global_queries, leading + before))
    near = band(
        m, n, before, after, start=ahead + global_queries, bands=start, leading=leading, causal=causal, device=device
    )
    return *everything(ahead, ahead + global_queries, n, True), *near, *everything(start, n, leading, False)


def band(
    m: int,
    n: int,
    before: int,
    after: int,
    *,
    start: int,
    bands: int,
    device: torch.device,
    leading: int = 0,
    causal: bool = False,
    hidden: int | None = None,
    first: bool = True,
) -> list[Piece]:
    """Positions start..n against the `before` keys before and `after` keys after them, and themselves.

    From position `bands` on, blocks of queries meet overlapping bands of keys; before it the first `leading` keys are
    visible too.  The key `hidden` places before a query is left out; `first` is that of every piece.
    """
    ahead = n - m

    def visible(i: Tensor, j: Tensor) -> Tensor:
        near = (j >= i - before) & (j <= i + after)
        return near if hidden is None else near & (j != i - hidden)

    def edge(top: int, bottom: int, left: int, right: int, leading: int) -> list[Piece]:
        """Positions top..bottom against keys left..right, as one masked block."""
        if top >= bottom or left >= right:
            return []
        rows, columns = Tiles(top - ahead, 1, 0, bottom - top), Tiles(left, 1, 0, right - left)
        if hidden is None and left >= bottom - 1 - before and right - 1 <= top + after:  # every band holds every key
            return [Piece(rows, columns, first)]
        i, j = torch.arange(top, bottom, device=device)[:, None], torch.arange(left, right, device=device)
        mask = visible(i, j) | (j < leading)
        return [Piece(rows, columns, first, mask=mask & (j <= i) if causal else mask)]

    block = 64 if before + after < 512 else 128
    count = max(0, n - after - bands) // block
    stop = bands + count * block
    middle = []
    if count:
        i, j = torch.arange(block, device=device)[:, None], torch.arange(-before, block + after, device=device)
        columns = Tiles(bands - before, count, block, before + block + after)
        middle = [Piece(Tiles(bands - ahead, count, block, block), columns, first, mask=visible(i, j))]
    return [
        *edge(start, bands, 0, min(n, bands + after), leading),
        *middle,
        *edge(stop, n, max(leading, stop - before), n, 0),
    ]
