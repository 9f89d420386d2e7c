"""The slow float64 twin of near keys with far features, written out entry by entry; imports nothing of headwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def near_far(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    block: int,
    first: int = 0,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """P_ij = exp(s q_i . k_j) / Z_i near, sum_t exp(s q_i . a_t + c_t + s b_t . k_j) / Z_i far, one row at a time."""
    q, k, a, b, c = (x.double() for x in (q, k, a, b, c))
    n = q.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    key_features = (scale * (b.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)).exp()  # (*batch, r, n)
    rows = []
    for i in range(n):
        visible = torch.tensor([j <= i or not causal for j in range(n)]) & there
        own = (i - first) // block
        near = [i < first or j < first or abs(own - (j - first) // block) <= 1 for j in range(n)]
        exact = (scale * (q[..., i, None, :] * k).sum(-1)).exp()
        query_features = (scale * (q[..., i, None, :] * a).sum(-1) + c).exp()  # (*batch, r)
        through = (query_features.unsqueeze(-1) * key_features).sum(-2)
        row = torch.where(torch.tensor(near), exact, through) * visible
        total = row.sum(-1, keepdim=True)
        rows.append(row / total.masked_fill(total == 0, 1))
    return torch.stack(rows, dim=-2)
