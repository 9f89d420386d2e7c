"""P = softmax over the query's own block of l keys and the last c keys of every block.  O(n sqrt n) for l ~ sqrt n.

The fixed factorised pattern of the Sparse Transformer, Child et al. 2019 (arXiv:1904.10509): the last c positions of a
block summarise it for later ones.  `fixed` is the union of both index sets in one softmax; `fixed_steps` their
composition, P = P_summaries P_own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.operators._kernels.key_patterns import KeyPattern
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.sparse_blocks import BlockOperator, Piece, Union
from headwise.operators._kernels.tiles import Tiles
from headwise.operators.compose import Product, product
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.softmax import Softmax
from headwise.operators.sparse.strided import near_root
from headwise.operators.sparse.window import under_mask
from headwise.shapes import symbolic, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Fixed(BlockOperator):
    """Softmax over the own block and the summaries of the others; a last, shorter block has no summary of its own."""

    union: Union
    block: int
    summaries: int
    causal: bool


@supports(CAUSAL, KEY_MASK)
def fixed(
    q: Tensor,
    k: Tensor,
    block: int | None = None,
    summaries: int = 1,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Fixed | Softmax:
    """Query i attends to its own block and the last `summaries` keys of every other one; causal, those with j <= i.

    block    near sqrt(n) by default; any n, the last block may be shorter
    key_mask  boolean (*batch, n), True = attend.  With padding at the end, causal real rows equal the shorter
              sequence's; others too if the real length is a multiple of the block (else it lacks the last summary)
    """
    qk, block = _checked(q, k, block, summaries, scale, key_mask)
    if symbolic(qk.n):
        return under_mask(qk, causal, lambda i, j: (i // block == j // block) | (j % block >= block - summaries))
    pieces = partial(_pieces, qk.n, block, summaries, causal, q.device)
    pattern = KeyPattern(0, 0, block=block, every=block, last=summaries)
    return Fixed(Union.of(qk, pieces, pattern, causal), block, summaries, causal)


@supports(CAUSAL, KEY_MASK, one_length="its blocks are cut for one length")
def fixed_steps(
    q: Tensor,
    k: Tensor,
    block: int | None = None,
    summaries: int = 1,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Product:
    """P = P_summaries P_own: a block is gathered by its last positions, and these by the queries, each beside itself.

    A query attends to itself in the second step, so that what it gathered from its own block is kept.
    """
    qk, block = _checked(q, k, block, summaries, scale, key_mask)
    pieces = partial(_pieces_across, qk.n, block, summaries, causal, q.device)
    across = Union.of(qk, pieces, KeyPattern(0, 0, every=block, last=summaries), causal)
    own = Union.of(qk, partial(own_blocks, qk.n, block, causal), KeyPattern(0, 0, block=block), causal)
    return product(*(Fixed(union, block, summaries, causal) for union in (across, own)))


def _pieces(n: int, block: int, summaries: int, causal: bool, device: torch.device) -> list[Piece]:
    return own_blocks(n, block, causal) + summary_pieces(n, block, summaries, causal, device, first=False)


def _pieces_across(n: int, block: int, summaries: int, causal: bool, device: torch.device) -> list[Piece]:
    itself = Piece(Tiles(0, n, 1, 1), Tiles(0, n, 1, 1), first=True)
    return [itself, *summary_pieces(n, block, summaries, causal, device, first=False)]


def own_blocks(n: int, block: int, causal: bool) -> list[Piece]:
    """Every block of queries against the same block of keys."""
    whole, rest = n // block, n % block  # divmod does not know symbols
    tiles = [Tiles(0, whole, block, block)] if whole else []
    tiles += [Tiles(whole * block, 1, 0, rest)] if rest else []
    return [Piece(part, part, first=True, causal=causal) for part in tiles]


def summary_pieces(
    n: int, block: int, summaries: int, causal: bool, device: torch.device, *, first: bool, keys: int | None = None
) -> list[Piece]:
    """Queries against the summaries of other blocks (causal: of earlier ones), and to nothing where there is none.

    The queries at the same place of every block are one batch, so the mask is one entry a pair of blocks.
    Summaries are the last keys of a block, or, with `keys`, `summaries` in a row for each block from key `keys` on.
    """
    whole, rest = n // block, n % block  # divmod does not know symbols
    first_key, jump = (block - summaries, block) if keys is None else (keys, summaries)
    pieces = []
    for place, count, rows in ((0, rest, whole + 1), (rest, block - rest, whole)):
        # causal: the first block has no summary before it, and the last whole block may have no block after it
        skip = 1 if causal else 0
        visible = rows - 1 if causal else whole
        if not count or rows <= skip or visible < 1:
            continue
        queries, slots = torch.arange(skip, rows, device=device)[:, None], torch.arange(visible, device=device)
        mask = queries > slots if causal else queries != slots
        tiles = Tiles(place + skip * block, count, 1, rows - skip, block)
        columns = Tiles(first_key, visible, jump, summaries, shared=count)
        whole_mask = mask.repeat_interleave(summaries, dim=1)
        plain = causal and summaries == 1  # row t attends to columns <= t, the kernel's own causality
        pieces.append(Piece(tiles, columns, first, causal=plain, mask=None if plain else whole_mask))
    return pieces


def _checked(
    q: Tensor, k: Tensor, block: int | None, summaries: int, scale: float | None, key_mask: Tensor | None
) -> tuple[QueriesKeys, int]:
    qk = QueriesKeys.checked("Fixed", q, k, scale=scale, key_mask=key_mask)
    n = qk.require_square("Fixed", "window for new queries against a cache, or softmax")
    block = near_root(n) if block is None else block
    whole_numbers("Fixed", least=0, block=block, summaries=summaries)
    if not 1 <= block <= n:
        raise ShapeError(f"Fixed: block must be between 1 and n = {n}, but is {block}")
    if not 1 <= summaries <= block:
        raise ShapeError(f"Fixed: summaries must be between 1 and block = {block}, but is {summaries}")
    return qk, block
