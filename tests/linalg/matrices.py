"""Test matrices: softmax of random scores similar to real heads, and matrices that are hard for the algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attention(kind: str, sharpness: float, m: int, n: int, seed: int) -> Tensor:
    """softmax of scores with standard deviation `sharpness`, float64; `causal`, with an attention `sink`, or `plain`.

    `smooth` has a key width of 4, so that its spectrum falls fast.
    """
    g = torch.Generator().manual_seed(seed)
    k = 4 if kind == "smooth" else 32
    q, keys = (torch.randn(rows, k, generator=g, dtype=torch.float64) for rows in (m, n))
    scores = sharpness * q @ keys.mT / math.sqrt(k)
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(m, n).triu(1 + max(0, n - m)).bool(), -math.inf)
    if kind == "sink":
        scores[:, 0] += 8
    return torch.softmax(scores, -1)


def rotation(n: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q


def awkward(n: int) -> dict[str, Tensor]:
    """Zero, rank one, rank deficient, all values equal, one value more often than a block is wide, steep decay."""
    q = rotation(n)
    return {
        "zero": torch.zeros(n, n, dtype=torch.float64),
        "uniform": torch.full((n, n), 1 / n, dtype=torch.float64),
        "rank 5": q[:, :5] @ q[:5],
        "identity": torch.eye(n, dtype=torch.float64),
        "shift": torch.eye(n, dtype=torch.float64).roll(1, 0),
        "rotation": q,
        "projection on 30": q[:, :30] @ q[:, :30].mT,
        "steep": q * 0.5 ** torch.arange(n, dtype=torch.float64) @ rotation(n, 1),
        "tiny": q * 1e-20,
        "huge": q * 1e20,
    }


def maps(p: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """apply and adjoint of a dense matrix."""
    return (lambda v: p @ v), (lambda u: p.mT @ u)
