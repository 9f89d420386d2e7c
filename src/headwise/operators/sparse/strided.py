"""P = softmax over near keys and every l-th key: |i - j| <= l, or i - j a multiple of l.  O(n sqrt n) for l ~ sqrt n.

The strided factorised pattern of the Sparse Transformer, Child et al. 2019 (arXiv:1904.10509).  `strided` is the union
of both index sets in one softmax; `strided_steps` their composition, one step along each, P = P_columns P_local.
"""

from __future__ import annotations

import math
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
from headwise.operators.sparse.window import band, under_mask, window
from headwise.shapes import symbolic, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Strided(BlockOperator):
    """Softmax over a band and over the column of every stride-th position through the query.

    The columns are `stride` dense attentions of n / stride positions each, the band is that of a window; positions in
    both (i, i - l, i + l) count once.
    """

    union: Union
    stride: int
    causal: bool


@supports(CAUSAL, KEY_MASK)
def strided(
    q: Tensor,
    k: Tensor,
    stride: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Strided | Softmax:
    """Query i attends to keys j with |i - j| <= stride or (i - j) % stride = 0; causal, those with j <= i.

    stride   near sqrt(n) by default, where a query attends to O(sqrt n) keys; any n, the last block may be shorter
    key_mask  boolean (*batch, n), True = attend; with padding at the end, real rows equal the shorter sequence's
    """
    qk, stride = _checked(q, k, stride, scale, key_mask)
    if symbolic(qk.n):
        return under_mask(qk, causal, lambda i, j: ((i - j).abs() <= stride) | ((i - j) % stride == 0))
    pattern = KeyPattern(stride, 0 if causal else stride, stride=stride)
    return Strided(Union.of(qk, partial(_pieces, qk.n, stride, causal, q.device), pattern, causal), stride, causal)


@supports(CAUSAL, KEY_MASK, one_length="its blocks are cut for one length")
def strided_steps(
    q: Tensor,
    k: Tensor,
    stride: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Product:
    """P = P_columns P_local: from j to a position of i's column in one step, along the column to i in another."""
    qk, stride = _checked(q, k, stride, scale, key_mask)
    pattern = KeyPattern(-1, -1, stride=stride)  # the band is empty
    along = Strided(Union.of(qk, partial(columns, qk.n, stride, causal), pattern, causal), stride, causal)
    width = stride + 1 if causal else 2 * stride + 1
    return product(along, window(q, k, width, scale=scale, causal=causal, key_mask=key_mask))


def _pieces(n: int, stride: int, causal: bool, device: torch.device) -> list[Piece]:
    return [*columns(n, stride, causal), *_band(n, stride, causal, device)]


def columns(n: int, stride: int, causal: bool) -> list[Piece]:
    """Every stride-th position: columns that are one block longer than the others are a batch of their own."""
    rows, longer = n // stride, n % stride  # divmod does not know symbols
    pieces = []
    for first, count, length in ((0, longer, rows + 1), (longer, stride - longer, rows)):
        if count and length:
            tiles = Tiles(first, count, 1, length, stride)
            pieces.append(Piece(tiles, tiles, first=True, causal=causal))
    return pieces


def _band(n: int, stride: int, causal: bool, device: torch.device) -> list[Piece]:
    """0 < |i - j| < stride, for the columns have the rest of |i - j| <= stride."""
    if stride == 1:
        return []
    before, after = stride - 1, 0 if causal else stride - 1
    return band(n, n, before, after, start=0, bands=min(n, before), hidden=0, first=False, device=device)


def near_root(n: int) -> int:
    """A stride near sqrt(n), a multiple of 16 where possible: the kernel is faster with even blocks."""
    root = max(1, math.isqrt(n))
    return root if root < 16 else 16 * round(root / 16)


def _checked(
    q: Tensor, k: Tensor, stride: int | None, scale: float | None, key_mask: Tensor | None
) -> tuple[QueriesKeys, int]:
    qk = QueriesKeys.checked("Strided", q, k, scale=scale, key_mask=key_mask)
    n = qk.require_square("Strided", "window for new queries against a cache, or softmax")
    stride = near_root(n) if stride is None else stride
    whole_numbers("Strided", least=0, stride=stride)
    if not 1 <= stride <= n:
        raise ShapeError(f"Strided: stride must be between 1 and n = {n}, but is {stride}")
    return qk, stride
