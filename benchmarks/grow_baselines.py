"""Other ways to widen a head, each a `Solution`, to compare the library's own with.

    plain_svd       Burgund, "Attention growing networks": SVD of Z = X^+ B X^+T, truncated in the coordinates of the
                    weights
    random_both     W_q and W_k drawn like the present columns: the function changes at once
    random_queries  W_q drawn, W_k zero: the function is preserved, the gradient is not zero
    gradmax         W_k zero, W_q the leading left singular vectors of M: the largest gradient of the new keys
                    (Evci et al. 2022, for this layer)

All but the first ignore the step.  None uses the metric of the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.growth import Factors, Problem, WeightPath
from headwise.growth.metric import root
from headwise.growth.solve import fixed_path, score_change


def plain_truncation(z: Tensor, rank: int) -> Factors:
    """Truncated SVD of Z (g, d_q, d_k) itself: optimal when X has orthonormal columns, and only then."""
    g, dq, dk = z.shape
    u, s, vh = torch.linalg.svd(z.double().reshape(g * dq, dk), full_matrices=False)
    half = s[:rank].sqrt()
    return Factors((u[:, :rank] * half).reshape(g, dq, -1), vh[:rank].mT * half)


def recipe_for_one(x: Tensor, b: Tensor, rank: int) -> Factors:
    """Z = X^+ B (X^+)^T for one sequence X (n, d) and target B (n, n), then plain truncation."""
    inverse = torch.linalg.pinv(x.double())
    return plain_truncation((inverse @ b.double() @ inverse.mT).unsqueeze(0), rank)


def plain_svd(problem: Problem, p: int) -> WeightPath:
    """Z_0 + eta G_q^+ M G_k^+, plain truncation; with the sign corrected, and mean Gram matrices for many sequences."""
    problem.check_room(p)
    if len(problem.present.wq) > 1:
        raise ShapeError(f"plain_svd: is for one head, but {len(problem.present.wq)} share keys; use closed_form")
    q, k = root(problem.gram_q), root(problem.gram_k)
    z0 = problem.present.product().double()
    delta = q.inverse @ q.inverse @ problem.descent @ k.inverse @ k.inverse
    rank = problem.present.width + p
    whole = Factors(z0 + delta, torch.eye(z0.shape[-1], dtype=z0.dtype, device=z0.device))

    def at(eta: float) -> Factors:
        return plain_truncation(z0 + eta * delta, rank)

    return WeightPath(at, at, score_change(problem, whole))


def random_both(problem: Problem, p: int) -> WeightPath:
    return _fixed(problem, p, _like(problem.present.wq, p), _like(problem.present.wk, p))


def random_queries(problem: Problem, p: int) -> WeightPath:
    wk = problem.present.wk
    return _fixed(problem, p, _like(problem.present.wq, p), wk.new_zeros(len(wk), p))


def gradmax(problem: Problem, p: int) -> WeightPath:
    g, dq, dk = problem.descent.shape
    u = torch.linalg.svd(problem.descent.reshape(g * dq, dk), full_matrices=False)[0][:, :p].reshape(g, dq, p)
    wq, wk = problem.present.wq, problem.present.wk
    length = wq.double().square().sum((0, 1)).mean().sqrt()
    return _fixed(problem, p, u * length, wk.new_zeros(len(wk), p))


def _like(w: Tensor, p: int) -> Tensor:
    return torch.randn(*w.shape[:-1], p, dtype=torch.float64).to(w.device) * w.double().std()


def _fixed(problem: Problem, p: int, wq: Tensor, wk: Tensor) -> WeightPath:
    problem.check_room(p)
    return fixed_path(problem.present.double().beside(Factors(wq, wk).double()))
