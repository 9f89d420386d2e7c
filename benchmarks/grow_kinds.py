"""Kinds of data on which ways of fitting scores differ: sum_b || W_b * (B_b - X_b Z X_b^T) ||^2, rank(Z) bounded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.grow_baselines import plain_truncation
from headwise.growth.metric import root
from headwise.growth.normal_equations import NormalMap, TokenSequence
from headwise.growth.solve import alternate, truncate, unconstrained
from headwise.operators.masks import Mask

F64 = torch.float64


def kinds(seed: int = 0) -> dict[str, tuple[list[TokenSequence], list[Tensor]]]:
    """Eight kinds of data, as sequences and their targets B; rank-3 truth plus noise of one per cent."""
    d, n = 12, 30
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    truth = randn(d, 3) @ randn(3, d)
    mixing = torch.linalg.qr(randn(d, d))[0]
    spread = torch.logspace(0, 2, d, dtype=F64)

    def sequence(x: Tensor, **mask: Any) -> tuple[TokenSequence, Tensor]:
        b = x @ truth @ x.mT
        return TokenSequence(x, x, Mask(n, n, **mask)), b + 0.01 * b.square().mean().sqrt() * randn(*b.shape)

    made = {
        "one sequence, ill-conditioned": [sequence(randn(n, d) * spread @ mixing)],
        "one sequence, correlated tokens": [sequence(randn(n, 4) @ randn(4, d) + 0.1 * randn(n, d))],
        "rank-deficient tokens": [sequence(randn(n, 8) * spread[:8] @ randn(8, d))],
        "many similar sequences": [sequence(randn(n, d) * spread.sqrt() @ mixing) for _ in range(8)],
        "sequences of different scale": [sequence(10 ** (i / 4 - 1) * randn(n, d) * spread.sqrt()) for i in range(8)],
        "sequences in different subspaces": [
            sequence(randn(n, 5) @ randn(5, d) + 0.05 * randn(n, d)) for _ in range(8)
        ],
        "causal": [sequence(randn(n, d) * spread.sqrt() @ mixing, causal=True) for _ in range(8)],
        "padded": [
            sequence(randn(n, d) * spread.sqrt() @ mixing, key_mask=torch.arange(n) < 12 + 2 * i) for i in range(8)
        ],
    }
    return {name: ([t for t, _ in data], [b for _, b in data]) for name, data in made.items()}


def compare(tokens: list[TokenSequence], targets: list[Tensor], rank: int) -> dict[str, float]:
    """Relative residuals over the unmasked scores: plain SVD truncation (Burgund), and each step of the refit."""

    def allowed(t: TokenSequence) -> Tensor:
        rows = t.allowed(0, len(t.queries))
        return torch.ones(len(t.queries), len(t.keys), dtype=torch.bool) if rows is None else rows

    def error(z: Tensor) -> float:
        pairs = list(zip(tokens, targets, strict=True))
        wrong = sum(float(((b - t.queries @ z @ t.keys.mT) * allowed(t)).square().sum()) for t, b in pairs)
        return math.sqrt(wrong / sum(float((b * allowed(t)).square().sum()) for t, b in pairs))

    normal = NormalMap(tokens, centred=False)
    pairs = zip(tokens, targets, strict=True)
    target = torch.stack([t.queries.mT @ (b * allowed(t)) @ t.keys for t, b in pairs]).sum(0)
    a, c = normal.means()
    plain = torch.linalg.pinv(a) @ (target / normal.count) @ torch.linalg.pinv(c)
    z, _ = unconstrained(normal, target)
    cut = truncate(z.unsqueeze(0), rank, root(a), root(c))
    swept = alternate(normal, target, cut)
    return {
        "plain": error(plain_truncation(plain.unsqueeze(0), rank).product()[0]),
        "metric": error(cut.product()[0]),
        "refit": error(swept.product()[0]),
        "free": error(z),
    }
