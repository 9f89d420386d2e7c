"""E k and F v without masked keys: the slots that `projected`, `factored` and their causal block forms attend to."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import InputError, UnsupportedError
from headwise.operators._kernels.prefix_sums import blocked, blocked_absence
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.linear.projections import Dense, Projection
from headwise.shapes import broadcast_batch, same_axis, shown


@final
@dataclass(frozen=True, eq=False)
class Shortened:
    """Keys (*batch, n, k) and values (*batch, n, d) as r slots each; `filled` (*batch, r) is False at empty slots."""

    k: Tensor
    e: Projection
    f: Projection
    key_mask: Tensor | None

    @property
    def batch(self) -> torch.Size:
        return torch.broadcast_shapes(self.e.batch, self.f.batch)

    @property
    def filled(self) -> Tensor | None:
        return None if self.key_mask is None else self.e.support(self.key_mask) & self.f.support(self.key_mask)

    @property
    def claims(self) -> frozenset[Claim]:
        """What follows for P from a row-stochastic attention to the slots."""
        if not self.f.averages:
            return frozenset()
        filled = self.filled
        whole = filled is None or bool(filled.any(-1).all())
        return weights_claim(stochastic=whole)

    def keys(self) -> Tensor:
        """E k"""
        return self._shorten(self.e, self.k)

    def values(self, v: Tensor) -> Tensor:
        """F v"""
        return self._shorten(self.f, v)

    def adjoint(self, u: Tensor) -> Tensor:
        """F^T u: (*batch, r, d) -> (*batch, n, d)"""
        compute = torch.promote_types(u.dtype, torch.float32)
        counts = None if self.key_mask is None else self.f.counts(self.key_mask)
        x = self.f.adjoint(u.to(compute) if counts is None else u.to(compute) / counts.to(compute).unsqueeze(-1))
        return (x if self.key_mask is None else x.masked_fill(~self.key_mask.unsqueeze(-1), 0)).to(u.dtype)

    def multiply_adds(self, d: int, copies: int, *, adjoint: bool = False) -> int:
        """Of E k and F v (or F^T u), for a batch of `copies`."""
        batch = torch.broadcast_shapes(self.k.shape[:-2], self.e.batch)
        values = self.f.adjoint_multiply_adds if adjoint else self.f.multiply_adds
        return self.e.multiply_adds(self.k.shape[-1] * batch.numel()) + values(d * copies)

    def _shorten(self, projection: Projection, x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)  # sums over n positions
        if self.key_mask is None:
            return projection.apply(x.to(compute)).to(x.dtype)
        y = projection.apply(x.to(compute).masked_fill(~self.key_mask.unsqueeze(-1), 0))
        counts = projection.counts(self.key_mask)
        return (y if counts is None else y / counts.to(compute).unsqueeze(-1)).to(x.dtype)


def shorten(owner: str, qk: QueriesKeys, e: Projection, f: Projection | None) -> Shortened:
    """The n keys shortened by e and f (f = e unless given), which must fit them and one another."""
    f = e if f is None else f
    _are_projections(owner, e=e, f=f)
    for name, projection in (("e", e), ("f", f)):
        if projection.length != qk.n:
            raise UnsupportedError(
                f"{owner}: {name} was made for n = {projection.length} keys, but there are {qk.n}; slice or "
                "interpolate a learned one (headwise.nn.builders do), or make another"
            )
    same_axis(owner, "r", e=e.slots, f=f.slots)
    return Shortened(qk.k, e, f, qk.key_mask)


def shorten_blocks(owner: str, qk: QueriesKeys, e: Projection, f: Projection | None) -> Shortened:
    """Every block of `e.length` positions shortened by e (keys) and f (values), the last one padded."""
    f = e if f is None else f
    _are_projections(owner, e=e, f=f)
    block = same_axis(owner, "block", e=e.length, f=f.length)
    same_axis(owner, "r", e=e.slots, f=f.slots)
    key_mask = None
    if qk.key_mask is not None or qk.n % block:
        key_mask = ~blocked_absence(qk.key_mask, qk.n, block, qk.k.device).squeeze(-1)
    return Shortened(blocked(qk.k, block), _per_block(e), _per_block(f), key_mask)


def _are_projections(owner: str, **given: object) -> None:
    for name, projection in given.items():
        if not isinstance(projection, Projection):
            raise InputError(
                f"{owner}: {name} must be a projection, such as dense(matrix) or pooling(n, size), but is "
                f"{shown(projection)}"
            )


def _per_block(projection: Projection) -> Projection:
    """A matrix for each head, (h, r, b), acts on every block of that head: (h, 1, r, b)."""
    if isinstance(projection, Dense) and projection.matrix.dim() > 2:
        return Dense(projection.matrix.unsqueeze(-3))
    return projection


class SlotOperator(AttentionOperator):
    """Queries that attend to slots; the batch axes are those of q, k and the projections."""

    qk: QueriesKeys
    short: Shortened

    @property
    def batch(self) -> torch.Size:
        return broadcast_batch(type(self).__name__, q_and_k=self.qk.batch, projections=self.short.batch)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.batch, self.qk.m, self.qk.n))

    @property
    def claims(self) -> frozenset[Claim]:
        return self.short.claims

    def cost(self, d: int) -> Cost:
        return self._cost(d, adjoint=False)

    def adjoint_cost(self, d: int) -> Cost:
        return self._cost(d, adjoint=True)

    @abstractmethod
    def _cost(self, d: int, *, adjoint: bool) -> Cost: ...

    def _expand(self, u: Tensor) -> Tensor:
        """u with the batch axes of P and its own."""
        batch = broadcast_batch(type(self).__name__, operator=self.batch, u=u.shape[:-2])
        return u.expand(*batch, *u.shape[-2:])


class BlockSlotOperator(SlotOperator):
    """Causal form: queries attend to the keys of their own block up to themselves and to slots of earlier blocks."""

    @property
    def batch(self) -> torch.Size:
        projections = self.short.batch[:-1]  # without the axis of blocks
        return broadcast_batch(type(self).__name__, q_and_k=self.qk.batch, projections=projections)

    @property
    def claims(self) -> frozenset[Claim]:
        """Entries are >= 0 and rows sum to one when those of F are and do, and every query attends to a key."""
        if not self.short.f.averages:
            return frozenset({Claim.CAUSAL})
        nonempty = self.qk.key_mask is None or bool(self.qk.key_mask[..., 0].all())
        return weights_claim(stochastic=nonempty, causal=True)

    @property
    def blocks(self) -> int:
        return self.short.k.shape[-3]
