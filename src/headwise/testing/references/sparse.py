"""Twins of the sparse operators: P (*batch, m, n) written out entry by entry, from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.testing.references.exact import normalised


def softmax_over(
    q: Tensor,
    k: Tensor,
    allowed: Callable[[int, int], bool],
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax of scale q_i . k_j over the keys j with `allowed(i, j)` and `key_mask` (*batch, n)."""
    q, k = q.double(), k.double()
    visible = torch.tensor([[bool(allowed(i, j)) for j in range(k.shape[-2])] for i in range(q.shape[-2])])
    visible = visible if key_mask is None else visible & key_mask.unsqueeze(-2)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return normalised(scale * torch.einsum("...ic,...jc->...ij", q, k), visible)


def window(
    q: Tensor, k: Tensor, width: int, *, leading: int = 0, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Query i, at position i + n - m, attends to `width` keys about it and the first `leading`, which attend to all."""
    m, n = q.shape[-2], k.shape[-2]

    def allowed(i: int, j: int) -> bool:
        i = i + n - m
        if causal:
            return j <= i and (i - j < width or j < leading)
        return j in range(i - width // 2, i - width // 2 + width) or j < leading or i < leading

    return softmax_over(q, k, allowed, key_mask=key_mask)


def strided(q: Tensor, k: Tensor, stride: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """Query i attends to j with |i - j| <= stride or (i - j) % stride = 0."""

    def allowed(i: int, j: int) -> bool:
        return (abs(i - j) <= stride or (i - j) % stride == 0) and (not causal or j <= i)

    return softmax_over(q, k, allowed, key_mask=key_mask)


def strided_steps(q: Tensor, k: Tensor, stride: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """P_columns P_local"""
    along = softmax_over(q, k, lambda i, j: (i - j) % stride == 0 and (not causal or j <= i), key_mask=key_mask)
    local = softmax_over(q, k, lambda i, j: abs(i - j) <= stride and (not causal or j <= i), key_mask=key_mask)
    return along @ local


def fixed(
    q: Tensor, k: Tensor, block: int, summaries: int = 1, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Query i attends to its own block and the last `summaries` keys of every whole block."""

    def allowed(i: int, j: int) -> bool:
        whole = (j // block + 1) * block <= k.shape[-2]
        return (j // block == i // block or (whole and j % block >= block - summaries)) and (not causal or j <= i)

    return softmax_over(q, k, allowed, key_mask=key_mask)


def fixed_steps(
    q: Tensor, k: Tensor, block: int, summaries: int = 1, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """P_summaries P_own: a step over the own block, then one over itself and the summaries of other blocks."""
    own = softmax_over(q, k, lambda i, j: j // block == i // block and (not causal or j <= i), key_mask=key_mask)

    def across(i: int, j: int) -> bool:
        whole = (j // block + 1) * block <= k.shape[-2]
        other = whole and j // block != i // block and j % block >= block - summaries
        return j == i or (other and (not causal or j <= i))

    return softmax_over(q, k, across, key_mask=key_mask) @ own


def hashed(
    q: Tensor,
    k: Tensor | None,
    rotations: Tensor,
    *,
    chunk: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """One sequence after the other: sort by hash in every round, meet the own chunk and the one before, and itself."""
    shared, n = k is None, q.shape[-2]
    keys = q if k is None else k
    if key_mask is not None:
        key_mask = key_mask.expand(*q.shape[:-1])
    flat_q, flat_k = q.double().reshape(-1, *q.shape[-2:]), keys.double().reshape(-1, *q.shape[-2:])
    results = []
    for i in range(flat_q.shape[0]):
        visible = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask.reshape(-1, n)[i]
        met = torch.zeros(n, n, dtype=torch.bool)
        for rotation in rotations.double():
            ranks = []
            for x in (flat_q[i], flat_k[i]):
                # hashed in single precision, as a hash is: a tie that falls the other way is another hash
                turned = x.detach().float() @ rotation.float()
                hashes = torch.cat([turned, -turned], dim=-1).argmax(-1).tolist()
                hashes = [h if visible[j] else 10**9 for j, h in enumerate(hashes)]
                order = sorted(range(n), key=lambda j: (hashes[j], j))
                ranks.append({position: rank for rank, position in enumerate(order)})
            for a in range(n):
                for b in range(n):
                    if ranks[0][a] // chunk - ranks[1][b] // chunk in (0, 1):
                        met[a, b] = True
        met |= torch.eye(n, dtype=torch.bool)
        if causal:
            met &= torch.ones(n, n).tril().bool()
        met &= visible
        key = flat_k[i]
        if shared:
            key = key / key.norm(dim=-1, keepdim=True) * math.sqrt(key.shape[-1])
        s = flat_q[i] @ key.mT / math.sqrt(key.shape[-1])
        s = torch.where(torch.eye(n).bool(), torch.full_like(s, -1e5), s) if shared else s
        results.append(normalised(s, met))
    return torch.stack(results).reshape(*q.shape[:-1], n)
