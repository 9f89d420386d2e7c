"""The arguments of a scaled_dot_product_attention call as q, k, v with axes (b, h, ., .), a Mask and the scale."""

from __future__ import annotations

import math

from torch import Tensor

from headwise.operators.masks import Mask


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Mask, float]:
    """q, k, v as (b, h, ., .), with fewer heads of k and v for grouped queries, the mask, and the scale."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    q, k, v = (as_four(x) for x in (query, key, value))
    return q, k, v, Mask.from_sdpa(attn_mask, is_causal, q.shape[-2], k.shape[-2], device=q.device), scale


def as_four(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x.reshape(*(1,) * (4 - x.dim()), *x.shape)
