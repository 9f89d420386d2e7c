"""The slow float64 twin of a window with a low-rank rest, written out entry by entry; imports nothing of headwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def window_low_rank(
    q: Tensor,
    k: Tensor,
    width: int,
    e: Tensor,
    f: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    tokens: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """P_ij = [exp(s q_i . k_j) where i sees j + sum_t exp(s q_i . (e k)_t + bias_t) f_tj] / Z_i, one row at a time.

    e and f are (*batch, r, n).  Missing keys are zero in every sum; a slot whose e or f has nothing but missing keys is
    left out.
    """
    q, k, e = q.double(), k.double(), e.double()
    f = e if f is None else f.double()
    m, n, r = q.shape[-2], k.shape[-2], e.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    slots = (e.unsqueeze(-1) * (k * there.unsqueeze(-1)).unsqueeze(-3)).sum(-2)  # (*batch, r, k)
    open_ = ((e != 0) & there.unsqueeze(-2)).any(-1) & ((f != 0) & there.unsqueeze(-2)).any(-1)
    offset = torch.zeros(r, dtype=torch.float64) if bias is None else bias.double()
    rows = []
    for i in range(m):
        at = i + n - m
        near = range(at - width // 2, at - width // 2 + width)
        allowed = torch.tensor([j in near or j < tokens or at < tokens for j in range(n)]) & there
        keys = (scale * (q[..., i, None, :] * k).sum(-1)).exp() * allowed
        far = (scale * (q[..., i, None, :] * slots).sum(-1) + offset).exp() * open_
        row = keys + (far.unsqueeze(-1) * f * there.unsqueeze(-2)).sum(-2)
        total = keys.sum(-1, keepdim=True) + far.sum(-1, keepdim=True)
        rows.append(row / total.masked_fill(total == 0, 1))
    return torch.stack(rows, dim=-2)
