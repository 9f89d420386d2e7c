"""Operators from operators: product, sum, scale, transpose, Kronecker product, and one operator for each head.

A combination claims only what follows from the claims of its parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add as add_up
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import DtypeError, InputError, ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.shapes import broadcast_batch, same_axis, shown


@final
@dataclass(frozen=True, eq=False)
class Product(AttentionOperator):
    """P = P_1 P_2 ... P_c, applied from the right: attention after attention."""

    factors: tuple[AttentionOperator, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*_batch(self.factors), self.factors[0].shape[-2], self.factors[-1].shape[-1]))

    @property
    def claims(self) -> frozenset[Claim]:
        # causal: P_1 of m x l reaches j <= i + l - m, P_2 of l x n reaches j <= i + n - l: together j <= i + n - m
        return _shared(self.factors) & {Claim.STOCHASTIC, Claim.NONNEGATIVE, Claim.ORTHOGONAL, Claim.CAUSAL}

    def apply(self, v: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            v = factor.apply(v)
        return v

    def adjoint(self, u: Tensor) -> Tensor:
        for factor in self.factors:
            u = factor.adjoint(u)
        return u

    def cost(self, d: int) -> Cost:
        return reduce(add_up, [factor.cost(d).times(_copies(factor, self)) for factor in self.factors])

    def adjoint_cost(self, d: int) -> Cost:
        return reduce(add_up, [factor.adjoint_cost(d).times(_copies(factor, self)) for factor in self.factors])


@final
@dataclass(frozen=True, eq=False)
class Sum(AttentionOperator):
    """P = P_1 + P_2 + ... + P_c."""

    terms: tuple[AttentionOperator, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*_batch(self.terms), *self.terms[0].shape[-2:]))

    @property
    def claims(self) -> frozenset[Claim]:
        return _shared(self.terms) & {Claim.NONNEGATIVE, Claim.SYMMETRIC, Claim.CAUSAL}

    def apply(self, v: Tensor) -> Tensor:
        return reduce(add_up, [term.apply(v) for term in self.terms])

    def adjoint(self, u: Tensor) -> Tensor:
        return reduce(add_up, [term.adjoint(u) for term in self.terms])

    def cost(self, d: int) -> Cost:
        return reduce(Cost.beside, [term.cost(d).times(_copies(term, self)) for term in self.terms])

    def adjoint_cost(self, d: int) -> Cost:
        return reduce(Cost.beside, [term.adjoint_cost(d).times(_copies(term, self)) for term in self.terms])


@final
@dataclass(frozen=True, eq=False)
class Scaled(AttentionOperator):
    """diag(c) P: every row of P times a number, one for all or one a row (c broadcasts to (*batch, m))."""

    operator: AttentionOperator
    factor: Tensor

    @property
    def shape(self) -> torch.Size:
        *batch, m, n = self.operator.shape
        return torch.Size((*torch.broadcast_shapes(tuple(batch), self.factor.shape[:-1]), m, n))

    @property
    def claims(self) -> frozenset[Claim]:
        kept = {Claim.CAUSAL}
        if bool((self.factor >= 0).all()):
            kept.add(Claim.NONNEGATIVE)
        if self.factor.dim() == 0 or self.factor.shape[-1] == 1:
            kept.add(Claim.SYMMETRIC)
        if bool((self.factor == 1).all()):
            kept |= {Claim.STOCHASTIC, Claim.ORTHOGONAL}
        return self.operator.claims & kept

    def apply(self, v: Tensor) -> Tensor:
        return self.operator.apply(v) * self._column(v)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.operator.adjoint(u * self._column(u))

    def cost(self, d: int) -> Cost:
        return self.operator.cost(d).times(_copies(self.operator, self))

    def adjoint_cost(self, d: int) -> Cost:
        return self.operator.adjoint_cost(d).times(_copies(self.operator, self))

    def _column(self, x: Tensor) -> Tensor:
        factor = self.factor.to(x.dtype)
        return factor.unsqueeze(-1) if factor.dim() else factor


@final
@dataclass(frozen=True, eq=False)
class Transposed(AttentionOperator):
    """P^T"""

    operator: AttentionOperator

    @property
    def shape(self) -> torch.Size:
        *batch, m, n = self.operator.shape
        return torch.Size((*batch, n, m))

    @property
    def claims(self) -> frozenset[Claim]:
        kept = self.operator.claims & {Claim.NONNEGATIVE, Claim.SYMMETRIC}
        square = self.shape[-1] == self.shape[-2]
        return kept | (self.operator.claims & {Claim.ORTHOGONAL} if square else frozenset())

    def apply(self, v: Tensor) -> Tensor:
        return self.operator.adjoint(v)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.operator.apply(u)

    def cost(self, d: int) -> Cost:
        return self.operator.adjoint_cost(d)

    def adjoint_cost(self, d: int) -> Cost:
        return self.operator.cost(d)


@final
@dataclass(frozen=True, eq=False)
class Kronecker(AttentionOperator):
    """P = P_1 (x) P_2 (x) ... on a grid whose axes are attended one after the other, last axis fastest.

    (P_1 (x) P_2) vec(V) = vec(P_1 V P_2^T): O(N (g_1 + g_2)) where the dense product costs O(N^2).
    """

    factors: tuple[AttentionOperator, ...]

    @property
    def shape(self) -> torch.Size:
        rows = math.prod([factor.shape[-2] for factor in self.factors])
        columns = math.prod([factor.shape[-1] for factor in self.factors])
        return torch.Size((*_batch(self.factors), rows, columns))

    @property
    def claims(self) -> frozenset[Claim]:
        return _shared(self.factors) & {Claim.STOCHASTIC, Claim.NONNEGATIVE, Claim.SYMMETRIC, Claim.ORTHOGONAL}

    def apply(self, v: Tensor) -> Tensor:
        return self._axis_by_axis(v, [f.shape[-1] for f in self.factors], [f.apply for f in self.factors])

    def adjoint(self, u: Tensor) -> Tensor:
        return self._axis_by_axis(u, [f.shape[-2] for f in self.factors], [f.adjoint for f in self.factors])

    def _axis_by_axis(self, x: Tensor, sides: list[int], maps: list) -> Tensor:
        d = x.shape[-1]
        batch = torch.broadcast_shapes(self.shape[:-2], x.shape[:-2])
        x = x.expand(*batch, *x.shape[-2:]).unflatten(-2, sides)
        for axis, act in enumerate(maps, start=-1 - len(sides)):
            # the other grid axes become columns, so that the batch axes of the factor still line up
            x = x.movedim(axis, len(batch))
            rest = x.shape[len(batch) + 1 :]
            x = act(x.flatten(len(batch) + 1)).unflatten(-1, rest).movedim(len(batch), axis)
        return x.reshape(*batch, -1, d)

    def cost(self, d: int) -> Cost:
        return self._axis_costs(d, [(*f.shape[-2:], f.cost) for f in self.factors])

    def adjoint_cost(self, d: int) -> Cost:
        return self._axis_costs(d, [(*f.shape[:-3:-1], f.adjoint_cost) for f in self.factors])

    def _axis_costs(self, d: int, axes: list) -> Cost:
        """Axis by axis, (rows, columns, cost) each: axes done have their rows, those to come their columns."""
        done, to_come, costs = 1, math.prod([columns for _, columns, _ in axes]), []
        for factor, (rows, columns, cost) in zip(self.factors, axes, strict=True):
            to_come //= columns
            costs.append(cost(done * to_come * d).times(_copies(factor, self)))
            done *= rows
        return reduce(add_up, costs)


@final
@dataclass(frozen=True, eq=False)
class PerHead(AttentionOperator):
    """A different operator for each head: (*batch, h, m, n), head i by `heads[i]` of shape (*batch, m, n)."""

    heads: tuple[AttentionOperator, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*_batch(self.heads), len(self.heads), *self.heads[0].shape[-2:]))

    @property
    def claims(self) -> frozenset[Claim]:
        return _shared(self.heads)

    def apply(self, v: Tensor) -> Tensor:
        return self._head_by_head(v, [head.apply for head in self.heads])

    def adjoint(self, u: Tensor) -> Tensor:
        return self._head_by_head(u, [head.adjoint for head in self.heads])

    def _head_by_head(self, x: Tensor, maps: list) -> Tensor:
        batch = torch.broadcast_shapes(self.shape[:-2], x.shape[:-2])
        x = x.expand(*batch, *x.shape[-2:])
        maps = maps * x.shape[-3] if len(maps) == 1 else maps  # one head broadcasts as any axis of size one
        outs = [act(part) for act, part in zip(maps, x.unbind(-3), strict=True)]
        return torch.stack(torch.broadcast_tensors(*outs), dim=-3)

    def cost(self, d: int) -> Cost:
        return reduce(
            Cost.beside, [head.cost(d).times(_copies(head, self, heads=len(self.heads))) for head in self.heads]
        )

    def adjoint_cost(self, d: int) -> Cost:
        return reduce(
            Cost.beside, [head.adjoint_cost(d).times(_copies(head, self, heads=len(self.heads))) for head in self.heads]
        )


def product(*factors: AttentionOperator) -> Product:
    """P_1 P_2 ... P_c; the keys of each are the queries of the next."""
    _some("Product", factors)
    for left, right in itertools.pairwise(factors):
        same_axis("Product", "n", left_keys=left.shape[-1], right_queries=right.shape[-2])
    return Product(factors)


def add(*terms: AttentionOperator) -> Sum:
    """P_1 + P_2 + ... + P_c, all of one size."""
    _some("Sum", terms)
    _one_size("Sum", terms)
    return Sum(terms)


def scale(operator: AttentionOperator, factor: Tensor | float) -> Scaled:
    """c P for a number c, or diag(c) P for one number a row."""
    _some("Scaled", [operator])
    like = operator.like
    if not isinstance(factor, Tensor):
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not number or not abs(factor) <= torch.finfo(like.dtype).max:
            raise InputError(f"Scaled: factor must be a tensor or a finite number, but is {shown(factor)}")
    elif not factor.dtype.is_floating_point or factor.is_meta != like.is_meta:
        raise DtypeError(
            f"Scaled: factor must be floating point and on {like.device}, but is {factor.dtype} on {factor.device}"
        )
    factor = torch.as_tensor(factor, dtype=like.dtype, device=like.device)
    if factor.dim():
        *batch, m, _ = operator.shape
        same_axis("Scaled", "m", operator=m, factor=m if factor.shape[-1] == 1 else factor.shape[-1])
        broadcast_batch("Scaled", operator=batch, factor=factor.shape[:-1])
    return Scaled(operator, factor)


def transpose(operator: AttentionOperator) -> AttentionOperator:
    """P^T; twice gives the operator itself back."""
    _some("Transposed", [operator])
    return operator.operator if isinstance(operator, Transposed) else Transposed(operator)


def kronecker(*factors: AttentionOperator) -> Kronecker:
    """P_1 (x) P_2 (x) ...: attention that acts on each axis of a grid by itself."""
    _some("Kronecker", factors)
    return Kronecker(factors)


def per_head(heads: Sequence[AttentionOperator]) -> PerHead:
    """One operator a head, in order; each (*batch, m, n)."""
    _some("PerHead", heads)
    _one_size("PerHead", heads)
    return PerHead(tuple(heads))


def _some(owner: str, parts: Sequence[AttentionOperator]) -> None:
    if not isinstance(parts, Sequence) or any(not isinstance(part, AttentionOperator) for part in parts):
        given = ", ".join(map(shown, parts)) if isinstance(parts, (list, tuple)) else shown(parts)
        raise InputError(f"{owner}: needs attention operators, but got {given}")
    if not parts:
        raise ShapeError(f"{owner}: needs at least one operator, got none")
    broadcast_batch(owner, **{f"operator {i}": part.shape[:-2] for i, part in enumerate(parts)})


def _one_size(owner: str, parts: Sequence[AttentionOperator]) -> None:
    for axis, where in (("m", -2), ("n", -1)):
        same_axis(owner, axis, **{f"operator {i}": part.shape[where] for i, part in enumerate(parts)})


def _batch(parts: Sequence[AttentionOperator]) -> torch.Size:
    return torch.broadcast_shapes(*(part.shape[:-2] for part in parts))


def _shared(parts: Sequence[AttentionOperator]) -> frozenset[Claim]:
    return frozenset.intersection(*(part.claims for part in parts))


def _copies(part: AttentionOperator, whole: AttentionOperator, heads: int = 1) -> int:
    """How often a part of smaller batch runs inside the whole."""
    return math.prod(whole.shape[:-2]) // (heads * math.prod(part.shape[:-2]))
