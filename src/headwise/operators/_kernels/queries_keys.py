"""q (*batch, m, k), k (*batch, n, k) and their mask, checked once with the same messages for every operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.operators._kernels import limits
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import Mask
from headwise.shapes import broadcast_batch, no_empty_axis, products_fit, same_axis, same_kind, shown


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

        Grouped queries: k may have fewer heads (axis -3) than q if their number divides.  Keys that no query attends
        to are set to zero, whatever they hold.
        """
        no_empty_axis(owner, q=q, k=k)
        same_axis(owner, "k", q=q.shape[-1], k=k.shape[-1])
        same_kind(owner, q=q, k=k)
        k = repeat_heads(k, q, owner)
        batch = broadcast_batch(owner, q=q.shape[:-2], k=k.shape[:-2])
        scale = checked_scale(owner, q.shape[-1], scale, positive=positive_scale)
        mask = Mask.checked(owner, q.shape[-2], k.shape[-2], **masks, batch=batch, device=q.device).settled(owner)
        k = mask.hide(k)
        products_fit(owner, scale, cls._largest_score(q.dtype), q=q, k=k)
        return cls(q, k, scale, mask)

    @classmethod
    def _largest_score(cls, dtype: torch.dtype) -> float:
        return limits.LARGEST_SCORE

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


def checked_scale(owner: str, width: int, scale: float | None, *, positive: bool) -> float:
    """1/sqrt(width) unless given."""
    if scale is None:
        return 1 / math.sqrt(width)
    kind = "a positive number" if positive else "a finite number"
    one = not isinstance(scale, Tensor) or (scale.numel() == 1 and not scale.is_meta)
    if isinstance(scale, bool) or not hasattr(type(scale), "__float__") or not one:
        raise InputError(f"{owner}: scale must be {kind}, but is {shown(scale)}")
    if not abs(scale) < limits.LARGEST_SCORE or (positive and scale <= 0):
        raise ShapeError(f"{owner}: scale must be {kind}, but is {shown(scale)}")
    return float(scale)


def repeat_heads(k: Tensor, q: Tensor, owner: str) -> Tensor:
    """Grouped queries: each of k's heads repeated for the consecutive heads of q that use it."""
    if k.dim() < 3 or q.dim() < 3 or k.shape[-3] in (1, q.shape[-3]) or q.shape[-3] == 1:
        return k
    heads, groups = q.shape[-3], k.shape[-3]
    if heads % groups:
        raise ShapeError(f"{owner}: axis 'h' must divide, but q has {heads} heads and k has {groups}")
    return k.repeat_interleave(heads // groups, dim=-3)
