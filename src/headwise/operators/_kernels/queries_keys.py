"""q (*batch, m, k), k (*batch, n, k) and their mask, checked once with the same messages for every operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import Mask
from headwise.shapes import all_finite, broadcast_batch, no_empty_axis, same_axis, same_kind


@dataclass(frozen=True, eq=False)
class QueriesKeys:
    """Checked queries and keys, the scale of their products, and the mask."""

    q: Tensor
    k: Tensor
    scale: float
    mask: Mask

    @classmethod
    def checked(
        cls,
        owner: str,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        positive_scale: bool = True,
        **masks: Any,
    ) -> Self:
        """Queries and keys of one width, dtype and device; scale 1/sqrt(k) unless given; masks as in Mask.checked.

        Grouped queries: k may have fewer heads (axis -3) than q if their number divides.
        """
        no_empty_axis(owner, q=q, k=k)
        same_axis(owner, "k", q=q.shape[-1], k=k.shape[-1])
        same_kind(owner, q=q, k=k)
        all_finite(owner, q=q, k=k)
        k = repeat_heads(k, q, owner)
        batch = broadcast_batch(owner, q=q.shape[:-2], k=k.shape[:-2])
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        if not math.isfinite(scale) or (positive_scale and scale <= 0):
            kind = "a positive number" if positive_scale else "finite"
            raise ShapeError(f"{owner}: scale must be {kind}, but is {scale}")
        mask = Mask.checked(owner, q.shape[-2], k.shape[-2], **masks, batch=batch, device=q.device)
        return cls(q, k, scale, mask)

    @property
    def batch(self) -> torch.Size:
        return torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])

    @property
    def m(self) -> int:
        return self.q.shape[-2]

    @property
    def n(self) -> int:
        return self.k.shape[-2]

    @property
    def shape(self) -> torch.Size:
        """(*batch, m, n)"""
        return torch.Size((*self.batch, self.m, self.n))

    @property
    def key_mask(self) -> Tensor | None:
        return self.mask.key_mask

    def require_square(self, owner: str, instead: str) -> int:
        """n, if there are as many queries as keys: patterns of positions need positions that both have."""
        if self.m != self.n:
            raise UnsupportedError(
                f"{owner}: a pattern of positions needs as many queries as keys, but m has {self.m}, n has {self.n}; "
                f"use {instead}"
            )
        return self.n


class QueryKeyOperator(AttentionOperator):
    """An operator made of `qk`, whose shape it has."""

    qk: QueriesKeys

    @property
    def shape(self) -> torch.Size:
        return self.qk.shape


def repeat_heads(k: Tensor, q: Tensor, owner: str) -> Tensor:
    """Grouped queries: each of k's heads repeated for the consecutive heads of q that use it."""
    if k.dim() < 3 or q.dim() < 3 or k.shape[-3] in (1, q.shape[-3]) or q.shape[-3] == 1:
        return k
    heads, groups = q.shape[-3], k.shape[-3]
    if heads % groups:
        raise ShapeError(f"{owner}: axis 'h' must divide, but q has {heads} heads and k has {groups}")
    return k.repeat_interleave(heads // groups, dim=-3)
