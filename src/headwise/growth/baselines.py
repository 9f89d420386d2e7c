"""Other ways to widen a head, each with the signature of a `Solution`, kept to be compared with.

    source_recipe   the plain recipe of the source: SVD of Z = X^+ B X^+T, truncated in the coordinates of the weights
    random_both     W_q and W_k drawn like the present columns: the function changes at once
    random_queries  W_q drawn, W_k zero: the function is preserved, the gradient is not zero
    gradmax         W_k zero, W_q the leading left singular vectors of M: the largest gradient of the new keys
                    (Evci et al. 2022, for this layer)

All but the first ignore the step.  Nothing here is whitened: that is what they are compared for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.growth.gram_roots import root
from headwise.growth.solve import Factors, Path, Problem, room, score_change


def plain_truncation(z: Tensor, rank: int) -> Factors:
    """Truncated SVD of Z (g, d_q, d_k) itself: optimal when X has orthonormal columns, and only then."""
    g, dq, dk = z.shape
    u, s, vh = torch.linalg.svd(z.double().reshape(g * dq, dk), full_matrices=False)
    half = s[:rank].sqrt()
    return Factors((u[:, :rank] * half).reshape(g, dq, -1), vh[:rank].mT * half)


def recipe_for_one(x: Tensor, b: Tensor, rank: int) -> Factors:
    """Z = X^+ B (X^+)^T for one sequence X (n, d) and target B (n, n), then plain truncation, as printed."""
    inverse = torch.linalg.pinv(x.double())
    return plain_truncation((inverse @ b.double() @ inverse.mT).unsqueeze(0), rank)


def source_recipe(problem: Problem, p: int) -> Path:
    """Z_0 + eta G_q^+ M G_k^+, plain truncation; with the minus the source lacks, and mean Gram matrices for many."""
    room(problem, p)
    if len(problem.present.wq) > 1:
        raise ShapeError("source_recipe: the source knows one head a key; use closed_form for grouped queries")
    q, k = root(problem.gram_q), root(problem.gram_k)
    z0 = problem.present.product().double()
    delta = q.inverse @ q.inverse @ problem.moment @ k.inverse @ k.inverse
    rank = problem.present.width + p
    whole = Factors(z0 + delta, torch.eye(z0.shape[-1], dtype=z0.dtype, device=z0.device))

    def at(eta: float) -> Factors:
        return plain_truncation(z0 + eta * delta, rank)

    return Path(at, at, score_change(problem, whole))


def random_both(problem: Problem, p: int) -> Path:
    return _fixed(problem, p, _like(problem.present.wq, p), _like(problem.present.wk, p))


def random_queries(problem: Problem, p: int) -> Path:
    wk = problem.present.wk
    return _fixed(problem, p, _like(problem.present.wq, p), wk.new_zeros(len(wk), p))


def gradmax(problem: Problem, p: int) -> Path:
    g, dq, dk = problem.moment.shape
    u = torch.linalg.svd(problem.moment.reshape(g * dq, dk), full_matrices=False)[0][:, :p].reshape(g, dq, p)
    wq, wk = problem.present.wq, problem.present.wk
    length = wq.double().square().sum((0, 1)).mean().sqrt()
    return _fixed(problem, p, u * length, wk.new_zeros(len(wk), p))


def _like(w: Tensor, p: int) -> Tensor:
    return torch.randn(*w.shape[:-1], p, dtype=torch.float64).to(w.device) * w.double().std()


def _fixed(problem: Problem, p: int, wq: Tensor, wk: Tensor) -> Path:
    room(problem, p)
    present = Factors(problem.present.wq.double(), problem.present.wk.double())
    grown = present.beside(Factors(wq.double(), wk.double()))
    return Path(lambda eta: grown, lambda eta: grown, 0.0)
