"""sum_i f(sigma_i) over all singular values of P, from the few that a block Krylov run explores, with an error.

    tr f(P^T P) = sum_(i <= c) f(sigma_i) + (n - c) E[v^T f(P^T P) v]

for v a random unit vector orthogonal to the c leading singular vectors, which have converged and are thus counted
exactly.  The columns of the Gaussian start block V_1 of `krylov` are such vectors, and the run that found the leading
values has all that is needed of the rest (stochastic Lanczos quadrature; Ubaru, Chen & Saad 2017): with
P V = U B and P^T U = V B^T + V' C^T,

    V_1^T f(P^T P) V_1  ~  e_1^T f(B^T B) e_1             Gauss: too large for f = sqrt
                        ~  e_1^T f([B C]^T [B C]) e_1     Gauss-Radau with a node at 0: too small for f = sqrt

so that no further product with P is computed.  The errors of both fall alike with the number of steps, so that the
lines through both rules at two numbers of steps meet near the limit, which is the estimate.  A quarter of the distance
between the rules bounds its bias on every head that was tried, random and real (tests/linalg/test_quadrature.py: it was
at most a tenth); the spread over the columns of V_1 gives its standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.linalg.krylov import Triplets

CONVERGED = 1e-3
"""Largest part of a right singular vector outside the space explored for its value to be taken as exact to 1e-6."""

UNRESOLVED = 16 * torch.finfo(torch.float32).eps
"""Singular values below this multiple of sigma_1 are lost in the rounding of single precision."""


@final
@dataclass(frozen=True)
class Estimate:
    """A number with the standard error over random vectors, and a bound of what is not random in its error."""

    value: float
    standard_error: float = 0.0
    bias: float = 0.0

    @property
    def error(self) -> float:
        return self.standard_error + self.bias


@final
@dataclass(frozen=True, eq=False)
class SpectralSums:
    """Sums over all singular values of P by two quadratures and at two numbers of steps, for each start vector."""

    leading: Tensor  # (c,) singular values that have converged
    remaining: int  # number of the others
    start: Tensor  # (b,) squared length of each start vector outside the leading directions
    nodes: tuple[Tensor, ...]  # singular values of B and of [B C], for two thirds of the steps and for all
    weights: tuple[Tensor, ...]  # (nodes, b) less what the leading ones contribute

    @classmethod
    def of(cls, triplets: Triplets) -> SpectralSums:
        """From one unbatched Krylov run in single precision."""
        known, block = triplets.known, triplets.block
        assert known is not None
        steps = known.shape[-2] // block
        nodes, weights = [], []
        for s in (block * max(1, 2 * steps // 3), block * steps):
            for part in (known[:s, :s], known[:s, : s + block]):
                squares, vectors = torch.linalg.eigh(part.mT @ part)
                nodes.append(squares.clamp(min=0).sqrt())
                weights.append(vectors[:block].square().mT)
        _, values, right = torch.linalg.svd(known, full_matrices=False)
        leaks = torch.linalg.vector_norm(right[:, steps * block :], dim=-1)
        c = int((leaks < CONVERGED).long().cumprod(0).sum())
        taken = right[:c, :block].square()
        nodes = tuple(torch.cat([values[:c], x]) for x in nodes)
        weights = tuple(torch.cat([-taken, x]) for x in weights)
        return cls(values[:c], triplets.spectrum.count - c, 1 - taken.sum(0), nodes, weights)

    def effective_rank(self) -> Estimate:
        """exp(H), H = log A - B / A, with A = sum of sigma and B = sum of sigma log sigma."""
        entropies, totals = zip(*(self._entropy(rule) for rule in range(4)), strict=True)
        rank = math.exp(_limit(*(float(h[-1]) for h in entropies)))
        deviation = _jackknife((entropies[2] + entropies[3]) / 2)
        largest = self.nodes[3].amax().item()
        lost = self.remaining * UNRESOLVED * largest / max(float(totals[3][-1]), 1e-300)
        unresolved = lost * max(1.0, math.log(max(1, self.remaining) / max(lost, 1e-300)))
        bias = abs(float(entropies[2][-1] - entropies[3][-1])) / 4 + unresolved
        return Estimate(rank, rank * deviation, rank * bias)

    def count_above(self, threshold: float) -> Estimate:
        """#{i : sigma_i > threshold}.

        A quadrature does not resolve single values: the bias is half of the distance between the counts of both rules
        at thresholds between threshold / sqrt(2) and sqrt(2) threshold.
        """

        def counts(at: float) -> list[Tensor]:
            return [self._sum(rule, (self.nodes[rule] > at).double()) for rule in (2, 3)]

        middle = torch.stack(counts(threshold)).mean(0)
        near = [float(x[-1]) for factor in (0.5, 1, 2) for x in counts(math.sqrt(factor) * threshold)]
        value = float(middle[-1].clamp(0, len(self.leading) + self.remaining))
        return Estimate(value, _jackknife(middle), (max(near) - min(near)) / 2)

    def _sum(self, rule: int, f: Tensor) -> Tensor:
        """(b + 1,) sum_i f(sigma_i) from f at the nodes of a rule: without each start vector, and with all of them."""
        each = f @ self.weights[rule]
        chosen = [torch.cat([x.sum() - x, x.sum().unsqueeze(0)]) for x in (each, self.start)]
        return f[: len(self.leading)].sum() + self.remaining * chosen[0] / chosen[1].clamp(min=1e-300)

    def _entropy(self, rule: int) -> tuple[Tensor, Tensor]:
        """(H, A), each (b + 1,) as in `_sum`."""
        sigma = self.nodes[rule]
        total = self._sum(rule, sigma).clamp(min=1e-300)
        return (total.log() - self._sum(rule, torch.xlogy(sigma, sigma)) / total).clamp(min=0), total


def _jackknife(estimates: Tensor) -> float:
    """The standard error of estimates[-1] from the estimates without one of the b start vectors each."""
    return math.sqrt((len(estimates) - 2) * estimates[:-1].var(correction=0).item())


def _limit(gauss: float, radau: float, later_gauss: float, later_radau: float) -> float:
    """Where the line through (gauss, radau) at two numbers of steps meets gauss = radau; between the later two."""
    closed = (gauss - radau) - (later_gauss - later_radau)
    low, high = min(later_gauss, later_radau), max(later_gauss, later_radau)
    if abs(closed) < 1e-9:
        return (low + high) / 2
    return min(max((gauss * later_radau - later_gauss * radau) / closed, low), high)
