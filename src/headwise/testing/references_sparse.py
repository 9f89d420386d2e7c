"""The slow float64 twins of the sparse and linear-cost operators: P written out entry by entry, from the definitions.

Like `references`, nothing here imports from headwise.  Every function returns P (*batch, m, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def softmax_over(
    q: Tensor,
    k: Tensor,
    allowed: Callable[[int, int], bool],
    *,
    padding: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax of scale q_i . k_j over the keys j that `allowed(i, j)` and `padding` (*batch, n) leave."""
    q, k = q.double(), k.double()
    m, n = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    seen = torch.tensor([[bool(allowed(i, j)) for j in range(n)] for i in range(m)])
    seen = seen if padding is None else seen & padding.unsqueeze(-2)
    s = scale * torch.einsum("...ic,...jc->...ij", q, k)
    s, seen = torch.broadcast_tensors(s, seen)
    s = s.masked_fill(~seen, 0.0)  # before exp: 0 * inf would poison the gradient
    top = torch.where(seen, s.detach(), -math.inf).amax(-1, keepdim=True)
    w = torch.where(seen, (s - top.masked_fill(top == -math.inf, 0.0)).exp(), 0.0)
    return w / w.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1.0)


def window(
    q: Tensor, k: Tensor, width: int, *, tokens: int = 0, causal: bool = False, padding: Tensor | None = None
) -> Tensor:
    """Query i, at position i + n - m, sees the `width` keys about it and the first `tokens`, which see every key."""
    m, n = q.shape[-2], k.shape[-2]

    def allowed(i: int, j: int) -> bool:
        i = i + n - m
        if causal:
            return j <= i and (i - j < width or j < tokens)
        return j in range(i - width // 2, i - width // 2 + width) or j < tokens or i < tokens

    return softmax_over(q, k, allowed, padding=padding)


def efficient(
    q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = False, padding: Tensor | None = None
) -> Tensor:
    """P_ij = sum_c softmax_c(scale q_i) exp(scale k_jc) / sum of exp(scale k_j'c) over the keys j' that i may see."""
    q, k = q.double(), k.double()
    m, n = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    features = (scale * q).exp() / (scale * q).exp().sum(-1, keepdim=True)
    rows = []
    for i in range(m):
        seen = torch.arange(n) <= i + n - m if causal else torch.ones(n, dtype=torch.bool)
        seen = (seen if padding is None else seen & padding).unsqueeze(-1)
        weights = (scale * k).exp() * seen
        weights = weights / weights.sum(-2, keepdim=True).masked_fill(~seen.any(-2, keepdim=True), 1.0)
        rows.append((features[..., i, None, :] * weights).sum(-1))
    return torch.stack(rows, dim=-2)
