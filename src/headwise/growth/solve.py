"""Solutions: ways to give a head p more query/key dimensions, each a `WeightPath` of weights along a step eta.

For one head (or g heads that share keys), S = X_q W_q W_k^T X^T with the scale folded into W_q.  With the bottleneck
R = U Sigma V^T (bottleneck.py) the closed form in a metric (G_q, G_k) adds

    W_q^new = sqrt(eta) G_q^(-1/2) U_p Sigma_p^(1/2),   W_k^new = sqrt(eta) G_k^(-1/2) V_p Sigma_p^(1/2),

which change S by eta ||Sigma_p|| and the loss by -eta sum sigma_i^2 to first order; eta = 0 preserves the function and
old weights stay.  New directions become at most as long as `LONGEST` says.  `refit` replaces all weights of the head.
Burgund, "Attention growing networks" (with a minus sign where that report prints a plus); derived in
docs/explanation/growth-derivation.md.  Pure functions, float64 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError
from headwise.growth.bottleneck import bottleneck
from headwise.growth.metric import METRICS, Root, root, roots
from headwise.growth.normal_equations import NormalMap, conjugate_gradients
from headwise.growth.problem import Factors, Problem

SWEEPS = 3
"""Of alternating least squares."""

ENOUGH = 1e-3
"""Tolerance of the inner solves when a model grows: the step is searched for anyway."""


LONGEST = 0.5
"""Of the length |w_q| |w_k| of the present directions: how long a new one may be made at once.

