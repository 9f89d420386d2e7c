"""What a causal form of a projection attends to: blocks of positions, and the slots that earlier ones leave behind."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.operators.pair import Pair
from headwise.operators.prefix import blocked, blocked_absence
from headwise.operators.projections import Dense, Projection
from headwise.operators.shortened import Shortened
from headwise.shapes import same_axis


def block_slots(owner: str, both: Pair, e: Projection, f: Projection | None) -> Shortened:
    """Every block of `e.length` positions shortened by e (keys) and f (values), the last one filled up with padding."""
    f = e if f is None else f
    block = same_axis(owner, "block", e=e.length, f=f.length)
    same_axis(owner, "r", e=e.slots, f=f.slots)
    keep = None
    if both.keep is not None or both.n % block:
        keep = ~blocked_absence(both.keep, both.n, block, both.k.device).squeeze(-1)
    return Shortened(blocked(both.k, block), _per_block(e), _per_block(f), keep)


def _per_block(projection: Projection) -> Projection:
    """A matrix for each head, (h, r, b), acts on every block of that head: (h, 1, r, b)."""
    if isinstance(projection, Dense) and projection.matrix.dim() > 2:
        return Dense(projection.matrix.unsqueeze(-3))
    return projection


def slot_absence(short: Shortened) -> Tensor:
    """Which slots (*batch, t, r, 1) are empty."""
    filled = short.filled
    if filled is None:
        return torch.zeros(short.k.shape[-3], short.e.slots, 1, dtype=torch.bool, device=short.k.device)
    return ~filled.unsqueeze(-1)
