"""E k and F v with missing keys left out: what `factored`, `projected` and their block forms attend to.

A causal form has blocks of positions, and every block leaves its slots to later ones (`block_slots`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.operators._kernels.prefix_sums import blocked, blocked_absence
from headwise.operators._kernels.queries_keys import Pair
from headwise.operators.claims import Claim
from headwise.operators.linear.projections import Dense, Projection
from headwise.shapes import same_axis


@final
@dataclass(frozen=True, eq=False)
class Shortened:
    """Keys (*batch, n, k) and values (*batch, n, d) as r slots each; `filled` (*batch, r) says which are not empty."""

    k: Tensor
    e: Projection
    f: Projection
    keep: Tensor | None

    @property
    def batch(self) -> torch.Size:
        return torch.broadcast_shapes(self.e.batch, self.f.batch)

    @property
    def filled(self) -> Tensor | None:
        return None if self.keep is None else self.e.support(self.keep) & self.f.support(self.keep)

    @property
    def claims(self) -> frozenset[Claim]:
        """What a row-stochastic attention to the slots promises after the projection of the values."""
        if not self.f.averages:
            return frozenset()
        filled = self.filled
        whole = filled is None or bool(filled.any(-1).all())
        return frozenset({Claim.NONNEGATIVE, Claim.STOCHASTIC} if whole else {Claim.NONNEGATIVE})

    def keys(self) -> Tensor:
        return self._short(self.e, self.k)

    def values(self, v: Tensor) -> Tensor:
        return self._short(self.f, v)

    def adjoint(self, u: Tensor) -> Tensor:
        """From gradients of the slots (*batch, r, d) to those of the values (*batch, n, d)."""
        compute = torch.promote_types(u.dtype, torch.float32)
        x = u.to(compute)
        counts = None if self.keep is None else self.f.counts(self.keep)
        x = x if counts is None else x / counts.to(compute).unsqueeze(-1)
        x = self.f.adjoint(x)
        return (x if self.keep is None else x.masked_fill(~self.keep.unsqueeze(-1), 0)).to(u.dtype)

    def multiply_adds(self, d: int, copies: int) -> int:
        """Of E k and F v, for a batch of `copies`."""
        return self._key_work() + self.f.multiply_adds(d * copies)

    def adjoint_multiply_adds(self, d: int, copies: int) -> int:
        """Of E k and F^T u."""
        return self._key_work() + self.f.adjoint_multiply_adds(d * copies)

    def _key_work(self) -> int:
        batch = torch.broadcast_shapes(self.k.shape[:-2], self.e.batch)
        return self.e.multiply_adds(self.k.shape[-1] * batch.numel())

    def _short(self, projection: Projection, x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)  # sums over n positions
        y = x.to(compute) if self.keep is None else x.to(compute).masked_fill(~self.keep.unsqueeze(-1), 0)
        y = projection.apply(y)
        counts = None if self.keep is None else projection.counts(self.keep)
        return (y if counts is None else y / counts.to(compute).unsqueeze(-1)).to(x.dtype)


def shortened(owner: str, both: Pair, e: Projection, f: Projection | None) -> Shortened:
    """e and f (e for both unless given) fit the n keys and one another."""
    f = e if f is None else f
    for name, projection in (("e", e), ("f", f)):
        if projection.length != both.n:
            raise UnsupportedError(
                f"{owner}: {name} was made for n = {projection.length} keys, but there are {both.n}; slice or "
                "interpolate a learned one (headwise.nn.builders do), or make another"
            )
    same_axis(owner, "r", e=e.slots, f=f.slots)
    return Shortened(both.k, e, f, both.keep)


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
