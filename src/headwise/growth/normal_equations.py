"""N(Z) = sum_b X_b^T (W_b * (X_b Z Y_b^T)) Y_b: the normal map of the least-squares problem of the scores.

For all sequences b, X_b are the query tokens, Y_b the key tokens and W_b is 1 where a score is not masked: masked
scores have neither gradient nor target.  With `centred` each row of scores is taken less its mean over the keys it
attends to, because softmax does not notice a constant per row.

    f(Z) = sum_b || W_b * (B_b - X_b Z Y_b^T) ||^2 = <Z, N(Z)> - 2 <Z, T> + const,   T = sum_b X_b^T (W_b * B_b) Y_b

so N and T are all a solver needs.  Sequences that do not fit into memory are kept as `GramCluster`s, sums of Gram
matrices: their part of N(Z) is approximated by sum_c count_c A_c Z C_c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import final

import torch
from torch import Tensor

from headwise.operators.masks import Mask

CHUNK = 1 << 20
"""Scores alive at once inside N; rows are taken in blocks so that no m x n tensor is formed for long sequences."""

STACK = 1 << 22
"""Entries of Gram matrices multiplied at once."""

LinearMap = Callable[[Tensor], Tensor]


def visible_rows(mask: Mask, rows: Tensor) -> Tensor | None:
    """The rows of a mask that `rows` lists, boolean (*batch, r, n); None when every query attends to every key."""
    visible = None if mask.visible is None else take_rows(mask.visible, rows)
    if mask.attn_bias is not None:
        finite = take_rows(mask.attn_bias, rows) > -math.inf
        visible = finite if visible is None else visible & finite
    if mask.ahead is not None:
        causal = torch.arange(mask.n, device=rows.device) <= rows[:, None] + mask.ahead
        visible = causal if visible is None else visible & causal
    return visible


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (*batch, m, n) at the rows listed; x (*batch, 1, n) stays as it is."""
    return x if x.shape[-2] == 1 else x.index_select(-2, rows)


@final
@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence: queries (m, d_q), keys (n, d_k), and the mask of the sequence, without batch axes or bias.

    Where only some query rows are stored, `positions` are their indices in the mask.  `query_bias` adds a column of
    ones to the queries when they are used.
    """

    queries: Tensor
    keys: Tensor
    mask: Mask
    positions: Tensor | None = None
    query_bias: bool = False

    @property
    def bytes(self) -> int:
        parts = [self.keys, self.mask.key_mask, self.mask.pair_mask]
        if self.queries.untyped_storage().data_ptr() != self.keys.untyped_storage().data_ptr():
            parts.append(self.queries)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)

    def packed(self) -> TokenSequence:
        """The same without views, to be sent to other processes: a view would bring its whole batch along."""
        pairs = None if self.mask.pair_mask is None else self.mask.pair_mask.clone()
        mask = replace(self.mask, pair_mask=pairs)
        return replace(self, queries=self.queries.clone(), keys=self.keys.clone(), mask=mask)

    def query_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of X in float64, with the column of ones if there is a query bias."""
        x = self.queries[start:stop].double()
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.query_bias else x

    def allowed(self, start: int, stop: int) -> Tensor | None:
        """Boolean (1 or stop - start, n), or None where every row attends to every key."""
        rows = (
            torch.arange(start, stop, device=self.keys.device) if self.positions is None else self.positions[start:stop]
        )
        return visible_rows(self.mask, rows)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Query rows in blocks of at most CHUNK scores, each with its mask."""
        step = max(1, CHUNK // max(1, len(self.keys)))
        for start in range(0, len(self.queries), step):
            stop = min(start + step, len(self.queries))
            yield self.query_rows(start, stop), self.allowed(start, stop)

    @property
    def separable(self) -> bool:
        """Whether every row attends to the same keys, so that N(Z) = A Z C exactly."""
        return not self.mask.causal and (self.mask.pair_mask is None or len(self.mask.pair_mask) == 1)

    def grams(self, *, centred: bool) -> tuple[Tensor, Tensor]:
        """A = sum_i x_i x_i^T (d_q, d_q) and C = mean over rows i of sum_j y_j y_j^T (d_k, d_k), j the keys of i."""
        y, x = self.keys.double(), self.query_rows()
        if self.separable:
            y = y if self.mask.visible is None else y[self.mask.visible[0]]
            y = y - y.mean(0) if centred else y
            return x.mT @ x, y.mT @ y
        counts, c = torch.zeros_like(y[:, 0]), torch.zeros(y.shape[1], y.shape[1], dtype=y.dtype, device=y.device)
        for _, allowed in self.blocks():
            assert allowed is not None
            w = allowed.to(y)
            counts += w.sum(0)
            if centred:
                sums, sizes = w @ y, w.sum(1, keepdim=True).clamp(min=1)
                c -= sums.mT @ (sums / sizes)
        return x.mT @ x, ((y * counts[:, None]).mT @ y + c) / max(1, len(x))

    def normal(self, z: Tensor, *, centred: bool) -> Tensor:
        """X^T (W * (X Z Y^T)) Y, exactly, in blocks of rows."""
        return self.for_queries(self.keys.double(), centred)(z)

    def for_queries(self, yk: Tensor, centred: bool) -> LinearMap:
        """Q -> X^T (W * (X Q (Y K)^T)) Y K for a fixed Y K (n, r)."""
        return lambda q: reduce(torch.add, (x.mT @ (scores @ yk) for x, _, scores in self._scores(q, yk, centred)))

    def for_keys(self, q: Tensor, centred: bool) -> LinearMap:
        """K -> Y^T (W * (X Q (Y K)^T))^T X Q for a fixed Q (d_q, r)."""
        y = self.keys.double()
        return lambda k: reduce(torch.add, (y.mT @ (s.mT @ xq) for _, xq, s in self._scores(q, y @ k, centred)))

    def _scores(self, q: Tensor, yk: Tensor, centred: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(X, X Q, W * (X Q (Y K)^T)) by blocks of rows; less the mean of each row if `centred`."""
        for x, allowed in self.blocks():
            xq = x @ q
            scores = xq @ yk.mT
            if allowed is not None:
                scores = scores.masked_fill(~allowed, 0)
            if centred:
                count = len(yk) if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1)
                scores = scores - scores.sum(-1, keepdim=True) / count
                scores = scores if allowed is None else scores.masked_fill(~allowed, 0)
            yield x, xq, scores


