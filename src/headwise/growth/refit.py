"""min over rank(Z) <= k + p of sum_b || W_b * (B_b - X_b Z Y_b^T) ||^2, B_b = S_b - eta dL/dS_b: all weights anew.

Three steps, each exact where the one before is not:
  1. the unconstrained minimum, N(Z) = N(Z_0) + eta M, by conjugate gradients preconditioned with the mean Gram matrices
     on both sides: Z = Z_0 + eta Delta with N(Delta) = M, one solve for every eta;
  2. truncation to rank k + p in the metric of the mean Gram matrices (exact for one unmasked sequence);
  3. alternating least squares: W_q with W_k fixed is a linear problem, and the other way round.

It wins the least-squares objective, not always the loss: a held-out line search decides (`grower`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.growth.gram_roots import Root, root
from headwise.growth.normal_equations import NormalMap
from headwise.growth.solve import Factors, Path, Problem, room, score_change, truncate

SWEEPS = 3

ENOUGH = 1e-3
"""Tolerance of the inner solves when a model grows: the step is searched for anyway."""


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    rhs: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    tolerance: float = 1e-10,
    iterations: int = 100,
) -> tuple[Tensor, int]:
    """x with apply(x) = rhs for a symmetric positive semi-definite map, and the iterations used.

    Stops when the preconditioned residual has fallen by `tolerance`; a singular map is fine while rhs is in its range.
    """
    x, r = torch.zeros_like(rhs), rhs.clone()
    z = precondition(r)
    d, energy = z, float((r * z).sum())
    goal = tolerance**2 * max(abs(float((rhs * precondition(rhs)).sum())), 1e-300)
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


def unconstrained(
    normal: NormalMap, rhs: Tensor, *, tolerance: float = 1e-10, iterations: int = 100
) -> tuple[Tensor, int]:
    """Z (d_q, d_k) with N(Z) = rhs, and the iterations; 1 for one unmasked sequence, where it is X^+ B X^+T."""
    a, c = (root(g) for g in normal.means())
    left, right = a.inverse @ a.inverse, c.inverse @ c.inverse
    return conjugate_gradients(
        normal, rhs, lambda r: left @ r @ right / normal.count, tolerance=tolerance, iterations=iterations
    )


def alternate(
    normal: NormalMap, target: Tensor, start: Factors, sweeps: int = SWEEPS, *, tolerance: float = 1e-10
) -> Factors:
    """W_q and W_k in turn, each the least-squares optimum for the other; never worse than `start` (one head)."""
    a, c = normal.means()
    left, right = root(a).inverse, root(c).inverse
    left, right = left @ left, right @ right
    wq, wk = start.wq[0], start.wk
    for _ in range(sweeps):
        # columns of one side are orthonormal in the mean metric, so that side of the preconditioner is the identity
        wk = _orthonormal(wk, c)
        wq, _ = conjugate_gradients(
            normal.for_queries(wk), target @ wk, lambda r: left @ r / normal.count, tolerance=tolerance
        )
        wq = _orthonormal(wq, a)
        wk, _ = conjugate_gradients(
            normal.for_keys(wq), target.mT @ wq, lambda r: right @ r / normal.count, tolerance=tolerance
        )
    return _balanced(wq, wk, root(a), root(c))


def _orthonormal(w: Tensor, gram: Tensor) -> Tensor:
    """The same columns' span with W^T G W = I; directions without any weight are dropped to zero."""
    r = root(w.mT @ gram @ w)
    return w @ r.inverse


def _balanced(wq: Tensor, wk: Tensor, q: Root, k: Root) -> Factors:
    """The same product, its weight shared evenly between queries and keys."""
    return truncate((wq @ wk.mT).unsqueeze(0), wk.shape[-1], q, k)


def objective(normal: NormalMap, target: Tensor, z: Tensor) -> float:
    """<Z, N(Z)> - 2 <Z, T>: the sum of squares less a constant."""
    return float((z * normal(z)).sum() - 2 * (z * target).sum())


def refit(problem: Problem, p: int) -> Path:
    """All k + p dimensions anew.  Heads that share keys are not refitted: their problems are coupled."""
    room(problem, p)
    normal, z0 = problem.normal, problem.present.product().double()
    if len(z0) > 1:
        raise ShapeError(f"grow: a refit is for one head, but {len(z0)} heads share these keys; use closed_form")
    rank = problem.present.width + p
    moment = problem.moment[0]  # of a mean loss, where N sums: `unit` takes up the factor
    # stopped early on purpose: late iterations fit directions that tokens hardly use
    delta, _ = unconstrained(normal, moment, tolerance=ENOUGH, iterations=25)
    metric = tuple(root(g) for g in normal.means())
    fixed = normal(z0[0])

    def at(eta: float) -> Factors:
        return truncate(z0 + eta * delta, rank, *metric)

    def polished(eta: float) -> Factors:
        return alternate(normal, fixed + eta * moment, at(eta), tolerance=ENOUGH)

    whole = Factors(delta.unsqueeze(0), torch.eye(len(delta.mT), dtype=delta.dtype, device=delta.device))
    origin = Factors(torch.zeros_like(whole.wq), whole.wk)
    unit = score_change(_at(problem, origin), whole)
    return Path(at, polished, unit)


def _at(problem: Problem, present: Factors) -> Problem:
    return Problem(problem.folds, problem.shares, present, problem.gram_q, problem.gram_k)
