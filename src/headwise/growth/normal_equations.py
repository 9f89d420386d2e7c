"""N(Z) = sum_b X_b^T (W_b * (X_b Z Y_b^T)) Y_b: the least-squares problem of the scores, seen through its normal map.

For all sequences b, X_b the tokens that ask, Y_b those that are asked, W_b which scores count: masked scores have
neither gradient nor target and stay outside the sum.  With `centred` each row of scores is taken less its mean over
the keys it sees, because softmax does not notice a constant per row.

    f(Z) = sum_b || W_b * (B_b - X_b Z Y_b^T) ||^2 = <Z, N(Z)> - 2 <Z, T> + const,   T = sum_b X_b^T (W_b * B_b) Y_b

so N and T are all a solver needs.  Sequences that no longer fit are kept as `Atom`s, sums of Gram matrices: N(Z) is
then approximated by sum_a w_a A_a Z C_a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Scores alive at once inside N; rows are taken in blocks so that no m x n tensor is formed for long sequences."""

STACK = 1 << 22
"""Entries of Gram matrices multiplied at once."""


@final
@dataclass(frozen=True, eq=False)
class Tokens:
    """One sequence: queries (m, d_q), keys (n, d_k); row i sees column j where `keep` and j <= i + `ahead` allow it.

    `places` are the positions of the kept query rows in the original sequence, which causality is about; `ones` says
    that a column of ones belongs to the queries (it is added when they are used).
    """

    queries: Tensor
    keys: Tensor
    keep: Tensor | None = None  # boolean (1 or m, n)
    ahead: int | None = None
    places: Tensor | None = None  # (m,), default 0 … m - 1
    ones: bool = False

    @property
    def bytes(self) -> int:
        parts = [self.keys, self.keep]
        if self.queries.untyped_storage().data_ptr() != self.keys.untyped_storage().data_ptr():
            parts.append(self.queries)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)

    def packed(self) -> Tokens:
        """The same with tensors of its own, to be sent: a view would bring its whole batch along."""
        return replace(self, queries=self.queries.clone(), keys=self.keys.clone())

    def asking(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of X in float64, their ones included."""
        x = self.queries[start:stop].double()
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.ones else x

    def allowed(self, start: int, stop: int) -> Tensor | None:
        """Boolean (1 or stop - start, n), or None where every row sees every key."""
        keep = self.keep
        if keep is not None and keep.shape[0] > 1:
            keep = keep[start:stop]
        if self.ahead is None:
            return keep
        device = self.keys.device
        places = torch.arange(len(self.queries), device=device) if self.places is None else self.places
        seen = torch.arange(len(self.keys), device=device) <= places[start:stop, None] + self.ahead
        return seen if keep is None else seen & keep

    def blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Query rows in blocks of at most CHUNK scores, each with what it may see."""
        step = max(1, CHUNK // max(1, len(self.keys)))
        for start in range(0, len(self.queries), step):
            stop = min(start + step, len(self.queries))
            yield self.asking(start, stop), self.allowed(start, stop)

    @property
    def product(self) -> bool:
        """Whether every row sees the same keys, so that the Gram matrices of both sides say everything."""
        return self.ahead is None and (self.keep is None or self.keep.shape[0] == 1)

    def grams(self, *, centred: bool) -> tuple[Tensor, Tensor]:
        """A = sum_i x_i x_i^T (d_q, d_q) and C = mean over rows i of sum_j y_j y_j^T (d_k, d_k), j what i may see."""
        y, x = self.keys.double(), self.asking()
        if self.product:
            y = y if self.keep is None else y[self.keep[0]]
            y = y - y.mean(0) if centred else y
            return x.mT @ x, y.mT @ y
        counts, c = torch.zeros_like(y[:, 0]), torch.zeros(y.shape[1], y.shape[1], dtype=y.dtype, device=y.device)
        for _, allowed in self.blocks():
            assert allowed is not None
            w = allowed.to(y)
            counts += w.sum(0) * (1 if w.shape[0] > 1 or len(x) == 1 else len(x))
            if centred:
                sums, seen = w @ y, w.sum(1, keepdim=True).clamp(min=1)
                c -= sums.mT @ (sums / seen)
        return x.mT @ x, ((y * counts[:, None]).mT @ y + c) / max(1, len(x))

    def normal(self, z: Tensor, *, centred: bool) -> Tensor:
        """X^T (W * (X Z Y^T)) Y, exactly, in blocks of rows."""
        y = self.keys.double()
        out = torch.zeros_like(z)
        for x, allowed in self.blocks():
            scores = (x @ z) @ y.mT
            out += x.mT @ (_kept(scores, allowed, centred) @ y)
        return out

    def side(self, k: Tensor, *, centred: bool) -> Callable[[Tensor], Tensor]:
        """Q -> X^T (W * (X Q (Y K)^T)) Y K"""
        yk = self.keys.double() @ k

        def apply(q: Tensor) -> Tensor:
            out = torch.zeros_like(q)
            for x, allowed in self.blocks():
                out += x.mT @ (_kept((x @ q) @ yk.mT, allowed, centred) @ yk)
            return out

        return apply

    def other_side(self, q: Tensor, *, centred: bool) -> Callable[[Tensor], Tensor]:
        """K -> Y^T (W * (X Q (Y K)^T))^T X Q"""
        y = self.keys.double()

        def apply(k: Tensor) -> Tensor:
            out, yk = torch.zeros_like(k), y @ k
            for x, allowed in self.blocks():
                xq = x @ q
                out += y.mT @ (_kept(xq @ yk.mT, allowed, centred).mT @ xq)
            return out

        return apply


def _kept(scores: Tensor, allowed: Tensor | None, centred: bool) -> Tensor:
    """Silenced scores set to zero, and the rest of each row less its mean if `centred`."""
    if allowed is None:
        return scores - scores.mean(-1, keepdim=True) if centred else scores
    scores = scores.masked_fill(~allowed, 0)
    if not centred:
        return scores
    mean = scores.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return (scores - mean).masked_fill(~allowed, 0)


@final
@dataclass(frozen=True, eq=False)
class Atom:
    """`count` sequences of alike Gram matrices, remembered by their mean: they contribute count * A Z C."""

    count: int
    a: Tensor
    c: Tensor

    def with_one_more(self, other: Atom) -> Atom:
        total = self.count + other.count
        share = other.count / total
        return Atom(total, torch.lerp(self.a, other.a, share), torch.lerp(self.c, other.c, share))


@final
@dataclass(frozen=True, eq=False)
class NormalMap:
    """N over exact sequences and atoms; symmetric and positive semi-definite in Z."""

    sequences: Sequence[Tokens]
    atoms: Sequence[Atom] = ()
    centred: bool = True
    # Gram matrices in stacks (b, d_q, d_q), (b, d_k, d_k): where every row sees the same keys they say everything, and
    # a stack is one batched product where single sequences would be a thousand small ones
    _stacks: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    _masked: list[Tokens] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        pairs = [s.grams(centred=self.centred) for s in self.sequences if s.product]
        pairs += [(atom.count * atom.a.double(), atom.c.double()) for atom in self.atoms]
        self._masked.extend(s for s in self.sequences if not s.product)
        if pairs:
            size = max(1, STACK // max(x.numel() for x in pairs[0]))
            for start in range(0, len(pairs), size):
                a, c = zip(*pairs[start : start + size], strict=True)
                self._stacks.append((torch.stack(a), torch.stack(c)))

    def __call__(self, z: Tensor) -> Tensor:
        z = z.double()
        out = torch.zeros_like(z)
        for a, c in self._stacks:
            out += (a @ z @ c).sum(0)
        for tokens in self._masked:
            out += tokens.normal(z, centred=self.centred)
        return out

    def for_queries(self, k: Tensor) -> Callable[[Tensor], Tensor]:
        """Q -> N(Q K^T) K with K (d_k, r) fixed: the normal map of W_q alone, at the cost of rank r."""
        return _one_side(
            [(a, k.mT @ c @ k) for a, c in self._stacks],
            [tokens.side(k, centred=self.centred) for tokens in self._masked],
        )

    def for_keys(self, q: Tensor) -> Callable[[Tensor], Tensor]:
        """K -> N(Q K^T)^T Q with Q (d_q, r) fixed."""
        return _one_side(
            [(c, q.mT @ a @ q) for a, c in self._stacks],
            [tokens.other_side(q, centred=self.centred) for tokens in self._masked],
        )

    def means(self) -> tuple[Tensor, Tensor]:
        """Mean A and mean C over all sequences: the two sides of the preconditioner."""
        # an atom's A is already multiplied by its count, its C is not
        weights = [1] * (self.count - sum(x.count for x in self.atoms) - len(self._masked))
        counts = torch.tensor([*weights, *(atom.count for atom in self.atoms)], dtype=torch.float64)
        a = c = None
        for left, right in self._stacks:
            weight, counts = counts[: len(right)].to(right), counts[len(right) :]
            pair = left.sum(0), torch.einsum("b,bij->ij", weight, right)
            a, c = pair if a is None or c is None else (a + pair[0], c + pair[1])
        for tokens in self._masked:
            pair = tokens.grams(centred=self.centred)
            a, c = pair if a is None or c is None else (a + pair[0], c + pair[1])
        assert a is not None, "a normal map has at least one sequence"
        assert c is not None
        return a / self.count, c / self.count

    @property
    def count(self) -> int:
        return len(self.sequences) + sum(atom.count for atom in self.atoms)


def _one_side(
    stacks: Sequence[tuple[Tensor, Tensor]], masked: Sequence[Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], Tensor]:
    """W -> sum_b A_b W H_b, H_b the small side (r, r) of a stack, plus what the masked sequences add."""

    def apply(w: Tensor) -> Tensor:
        out = torch.zeros_like(w)
        for wide, small in stacks:
            out += (wide @ (w @ small)).sum(0)
        for one in masked:
            out += one(w)
        return out

    return apply
