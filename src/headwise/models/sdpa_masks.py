"""What a model's attention mask says, in O(n) where that is possible: which keys are real, and whether it is causal.

A mask of m x n that is neither is kept whole; exact heads can use it, no other can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import ShapeError


@final
@dataclass(frozen=True, eq=False)
class Seen:
    """`keep` (b, n) True at real keys, `causal` aligned to the bottom right; or `full`, which says all by itself."""

    keep: Tensor | None
    causal: bool
    full: Tensor | None = None


def read_mask(mask: Tensor | None, m: int, n: int, *, causal: bool) -> Seen:
    """A mask as models pass it: None, (b, n) for causal with padding, or one that broadcasts to (b, h, m, n).

    Boolean masks are True where a query may look; floating ones are added to the scores.  `causal` is what the model
    says beside the mask; it counts only where there is none, or a single query.
    """
    if mask is None:
        return Seen(None, causal)
    if mask.dim() == 2:
        if mask.shape[-1] != n:
            raise ShapeError(f"mask: has shape {tuple(mask.shape)}, but there are n = {n} keys")
        return Seen(_unless_all(mask.bool()), True)
    if mask.dim() != 4:
        raise ShapeError(f"mask: must be (b, n) or (b, h, m, n), but has shape {tuple(mask.shape)}")
    mask = mask[..., :n]  # models that cut their masks themselves make them as long as they may get
    keep = _silences(mask)
    if keep is None:
        return Seen(None, False, mask)
    if keep.shape[2] == 1:
        return Seen(_unless_all(keep[:, 0, 0]), causal and m == 1)
    if torch.compiler.is_compiling():
        return Seen(None, False, mask)
    last = keep[:, 0, -1]  # the last query sees every real key
    if bool((keep[:, 0] == last.unsqueeze(-2)).all()):
        return Seen(_unless_all(last), False)
    square = torch.ones(m, n, dtype=torch.bool, device=keep.device).tril(n - m)
    if m <= n and bool((keep[:, 0] == (last.unsqueeze(-2) & square)).all()):
        return Seen(_unless_all(last), True)
    return Seen(None, False, mask)


def _silences(mask: Tensor) -> Tensor | None:
    """A mask as a boolean one with one head, if it only silences; None if it weighs or differs from head to head."""
    keep = mask
    if mask.dtype != torch.bool:
        if torch.compiler.is_compiling():
            return None
        # masks hold the most negative number of their dtype as often as -inf
        keep = mask > torch.finfo(mask.dtype).min / 2
        if not bool(((mask == 0) | ~keep).all()):
            return None
    first = keep[:, :1]
    if keep.shape[1] == 1 or mask.stride(1) == 0:
        return first
    return None if torch.compiler.is_compiling() or not bool((keep == first).all()) else first


def _unless_all(keep: Tensor) -> Tensor | None:
    """None where every key is real; not looked at while a graph is traced."""
    return keep if torch.compiler.is_compiling() or not bool(keep.all()) else None


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Seen, float]:
    """The arguments of scaled_dot_product_attention: q, k, v as (b, h, ·, ·), what its mask says, and the scale."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    q, k, v = (as_four(x) for x in (query, key, value))
    m, n = q.shape[-2], k.shape[-2]
    if is_causal and m != n:  # torch counts from the top left, which is no decoder's causality
        return q, k, v, Seen(None, False, torch.ones(1, 1, m, n, dtype=torch.bool, device=q.device).tril()), scale
    mask = None if attn_mask is None else attn_mask.reshape(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape)
    return q, k, v, read_mask(mask, m, n, causal=is_causal), scale


def as_four(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x.reshape(*(1,) * (4 - x.dim()), *x.shape)
