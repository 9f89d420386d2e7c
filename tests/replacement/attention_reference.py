"""Attention by definition, for `test_replacing`: loops over sequences, float64, no import of headwise.

`Reference` stands in for torch.nn.functional.scaled_dot_product_attention while an unchanged model runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def window(q: Tensor, k: Tensor, visible: Tensor, causal: bool, *, width: int, leading: int = 0) -> Tensor:
    i, j = positions(visible)
    if causal:
        near = (j > i - width) | (j < leading)
    else:
        near = ((j >= i - width // 2) & (j < i - width // 2 + width)) | (j < leading) | (i < leading)
    return softmax_over(q, k, visible & near)


def strided(q: Tensor, k: Tensor, visible: Tensor, causal: bool, *, stride: int) -> Tensor:
    i, j = positions(visible)
    return softmax_over(q, k, visible & (((i - j).abs() <= stride) | ((i - j) % stride == 0)))


def fixed(q: Tensor, k: Tensor, visible: Tensor, causal: bool, *, block: int, summaries: int = 1) -> Tensor:
    i, j = positions(visible)
    return softmax_over(q, k, visible & ((i // block == j // block) | (j % block >= block - summaries)))


def efficient(q: Tensor, k: Tensor, visible: Tensor, causal: bool, *, sharpness: float, scale: float) -> Tensor:
    features = (q * sharpness).softmax(-1)
    raised = (k * (scale * sharpness)).exp()  # (h, n, width)
    sums = visible.to(q.dtype) @ raised  # (h, m, width)
    return torch.einsum("hmc,hnc->hmn", features / sums.clamp(min=1e-300), raised) * visible


def uniform(q: Tensor, k: Tensor, visible: Tensor, causal: bool) -> Tensor:
    seen = visible.to(q.dtype)
    return (seen / seen.sum(-1, keepdim=True).clamp(min=1)).expand(len(q), -1, -1)


def dot_product(q: Tensor, k: Tensor, visible: Tensor, causal: bool) -> Tensor:
    products = q @ k.mT * math.sqrt(q.shape[-1])
    return products * visible / visible.sum(-1, keepdim=True).clamp(min=1)


def softmax(q: Tensor, k: Tensor, visible: Tensor, causal: bool) -> Tensor:
    return softmax_over(q, k, visible)


def projected(q: Tensor, k: Tensor, visible: Tensor, causal: bool, *, rank: int, length: int) -> Tensor:
    """Slots are means of segments of `length` positions; those behind the last key count as zeros."""
    n = k.shape[-2]
    e = torch.zeros(rank, length, dtype=q.dtype)
    for j in range(length):
        e[j * rank // length, j] = 1.0
    e = (e / e.sum(-1, keepdim=True))[:, :n]
    used = (e != 0).any(-1)
    weights = (q @ (e @ k).mT).masked_fill(~used, -math.inf).softmax(-1)
    return weights @ e


def positions(visible: Tensor) -> tuple[Tensor, Tensor]:
    m, n = visible.shape
    return torch.arange(n - m, n)[:, None], torch.arange(n)


def softmax_over(q: Tensor, k: Tensor, pairs: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~pairs, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0)


class Reference:
    """scaled_dot_product_attention whose weights are those of `operator`, sequence by sequence without its padding."""

    def __init__(self, operator: Any, **options: Any) -> None:
        self.operator, self.options, self.calls = operator, options, 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.calls += 1
        (b, h, m, width), n = query.shape, key.shape[-2]
        groups = h // key.shape[1]
        visible = torch.ones(b, m, n, dtype=torch.bool)
        if is_causal:
            visible &= torch.ones(m, n, dtype=torch.bool).tril()
        if attn_mask is not None:
            allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e30
            allowed = allowed.reshape(*(1,) * (4 - allowed.dim()), *allowed.shape)
            visible &= allowed[:, 0].expand(b, m, n)
        out = query.new_zeros(b, h, m, value.shape[-1])
        for s in range(b):
            real = visible[s].any(0)  # keys that somebody attends to
            keys = real.nonzero()[:, 0]
            rows = keys if m == n else torch.arange(m)
            seen = visible[s][rows][:, keys]
            k, v = (x[s].repeat_interleave(groups, 0)[:, keys] for x in (key, value))
            causal = bool(len(keys) > 1 and not seen.triu(1 + len(keys) - len(rows)).any())
            factor = 1 / math.sqrt(width) if scale is None else scale
            q = query[s][:, rows] * factor
            more: dict[Any, dict[str, Any]] = {projected: {"length": n}, efficient: {"scale": factor}}
            options = {**self.options, **more.get(self.operator, {})}
            out[s][:, rows] = self.operator(q, k, seen, causal, **options) @ v
        return out