The step with the lowest loss at once is several times as long, above all where k is 1 and one new direction has to
stand for all that are missing.  An optimizer moves weights by about its learning rate, so a long direction hardly turns
any more: 200 steps later it is behind one that was started short (docs/explanation/growth.md)."""


@final
@dataclass(frozen=True, eq=False)
class WeightPath:
    """Weights as a function of the step eta; `polished` spends more work on a step already chosen."""

    at: Callable[[float], Factors]
    polished: Callable[[float], Factors]
    unit: float  # how much S changes per unit of eta (root mean square over query rows)


Solution = Callable[[Problem, int], WeightPath]
"""(problem, p) -> the path along which p dimensions are added."""


def solution_names() -> list[str]:
    """The solutions that have a name: the closed form in every registered metric, and `refit`."""
    return [*METRICS, "refit"]


def named_solution(solution: str | Solution) -> tuple[str, Solution]:
    """The name and the function of a solution given as either."""
    if not isinstance(solution, str):
        return getattr(solution, "__name__", type(solution).__name__), solution
    if solution not in solution_names():
        raise InputError(f"grow: there is no solution {solution!r}; there are {', '.join(solution_names())}")
    return solution, refit if solution == "refit" else partial(closed_form, metric=solution)


def closed_form(problem: Problem, p: int, metric: str = "gram", longest: float = LONGEST) -> WeightPath:
    """The p leading singular directions of the bottleneck R in a registered metric; `longest` as in LONGEST."""
    problem.check_room(p)
    limits = bottleneck(problem, problem.descent, *roots(problem, metric))
    u, s, vh = torch.linalg.svd(limits.residual, full_matrices=False)
    g, dq, _ = problem.present.wq.shape
    half = s[:p].sqrt()
    wq = limits.left @ (u[:, :p] * half).reshape(g, dq, p)
    wk = limits.right @ (vh[:p].mT * half)
    present = problem.present.double()
    most = longest * typical_length(present)

    def at(eta: float) -> Factors:
        step = math.sqrt(eta)
        return present.beside(balanced(Factors(step * wq, step * wk), present, most))

    return WeightPath(at, at, float(s[:p].square().sum().sqrt()))


def lengths(weights: Factors) -> tuple[Tensor, Tensor]:
    """|w_q| and |w_k| of every direction, (k,) each, in the coordinates of the weights."""
    return weights.wq.square().sum((0, 1)).sqrt(), weights.wk.square().sum(0).sqrt()


def typical_length(present: Factors) -> float:
    """The mean of |w_q| |w_k| over the present directions; infinite if all are zero."""
    q, k = lengths(present)
    product = (q * k)[q * k > 0]
    return float(product.mean()) if len(product) else math.inf


def balanced(new: Factors, present: Factors, longest: float = math.inf) -> Factors:
    """The same directions with |w_q| / |w_k| as in the present ones, and |w_q| |w_k| at most `longest`.

    The closed form divides length between queries and keys by the metric, an optimizer knows only the weights.
    """
    (q, k), (old_q, old_k) = lengths(new), lengths(present)
    ratio = (old_q.square().mean() / old_k.square().mean()).sqrt()
    turn = (ratio * k / q).sqrt()
    turn = turn.where(turn.isfinite() & (turn > 0), torch.ones_like(turn))
    short = (longest / (q * k)).clamp(max=1).sqrt()
    short = short.where(short.isfinite(), torch.ones_like(short))
    return Factors(new.wq * turn * short, new.wk / turn * short)


def preserving(problem: Problem, p: int) -> WeightPath:
    """W_k = 0 and W_q the directions of the closed form, as long as the present ones: the function does not change.

    The gradient of the new keys is the largest that queries of this length allow in the data's metric.
    """
    problem.check_room(p)
    limits = bottleneck(problem, problem.descent, *roots(problem))
    u = torch.linalg.svd(limits.residual, full_matrices=False)[0][:, :p]
    g, dq, _ = problem.present.wq.shape
    present = problem.present.double()
    length = (root(problem.gram_q).root @ present.wq).square().sum((0, 1)).mean().sqrt()
    silent = Factors(limits.left @ u.reshape(g, dq, p) * length, present.wk.new_zeros(len(present.wk), p))
    return fixed_path(present.beside(silent))


def fixed_path(grown: Factors) -> WeightPath:
    """The same weights at every step."""
    return WeightPath(lambda eta: grown, lambda eta: grown, 0.0)


def refit(problem: Problem, p: int) -> WeightPath:
    """min over rank(Z) <= k + p of sum_b || W_b * (B_b - X_b Z Y_b^T) ||^2, B_b = S_b - eta dL/dS_b: all weights anew.

    1. the unconstrained minimum, N(Z) = N(Z_0) + eta M, by preconditioned conjugate gradients: Z = Z_0 + eta Delta with
       N(Delta) = M, one solve for every eta;
    2. truncation to rank k + p in the metric of the mean Gram matrices (exact for one unmasked sequence);
    3. in `polished`, alternating least squares: W_q with W_k fixed is a linear problem, and the other way round.

    Has the least squared error, not always the lowest loss.  Heads that share keys are not refitted.
    """
    problem.check_room(p)
    normal, z0 = problem.normal, problem.present.product().double()
    if len(z0) > 1:
        raise ShapeError(f"grow: refit is for one head, but {len(z0)} heads share these keys; use a closed form")
    width = problem.present.width + p
    descent = problem.descent[0]  # of a mean loss, where N sums: `unit` takes up the factor
    # stopped early on purpose: late iterations fit directions that tokens hardly use
    delta, _ = unconstrained(normal, descent, tolerance=ENOUGH, iterations=25)
    q, k = (root(gram) for gram in normal.means())
    fixed = normal(z0[0])

    def at(eta: float) -> Factors:
        return truncate(z0 + eta * delta, width, q, k)

    def polished(eta: float) -> Factors:
        return alternate(normal, fixed + eta * descent, at(eta), tolerance=ENOUGH)

    return WeightPath(at, polished, _score_norm(problem, delta.unsqueeze(0)))


def unconstrained(
    normal: NormalMap, rhs: Tensor, *, tolerance: float = 1e-10, iterations: int = 100
) -> tuple[Tensor, int]:
    """Z (d_q, d_k) with N(Z) = rhs, and the iterations; 1 for one unmasked sequence, where it is X^+ B X^+T."""
    left, right = (_inverse(gram) for gram in normal.means())
    return conjugate_gradients(
        normal, rhs, lambda r: left @ r @ right / normal.count, tolerance=tolerance, iterations=iterations
    )


def alternate(
    normal: NormalMap, target: Tensor, start: Factors, sweeps: int = SWEEPS, *, tolerance: float = 1e-10
) -> Factors:
    """W_q and W_k in turn, each the least-squares optimum for the other; never worse than `start` (one head)."""
    a, c = normal.means()
    left, right = _inverse(a), _inverse(c)
    wq, wk = start.wq[0], start.wk
    for _ in range(sweeps):
        # columns of one side are orthonormal in the mean metric, so that side of the preconditioner is the identity
        wk = wk @ root(wk.mT @ c @ wk).inverse
        wq, _ = conjugate_gradients(
            normal.for_queries(wk), target @ wk, lambda r: left @ r / normal.count, tolerance=tolerance
        )
        wq = wq @ root(wq.mT @ a @ wq).inverse
        wk, _ = conjugate_gradients(
            normal.for_keys(wq), target.mT @ wq, lambda r: right @ r / normal.count, tolerance=tolerance
        )
    return truncate((wq @ wk.mT).unsqueeze(0), wk.shape[-1], root(a), root(c))


def _inverse(gram: Tensor) -> Tensor:
    inverse = root(gram).inverse
    return inverse @ inverse


def truncate(z: Tensor, rank: int, q: Root, k: Root) -> Factors:
    """The best Z (g, d_q, d_k) of rank <= r in the metric: SVD of G_q^(1/2) Z G_k^(1/2), mapped back, split evenly."""
    g, dq, dk = z.shape
    u, s, vh = torch.linalg.svd((q.root @ z @ k.root).reshape(g * dq, dk), full_matrices=False)
    half = s[:rank].sqrt()
    return Factors(q.inverse @ (u[:, :rank] * half).reshape(g, dq, -1), k.inverse @ (vh[:rank].mT * half))


def narrowed(problem: Problem, p: int) -> Factors:
    """The weights with p directions fewer whose scores are nearest to the present ones in the data's metric."""
    width = problem.present.width
    if not 1 <= p < width:
        raise ShapeError(f"shrink: a head of width {width} can lose between 1 and {width - 1} dimensions, not p = {p}")
    return truncate(problem.present.product().double(), width - p, *roots(problem, damping=1e-9))


def predicted_change(problem: Problem, grown: Factors) -> float:
    """-<M, Z' - Z>: the change of the loss to first order; negative is better."""
    return -float((problem.descent * (grown.product() - problem.present.product().double())).sum())


def score_change(problem: Problem, grown: Factors) -> float:
    """||G_q^(1/2) (Z' - Z) G_k^(1/2)||_F: how far a row of scores moves, root mean square over query rows."""
    return _score_norm(problem, grown.product() - problem.present.product().double())


def _score_norm(problem: Problem, change: Tensor) -> float:
    value = torch.einsum("gqk,qr,grl,lk->", change, problem.gram_q.double(), change, problem.gram_k.double())
    return math.sqrt(max(0.0, float(value)))
