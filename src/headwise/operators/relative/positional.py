"""P = P_1 (x) P_2 (x) ..., P_a = softmax over axis a of s_a(q, k): attention by position on a grid.

If scores are a sum over the axes of the grid, s(q, k) = s_1(q_1, k_1) + s_2(q_2, k_2) + ..., their exponential is a
product, and so is its sum over a rectangle of keys.  The softmax over all keys is then the Kronecker product of one
small softmax per axis, borders and normalisation included: O(N (g_1 + g_2)) where the dense P costs O(N^2).

A key mask breaks the product but not the chain rule P(k_1, k_2 | q) = P(k_1 | q_1, q_2) P(k_2 | k_1, q_2), which has
the same cost.  It is computed in logarithms: for a query whose only visible key is far away, numerator and denominator
would both underflow to zero.

Causal in row-major order, a key comes before the query if its first coordinate that differs is smaller.  The axis a of
that coordinate splits the sum into D parts, each of them a chain again: k_b = q_b on earlier axes, k_a < q_a (on the
last axis k_a <= q_a), and any k_b on later ones.  With Z_a(q) their sums,

    P v = sum_a (Z_a / sum_b Z_b) P_a v,     P_a(k | q) = [k_b = q_b, b < a] P(k_a | k_a < q_a, ...) P(k_(a+1) | ...) ..

The products along later axes are those of the full P, so all parts together cost twice as much as the full P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.masks import Mask
from headwise.shapes import all_finite, broadcast_batch, no_empty_axis, same_kind, shown


@final
@dataclass(frozen=True, eq=False)
class Positional(AttentionOperator):
    """P_qk = prod_a exp(s_a(q_a, k_a)) / sum over the visible k; cells are numbered in row-major order."""

    scores: tuple[Tensor, ...]  # axis a: (*batch, q_a, g_a), in float32 at least
    key_mask: Tensor | None  # (*batch, *grid), True = attend
    dtype: torch.dtype
    causal: bool = False  # query q attends to cells up to q; queries and keys share one grid

    @property
    def shape(self) -> torch.Size:
        sides = [s.shape[-2:] for s in self.scores]
        return torch.Size((*self._batch(), math.prod([q for q, _ in sides]), math.prod([g for _, g in sides])))

    @property
    def like(self) -> Tensor:
        return self.scores[0].new_ones(1, dtype=self.dtype)

    @property
    def claims(self) -> frozenset[Claim]:
        if self.key_mask is None:
            return weights_claim(stochastic=True, causal=self.causal)
        keys = self.key_mask.flatten(-len(self.scores))
        # the first query has only the first key
        some = keys[..., 0] if self.causal else keys.any(-1)
        return weights_claim(stochastic=bool(some.all()), causal=self.causal)

    def factors(self) -> tuple[Tensor, ...]:
        """The factors P_a (*batch, q_a, g_a); P is their Kronecker product if no key is masked and P is not causal."""
        return tuple(torch.softmax(s, dim=-1) for s in self.scores)

    def apply(self, v: Tensor) -> Tensor:
        if self.key_mask is not None:
            v = v.masked_fill(~self.key_mask.flatten(-len(self.scores)).unsqueeze(-1), 0)
        if self.causal:
            return self._causal_apply(v)
        return self._axis_by_axis(v, [s.shape[-1] for s in self.scores], adjoint=False)

    def adjoint(self, u: Tensor) -> Tensor:
        if self.causal:
            return self._causal_adjoint(u)
        return self._axis_by_axis(u, [s.shape[-2] for s in self.scores], adjoint=True)

    def cost(self, d: int) -> Cost:
        """N g_a multiply-adds per column along axis a, last axis first; with a mask each row of cells has its P_a.

        Causal: a second product along every axis but the first.
        """
        copies, total, widest = math.prod(self._batch()), 0, 0
        for axis, s in enumerate(self.scores):
            keys = math.prod([t.shape[-1] for t in self.scores[:axis]])
            queries = math.prod([t.shape[-2] for t in self.scores[axis + 1 :]])
            total += keys * queries * s.shape[-2] * s.shape[-1] * (2 if self.causal and axis else 1)
            widest = max(widest, keys * max(s.shape[-2:]) * queries * d)
            if self.key_mask is not None or self.causal:
                widest = max(widest, keys * queries * s.shape[-2] * s.shape[-1])
        return Cost(copies * total * d, copies * widest, len(self.scores))

    def _batch(self) -> torch.Size:
        batches = [s.shape[:-2] for s in self.scores]
        if self.key_mask is not None:
            batches.append(self.key_mask.shape[: -len(self.scores)])
        return torch.broadcast_shapes(*batches)

    def _axis_by_axis(self, x: Tensor, sides: list[int], *, adjoint: bool) -> Tensor:
        batch = torch.broadcast_shapes(self._batch(), x.shape[:-2])
        d, axes = x.shape[-1], range(len(sides))
        x = x.expand(*batch, *x.shape[-2:]).unflatten(-2, sides)
        plain = self.key_mask is None
        weights = self.factors() if plain else self._conditionals()
        for axis in axes if adjoint else reversed(axes):
            w = weights[axis].to(self.dtype)
            w = w.mT if adjoint else w
            at = len(batch) + axis
            if plain:
                # the other axes become columns: one product of a large matrix
                x = x.movedim(at, len(batch))
                rest = x.shape[len(batch) + 1 :]
                x = (w @ x.flatten(len(batch) + 1)).unflatten(-1, rest).movedim(len(batch), at)
            else:
                x = (w @ x.movedim(at, -2)).movedim(-2, at)
        return x.reshape(*batch, -1, d)

    def _conditionals(self) -> list[Tensor]:
        """P(k_a | k_1 .. k_(a-1), q_a .. q_D) for every axis a: (*batch, k_<a, q_>a, q_a, k_a)."""
        return [_softmax(s, visible) for s, visible in self._conditional_scores()]

    def _conditional_scores(self) -> list[tuple[Tensor, Tensor]]:
        """log of what the conditionals are proportional to, and True where there are visible keys, for every axis."""
        grid = [s.shape[-1] for s in self.scores]
        visible = (
            torch.ones(grid, dtype=torch.bool, device=self.like.device) if self.key_mask is None else self.key_mask
        )
        count, log_mass = len(self.scores), self.scores[0].new_zeros(visible.shape)  # (*batch, k_<=a, q_>a)
        found: list[tuple[Tensor, Tensor]] = []
        for axis in reversed(range(count)):
            at = axis - count  # of k_a, from the end
            visible, log_mass = visible.movedim(at, -1).unsqueeze(-2), log_mass.movedim(at, -1).unsqueeze(-2)
            s = self.scores[axis]
            s = s.reshape(*s.shape[:-2], *(1,) * (count - 1), *s.shape[-2:]) + log_mass
            found.insert(0, (s, visible))
            log_mass = _log_sum(s, visible).movedim(-1, at)
            visible = visible.any(-1).expand(*visible.shape[:-2], s.shape[-2]).movedim(-1, at)
        return found

    def _causal_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """P(k_a | k_a < q_a, ..), (*batch, q_<a, q_>a, q_a, k_a), and Z_a / sum_b Z_b, (*batch, n, 1), by axis.

        They come from the conditional scores at k_<a = q_<a, as queries and keys share one grid.
        """
        count, parts, masses, before = len(self.scores), [], [], self.scores[0].new_zeros(())
        batch = self._batch()
        for axis, (s, visible) in enumerate(self._conditional_scores()):
            g = s.shape[-1]
            earlier = torch.ones(g, g, dtype=torch.bool, device=s.device).tril(0 if axis == count - 1 else -1)
            visible = visible & earlier
            parts.append(_softmax(s, visible))
            mass = _log_sum(s, visible).masked_fill(~visible.any(-1), -math.inf).movedim(-1, axis - count)
            masses.append((mass + before).expand(*batch, *self._sides()).flatten(-count))
            itself = self.scores[axis].diagonal(dim1=-2, dim2=-1)
            before = before + itself.reshape(*itself.shape[:-1], *(1,) * axis, g, *(1,) * (count - 1 - axis))
        mass = torch.stack(masses, dim=-1)
        shares = _softmax(mass.masked_fill(mass == -math.inf, 0), mass > -math.inf)
        return parts, list(shares.unsqueeze(-2).unbind(-1))

    def _sides(self) -> list[int]:
        return [s.shape[-1] for s in self.scores]

    def _causal_apply(self, v: Tensor) -> Tensor:
        batch, d = torch.broadcast_shapes(self._batch(), v.shape[:-2]), v.shape[-1]
        weights, (parts, shares) = self._conditionals(), self._causal_parts()
        x, out = v.expand(*batch, *v.shape[-2:]).unflatten(-2, self._sides()), v.new_zeros(())
        for axis in reversed(range(len(self.scores))):
            at = len(batch) + axis
            part = (parts[axis].to(self.dtype) @ x.movedim(at, -2)).movedim(-2, at)
            out = out + shares[axis].to(self.dtype) * part.reshape(*batch, -1, d)
            if axis:
                x = (weights[axis].to(self.dtype) @ x.movedim(at, -2)).movedim(-2, at)
        return out

    def _causal_adjoint(self, u: Tensor) -> Tensor:
        batch, d = torch.broadcast_shapes(self._batch(), u.shape[:-2]), u.shape[-1]
        weights, (parts, shares) = self._conditionals(), self._causal_parts()
        x = u.new_zeros(())
        for axis in range(len(self.scores)):
            at = len(batch) + axis
            if axis:
                x = (weights[axis].mT.to(self.dtype) @ x.movedim(at, -2)).movedim(-2, at)
            share = (shares[axis].to(self.dtype) * u).expand(*batch, *u.shape[-2:]).unflatten(-2, self._sides())
            x = x + (parts[axis].mT.to(self.dtype) @ share.movedim(at, -2)).movedim(-2, at)
        return x.reshape(*batch, -1, d)


def _softmax(s: Tensor, visible: Tensor) -> Tensor:
    """softmax over the visible entries of the last axis; zero where there are none."""
    none = ~visible.any(-1, keepdim=True)
    # rows without keys get finite scores first: softmax over only -inf has a NaN gradient
    return torch.softmax(torch.where(none, 0.0, torch.where(visible, s, -math.inf)), dim=-1).masked_fill(none, 0.0)


def _log_sum(s: Tensor, visible: Tensor) -> Tensor:
    """log of the sum of exp over the visible entries of the last axis; finite where there are none."""
    none = ~visible.any(-1, keepdim=True)
    return torch.logsumexp(torch.where(none, 0.0, torch.where(visible, s, -math.inf)), dim=-1)


@supports(CAUSAL, KEY_MASK, instead="softmax with the scores as attn_bias")
def positional(
    scores: Sequence[Tensor],
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Positional:
    """P from one score matrix (*batch, q_a, g_a) per axis; `key_mask` (*batch, n), True = attend.

    causal  a query attends to itself and to cells before it in row-major order; queries and keys share one grid

    `dtype` is that of the values, by default that of the scores; the softmax runs in at least float32.

    >>> rows, columns = torch.zeros(2, 2), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]).clamp(min=-1e9)
    >>> positional([rows, columns]).dense()[0]
    tensor([0.5000, 0.0000, 0.5000, 0.0000])
    """
    if isinstance(scores, (str, bytes, Tensor)) or not isinstance(scores, Sequence):
        raise InputError(f"Positional: scores must be a sequence of one tensor for each axis, but is {shown(scores)}")
    if not scores:
        raise ShapeError("Positional: needs the scores of at least one axis, got none")
    named = {f"scores of axis {axis}": s for axis, s in enumerate(scores)}
    no_empty_axis("Positional", **named)
    same_kind("Positional", **named)
    all_finite("Positional", **named)
    batch = broadcast_batch("Positional", **{name: s.shape[:-2] for name, s in named.items()})
    grid = [s.shape[-1] for s in scores]
    queries = [s.shape[-2] for s in scores]
    if causal and grid != queries:
        raise UnsupportedError(
            f"Positional: causal needs queries and keys on one grid, but queries have {queries} and keys {grid} cells "
            "along the axes; use softmax with the scores as attn_bias and a pair_mask"
        )
    if key_mask is not None:
        m, n = math.prod([s.shape[-2] for s in scores]), math.prod(grid)
        Mask.checked("Positional", m, n, key_mask=key_mask, device=scores[0].device)
        broadcast_batch("Positional", key_mask=key_mask.shape[:-1], scores=batch)
        key_mask = key_mask.unflatten(-1, grid)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"Positional: dtype must be a floating-point dtype, but is {shown(dtype)}")
    compute = torch.promote_types(scores[0].dtype, torch.float32)  # a softmax of half-precision scores loses places
    return Positional(tuple(s.to(compute) for s in scores), key_mask, dtype or scores[0].dtype, causal)
