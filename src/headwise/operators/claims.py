"""Properties that an operator may claim for its matrix, and the distance of a matrix from each.

A claim belongs to an instance, not to a class: a mask that empties a row takes STOCHASTIC away from that operator.
The contract suite measures every claim an operator makes, so code may rely on them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor


class Claim(Enum):
    STOCHASTIC = "entries are >= 0 and every row sums to one"
    NONNEGATIVE = "entries are >= 0"
    ORTHOGONAL = "P^T P = I"
    SYMMETRIC = "P = P^T"
    CAUSAL = "row i is zero beyond column i + n - m"


def weights_claim(*, stochastic: bool, causal: bool = False) -> frozenset[Claim]:
    """The claims of entries >= 0: STOCHASTIC unless some row may be empty, and CAUSAL, each if it holds."""
    held = {Claim.NONNEGATIVE: True, Claim.STOCHASTIC: stochastic, Claim.CAUSAL: causal}
    return frozenset(claim for claim, holds in held.items() if holds)


def _distance_from_stochastic(p: Tensor) -> Tensor:
    return (p.sum(-1) - 1).abs().amax() + p.clamp(max=0).abs().amax()


def _distance_from_orthogonal(p: Tensor) -> Tensor:
    return (p.mT @ p - torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)).abs().amax()


def _mass_above_the_diagonal(p: Tensor) -> Tensor:
    return p.triu(p.shape[-1] - p.shape[-2] + 1).abs().amax()


DISTANCES: dict[Claim, Callable[[Tensor], Tensor]] = {
    Claim.STOCHASTIC: _distance_from_stochastic,
    Claim.NONNEGATIVE: lambda p: p.clamp(max=0).abs().amax(),
    Claim.ORTHOGONAL: _distance_from_orthogonal,
    Claim.SYMMETRIC: lambda p: (p - p.mT).abs().amax(),
    Claim.CAUSAL: _mass_above_the_diagonal,
}
"""Largest violation of each claim by a dense matrix; zero when it holds exactly."""
