"""q (*batch, m, k) and k (*batch, n, k) checked once, in the same words for every operator made of the two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators.masks import visibility
from headwise.operators.softmax import repeat_heads
from headwise.shapes import all_finite, broadcast_batch, no_empty_axis, same_axis, same_kind


@final
@dataclass(frozen=True, eq=False)
class Pair:
    """Checked queries and keys, the scale of their products, and which keys are real: `keep` (*batch, n) or None."""

    q: Tensor
    k: Tensor
    scale: float
    keep: Tensor | None

    @property
    def batch(self) -> torch.Size:
        return torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])

    @property
    def m(self) -> int:
        return self.q.shape[-2]

    @property
    def n(self) -> int:
        return self.k.shape[-2]


def pair(
    owner: str, q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None, widths: bool = True
) -> Pair:
    """Queries and keys of one width (unless `widths` is False), dtype and device; scale 1/sqrt(k) unless given.

    `key_mask` (*batch, n) is True at real keys; (b, n) against a batch (b, h) is shared by the heads.
    Grouped queries: k may have fewer heads (axis -3) than q if their number divides.
    """
    no_empty_axis(owner, q=q, k=k)
    if widths:
        same_axis(owner, "k", q=q.shape[-1], k=k.shape[-1])
    same_kind(owner, q=q, k=k)
    all_finite(owner, q=q, k=k)
    k = repeat_heads(k, q, owner)
    batch = broadcast_batch(owner, q=q.shape[:-2], k=k.shape[:-2])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ShapeError(f"{owner}: scale must be a positive number, but is {scale}")
    seen = visibility(owner, q.shape[-2], k.shape[-2], key_mask=key_mask, batch=batch, device=q.device)
    return Pair(q, k, scale, seen.key_mask)


def self_attention(owner: str, both: Pair, instead: str) -> int:
    """n, where there are as many queries as keys: the pattern speaks of positions that both have."""
    if both.m != both.n:
        raise UnsupportedError(
            f"{owner}: a pattern of positions needs as many queries as keys, but m has {both.m}, n has {both.n}; "
            f"use {instead}"
        )
    return both.n