@final
@dataclass(frozen=True, eq=False)
class GramCluster:
    """`count` sequences with similar Gram matrices, represented by their means: they contribute count * A Z C."""

    count: int
    a: Tensor
    c: Tensor

    def merged(self, other: GramCluster) -> GramCluster:
        total = self.count + other.count
        share = other.count / total
        return GramCluster(total, torch.lerp(self.a, other.a, share), torch.lerp(self.c, other.c, share))

    def distance(self, other: GramCluster) -> float:
        return float((self.a - other.a).square().sum() + (self.c - other.c).square().sum())


@final
@dataclass(frozen=True, eq=False)
class NormalMap:
    """N over exact sequences and clusters; symmetric and positive semi-definite in Z."""

    sequences: Sequence[TokenSequence]
    clusters: Sequence[GramCluster] = ()
    centred: bool = True
    # (count, count A, C) in stacks (b, 1, 1), (b, d_q, d_q), (b, d_k, d_k): where every row attends to the same keys
    # they say everything, and a stack is one batched product where single sequences would be a thousand small ones
    _stacks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    _masked: list[TokenSequence] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        parts = [(1, *s.grams(centred=self.centred)) for s in self.sequences if s.separable]
        parts += [(x.count, x.count * x.a.double(), x.c.double()) for x in self.clusters]
        self._masked.extend(s for s in self.sequences if not s.separable)
        if parts:
            size = max(1, STACK // max(x.numel() for x in parts[0][1:]))
            for start in range(0, len(parts), size):
                counts, a, c = zip(*parts[start : start + size], strict=True)
                weights = torch.tensor(counts, dtype=torch.float64, device=a[0].device)[:, None, None]
                self._stacks.append((weights, torch.stack(a), torch.stack(c)))

    @property
    def count(self) -> int:
        return len(self.sequences) + sum(cluster.count for cluster in self.clusters)

    def __call__(self, z: Tensor) -> Tensor:
        z = z.double()
        out = torch.zeros_like(z)
        for _, a, c in self._stacks:
            out += (a @ z @ c).sum(0)
        for tokens in self._masked:
            out += tokens.normal(z, centred=self.centred)
        return out

    def for_queries(self, k: Tensor) -> LinearMap:
        """Q -> N(Q K^T) K with K (d_k, r) fixed: the normal map of W_q alone, at the cost of rank r."""
        return _one_side(
            [(a, k.mT @ c @ k) for _, a, c in self._stacks],
            [tokens.for_queries(tokens.keys.double() @ k, self.centred) for tokens in self._masked],
        )

    def for_keys(self, q: Tensor) -> LinearMap:
        """K -> N(Q K^T)^T Q with Q (d_q, r) fixed."""
        return _one_side(
            [(c, q.mT @ a @ q) for _, a, c in self._stacks],
            [tokens.for_keys(q, self.centred) for tokens in self._masked],
        )

    def means(self) -> tuple[Tensor, Tensor]:
        """Mean A and mean C over all sequences: the two sides of the preconditioner."""
        pairs = [(a.sum(0), (counts * c).sum(0)) for counts, a, c in self._stacks]
        pairs += [tokens.grams(centred=self.centred) for tokens in self._masked]
        a, c = (reduce(torch.add, side) for side in zip(*pairs, strict=True))
        return a / self.count, c / self.count


def _one_side(stacks: Sequence[tuple[Tensor, Tensor]], masked: Sequence[LinearMap]) -> LinearMap:
    """W -> sum_b A_b W H_b, H_b the small side (r, r) of a stack, plus the part of the masked sequences."""

    def apply(w: Tensor) -> Tensor:
        out = torch.zeros_like(w)
        for wide, small in stacks:
            out += (wide @ (w @ small)).sum(0)
        for one in masked:
            out += one(w)
        return out

    return apply


def conjugate_gradients(
    apply: LinearMap, rhs: Tensor, precondition: LinearMap, *, tolerance: float = 1e-10, iterations: int = 100
) -> tuple[Tensor, int]:
    """x with apply(x) = rhs for a symmetric positive semi-definite map, and the iterations used.

    Stops when the preconditioned residual has fallen by `tolerance`; a singular map is fine while rhs is in its range.
    """
    x, r = torch.zeros_like(rhs), rhs.clone()
    z = precondition(r)
    d, energy = z, float((r * z).sum())
    goal = tolerance**2 * max(abs(energy), 1e-300)
    for done in range(iterations):
        if energy <= goal:
            return x, done
        ad = apply(d)
        curvature = float((d * ad).sum())
        if curvature <= 0:
            return x, done
        step = energy / curvature
        x, r = x + step * d, r - step * ad
        z = precondition(r)
        energy, before = float((r * z).sum()), energy
        d = z + (energy / before) * d
    return x, iterations
