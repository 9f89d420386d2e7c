"""Metrics: G_q and G_k, the positive semi-definite matrices that say what a change of a head's weights costs.

For S = X_q Z X^T, ||dS||_F = ||G_q^(1/2) dZ G_k^(1/2)||_F with G_q = X_q^T X_q, G_k = X^T X.  In these coordinates the
best approximation of rank r is the truncated singular value decomposition (Eckart & Young 1936); in the coordinates of
the weights themselves it is not.  Derived in docs/explanation/growth-derivation.md.

A metric is a function of a `Problem` that returns (G_q, G_k).  `register_metric` makes it available by name: heads can
be ranked in it (`Grower.scores(metric=…)`), and the line search tries the closed-form solution in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from headwise.errors import InputError, NonFiniteError, ShapeError
from headwise.growth.normal_equations import TokenSequence

if TYPE_CHECKING:
    from headwise.growth.problem import Problem

CUTOFF = 1e-12
"""Eigenvalues below this share of the largest count as zero: X then has directions that no token uses."""

DAMPING = 1e-3
"""Share of the mean eigenvalue added to a metric before it is inverted; a share of 1 undoes the whitening."""

Metric = Callable[["Problem"], tuple[Tensor, Tensor]]
"""problem -> (G_q (d_q, d_q), G_k (d_k, d_k)), symmetric and positive semi-definite."""

METRICS: dict[str, Metric] = {}


def register_metric(name: str, metric: Metric) -> None:
    """Make `metric` available under `name`, to rank heads and to solve for dimensions.

    def unit(problem):  # every direction of the weights costs the same
        return torch.eye(len(problem.gram_q)), torch.eye(len(problem.gram_k))

    register_metric("unit", unit)
    grower.scores(metric="unit")
    grower.grow(metric="unit", loss=held_out_loss)
    """
    if name in METRICS or name == "refit":  # the one solution that has no metric
        raise InputError(f"register_metric: there is already a metric {name!r}; choose another name")
    METRICS[name] = metric


def roots(problem: Problem, metric: str = "gram", damping: float = DAMPING) -> tuple[Root, Root]:
    """The damped square roots of the G_q and G_k of a registered metric."""
    if metric not in METRICS:
        raise InputError(f"grow: there is no metric {metric!r}; registered are {', '.join(METRICS)}")
    if damping == DAMPING and metric in problem.cached_roots:
        return problem.cached_roots[metric]
    gram_q, gram_k = METRICS[metric](problem)
    layer = problem.roots if damping == DAMPING else None
    # the roots of a layer's own Gram matrices are computed once for all its heads
    q = layer[0] if layer is not None and gram_q is problem.gram_q else root(gram_q, damping)
    k = layer[1] if layer is not None and gram_k is problem.gram_k else root(gram_k, damping)
    if damping == DAMPING:
        problem.cached_roots[metric] = q, k
    return q, k


def _gram(problem: Problem) -> tuple[Tensor, Tensor]:
    """All scores have the same weight."""
    return problem.gram_q, problem.gram_k


def _fisher(problem: Problem) -> tuple[Tensor, Tensor]:
    """The key metric weighted by the head's own attention: the Jacobian of softmax, averaged over queries."""
    if not problem.sequences:
        raise ShapeError("grow: the Fisher metric needs stored sequences; raise `memory` of the Grower")
    if problem.biased:
        raise ShapeError("grow: the Fisher metric needs the attention weights, but the scores had an additive bias")
    return problem.gram_q, fisher_gram(problem.sequences, problem.present.product())


register_metric("gram", _gram)
register_metric("fisher", _fisher)


def fisher_gram(sequences: Sequence[TokenSequence], z: Tensor) -> Tensor:
    """G_k = mean_i sum_j P_ij (x_j - x_i')(x_j - x_i')^T, x_i' = sum_j P_ij x_j: (d_k, d_k) for Z (g, d_q, d_k).

    A row of P moves by ds^T (diag P - P P^T) ds when its scores move by ds (twice the Kullback-Leibler divergence, to
    second order), so scores of keys with no weight are free.  P is formed in blocks of rows.
    """
    total, rows = None, 0
    z = z.double()
    for tokens in sequences:
        y = tokens.keys.double()
        for x, allowed in tokens.blocks():
            scores = x @ z @ y.mT  # (g, r, n)
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            p = torch.softmax(scores, -1).nan_to_num(0).flatten(0, 1)
            mean = p @ y
            part = (y * p.sum(0)[:, None]).mT @ y - mean.mT @ mean
            total, rows = part if total is None else total + part, rows + len(p)
    assert total is not None, "there is at least one sequence"
    return total / rows


@final
@dataclass(frozen=True, eq=False)
class Root:
    """root = G^(1/2), inverse = its pseudo-inverse, rank = number of directions that tokens use.  All float64."""

    root: Tensor
    inverse: Tensor
    rank: int


def root(gram: Tensor, damping: float = 0.0) -> Root:
    """(G + damping * mean eigenvalue * I)^(1/2) and its pseudo-inverse, G symmetric and positive semi-definite.

    Without damping, directions that no token uses are left out of both (Moore & Penrose).

    >>> root(torch.diag(torch.tensor([4.0, 0.0]))).inverse.tolist()
    [[0.5, 0.0], [0.0, 0.0]]
    """
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1]:
        raise ShapeError(f"root: a Gram matrix is square, but this one has shape {tuple(gram.shape)}")
    gram = gram.detach().double()
    if not bool(gram.isfinite().all()):
        raise NonFiniteError("root: the Gram matrix of the tokens has non-finite entries; check the layer's input")
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    used = values > CUTOFF * values[-1].clamp(min=0)
    values = values.clamp(min=0) + damping * values.clamp(min=0).mean()
    if damping == 0.0:
        values = values.where(used, torch.zeros_like(values))
    half = values.sqrt()
    inverse = torch.where(values > 0, 1 / half, torch.zeros_like(half))
    return Root((vectors * half) @ vectors.mT, (vectors * inverse) @ vectors.mT, int(used.sum()))


def basis(x: Tensor) -> Tensor:
    """An orthonormal basis of the column space of x (d, k), whose columns may depend on one another."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    return u[:, s > CUTOFF**0.5 * s.amax().clamp(min=torch.finfo(s.dtype).tiny)]
