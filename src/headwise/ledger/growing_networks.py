"""Burgund's report (S1) on growing attention: parameter counts, biases, least squares, low-rank solutions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.ledger.entry import Finding, Outcome, Source, at_most, draw, equal, matrix, rounding, shown
from headwise.nn.multihead import MultiHead

SOURCE = Source("S1", "Léo Burgund", "Attention growing networks, internship report", "growing attention")


@SOURCE.claim(
    "S1.count",
    "Remark 1.2.1",
    "The number of parameters does not depend on the number of heads",
    r"2d_ed_k+2d_ed_v",
    Outcome.HOLDS,
    "More heads cost no parameters if the total widths stay the same.",
)
def parameter_count() -> Finding:
    formula, differences = 2 * 12 * 24 + 12 * 36 + 36 * 12, []
    for heads in (1, 2, 3, 4):
        layer = MultiHead(12, heads, key_width=24 // heads, value_width=36 // heads, bias=False)
        differences.append(abs(sum(p.numel() for p in layer.parameters()) - formula))
    return Finding(at_most("largest difference from 2 d_e d_k + 2 d_e d_v over h = 1 ... 4", max(differences), 0))


@SOURCE.claim(
    "S1.bias",
    "Remark 1.2.2",
    "A bias is one more row of the weights, with a column of ones in X",
    r"[X\mid\mathbf 1][W;b^\top]=XW+\mathbf 1b^\top",
    Outcome.HOLDS,
    "Everything proved without biases holds with them.",
)
def bias_by_augmentation() -> Finding:
    x, w, b = draw(7, 5), draw(5, 3, seed=1), draw(3, seed=2)
    wide = torch.cat([x, torch.ones(7, 1, dtype=x.dtype)], 1) @ torch.cat([w, b[None]])
    return Finding(equal("(X | 1) (W; b') = X W + 1 b'", wide, x @ w + b))


@SOURCE.claim(
    "S1.first-order",
    "2",
    "The loss is linear in the scores to first order",
    r"L(S+\partial S)=L(S)+\langle\nabla_SL,\partial S\rangle+o(\|\partial S\|)",
    Outcome.HOLDS,
    "The gradient with respect to the scores is the direction in which to change them.",
)
def first_order() -> Finding:
    s, v, target, move = draw(6, 6).requires_grad_(), draw(6, 4, seed=1), draw(6, 4, seed=2), draw(6, 6, seed=3)
    loss = _attention_loss(s, v, target)
    (gradient,) = torch.autograd.grad(loss, s)

    def rest(size: float) -> float:
        moved = _attention_loss(s + size * move, v, target)
        return abs((moved - loss - size * (gradient * move).sum()).item()) / size

    return Finding(at_most("remainder over step, at 1e-5 relative to 1e-3", rest(1e-5) / rest(1e-3), 0.02))


def _attention_loss(s: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return (torch.softmax(s, -1) @ v - target).square().sum()


@SOURCE.claim(
    "S1.sign",
    "2",
    "The scores should move to B = grad + S",
    r"B=\nabla_SL+XW_QW_K^\top X^\top",
    Outcome.CORRECTED,
    "With plus the loss increases: growth would make the model worse.",
    premise="eta small enough for the first-order model",
    truth="B = S - eta grad, with a step eta > 0",
)
def sign_of_the_target() -> Finding:
    """The change of the loss for B = S + grad and for B = S - grad, with one query and two keys."""
    s, v, target = matrix([[0.0, 0.0]]).requires_grad_(), matrix([[0.0], [1.0]]), matrix([[1.0]])
    loss = _attention_loss(s, v, target)
    (gradient,) = torch.autograd.grad(loss, s)
    up = _attention_loss(s + gradient, v, target).item() - loss.item()
    down = _attention_loss(s - gradient, v, target).item() - loss.item()
    return Finding(
        at_most("change of the loss when scores move to S + grad", up, 0.0),
        corrected=at_most("change when they move to S - eta grad", down, 0.0),
        example=f"one query, scores (0, 0), values 0 and 1, target 1: the loss is {loss.item():g} and its gradient "
        f"{shown(gradient[0])}; with plus the loss changes by {up:+.3f}, with minus by {down:+.3f}",
    )


@SOURCE.claim(
    "S1.least-squares",
    "2",
    "Minimising <grad, dS> under ||dS|| <= gamma is the least-squares problem for B",
    r"\min_{\|\partial S\|\le\gamma}\langle\nabla,\partial S\rangle\to\min\|B-XZX^\top\|^2",
    Outcome.HOLDS_WITH_PREMISE,
    "Where the wanted change cannot be produced, the two problems point in different directions.",
    premise="every dS can be produced: X has full row rank and d_k is large enough",
)
def from_bound_to_least_squares() -> Finding:
    """The direction of the best step of each problem, for X of full row rank and for four tokens of two numbers."""

    def angle(x: Tensor, gradient: Tensor) -> float:
        # among dS = X Z X': the steepest for its length is the projection of -grad; least squares projects as well
        inverse = torch.linalg.pinv(x)
        squares = x @ (inverse @ -gradient @ inverse.mT) @ x.mT
        steepest = -gradient  # what the constrained problem asks for: -gamma grad / ||grad||
        return 1 - ((squares * steepest).sum() / (squares.norm() * steepest.norm())).item()

    full, short = angle(draw(3, 5), draw(3, 3, seed=1)), angle(draw(4, 2), draw(4, 4, seed=1))
    return Finding(
        rounding("1 - cosine between the two steps, X of full row rank", full),
        without=rounding("the same for four tokens of two numbers", short),
        example=f"four tokens of two numbers: the step of the least-squares problem has cosine {1 - short:.2f} with "
        "that of the problem it replaces; it is its projection on what X Z X' can be",
    )


@SOURCE.claim(
    "S1.scale",
    "1.2 and 2",
    "dS = X (W_Q + dW_Q)(W_K + dW_K)' X' - X W_Q W_K' X'",
    r"\partial S=X(W_Q+\partial W_Q)(W_K+\partial W_K)^\top X^\top-XW_QW_K^\top X^\top",
    Outcome.CORRECTED,
    "The definition of S divides by the root of d_k, the problem does not; growing d_k changes that root, hence every "
    "score, unless W_Q absorbs it.",
    premise="one head",
    truth="dS has the factor 1/sqrt(d_k); after growth W_Q is multiplied by sqrt((d_k + p) / d_k)",
)
def missing_scale() -> Finding:
    x, wq, wk, dq, dk = draw(5, 6), *(draw(6, 4, seed=seed) for seed in range(1, 5))

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return x @ q @ k.mT @ x.mT / math.sqrt(q.shape[-1])

    change = scores(wq + dq, wk + dk) - scores(wq, wk)
    printed = x @ (wq + dq) @ (wk + dk).mT @ x.mT - x @ wq @ wk.mT @ x.mT
    wide_q, wide_k = (torch.cat([w, torch.zeros(6, 2, dtype=w.dtype)], -1) for w in (wq, wk))
    grown = scores(wide_q, wide_k), scores(wide_q * math.sqrt(6 / 4), wide_k)
    size = scores(wq, wk).abs().max()
    kept = max((printed / 2 - change).abs().max().item(), (grown[1] - scores(wq, wk)).abs().max().item())
    moved = ((grown[0] - scores(wq, wk)).abs().max() / size).item()
    return Finding(
        equal("the printed change of the scores against the true one, d_k = 4", printed, change),
        corrected=rounding("with the factor, and after growing by two zero dimensions", kept, 1e-11),
        example=f"from d_k = 4 to 6 with zero columns: without rescaling W_Q every score shrinks by {moved:.0%}",
    )


@SOURCE.claim(
    "S1.convex",
    "2",
    "f(Z) = ||B - X Z X'||^2 is convex",
    r"f(\tfrac{Y+Z}2)\le\tfrac{f(Y)+f(Z)}2",
    Outcome.HOLDS,
    "Without a rank constraint every local minimum is global.",
)
def convex() -> Finding:
    x, b = draw(8, 5), draw(8, 8, seed=1)
    f = lambda z: (b - x @ z @ x.mT).square().sum().item()  # noqa: E731
    gaps = []
    for seed in range(50):
        z, y = draw(5, 5, seed=seed + 2), draw(5, 5, seed=seed + 99)
        gaps.append(f((z + y) / 2) - (f(z) + f(y)) / 2)
    return Finding(at_most("largest f(midpoint) - mean of f at the ends", max(gaps), 0.0))


@SOURCE.claim(
    "S1.gradient",
    "2",
    "Its gradient is -2 X'(B - X Z X')X",
    r"\nabla f=-2X^\top(B-XZX^\top)X",
    Outcome.HOLDS,
    "The normal equations follow.",
)
def gradient() -> Finding:
    x, b, z = draw(8, 5), draw(8, 8, seed=1), draw(5, 5, seed=2).requires_grad_()
    (measured,) = torch.autograd.grad((b - x @ z @ x.mT).square().sum(), z)
    formula = -2 * x.mT @ (b - x @ z.detach() @ x.mT) @ x
    return Finding(
        rounding("gradient of f = -2 X'(B - X Z X')X", ((measured - formula).norm() / formula.norm()).item())
    )


@SOURCE.claim(
    "S1.closed-form",
    "2",
    "Its minimiser is (X'X)^-1 X'B X (X'X)^-1",
    r"Z=(X^\top X)^{-1}X^\top BX(X^\top X)^{-1}",
    Outcome.HOLDS,
    "For X of full column rank.",
    premise="X has full column rank, as the text states",
)
def closed_form() -> Finding:
    x, b = draw(8, 5), draw(8, 8, seed=1)
    inverse = torch.linalg.inv(x.mT @ x)
    z = inverse @ x.mT @ b @ x @ inverse
    zero = x.mT @ (b - x @ z @ x.mT) @ x
    return Finding(rounding("gradient at (X'X)^-1 X'B X (X'X)^-1", (zero.norm() / (x.mT @ b @ x).norm()).item()))


@SOURCE.claim(
    "S1.pseudo-inverse",
    "2",
    "In the general case X+ = (X'X)^-1 X'",
    r"X^+=(X^\top X)^{-1}X^\top",
    Outcome.CORRECTED,
    "Short texts make X'X singular; use the SVD.",
    premise="none",
    truth="X+ from the singular value decomposition",
)
def pseudo_inverse() -> Finding:
    """A rank-deficient X, one token of two numbers: the printed formula against the SVD's pseudo-inverse."""
    x, b = matrix([[1.0, 1.0]]), matrix([[3.0]])

    def left_over(inverse: Tensor) -> float:
        z = inverse @ b @ inverse.mT
        return ((x.mT @ (b - x @ z @ x.mT) @ x).norm() / (x.mT @ b @ x).norm()).item()

    gram = x.mT @ x
    try:
        printed = left_over(torch.linalg.inv(gram) @ x.mT)
    except RuntimeError:  # torch's error for a singular matrix is one
        printed = float("inf")
    right = torch.linalg.pinv(x)
    return Finding(
        at_most("gradient left by X+ = (X'X)^-1 X', X of rank 1 of 2", printed, 1e-8),
        corrected=at_most("gradient left by the pseudo-inverse from the SVD", left_over(right), 1e-8),
        example=f"X = (1, 1), one token: X'X = {shown(gram)} has determinant {torch.linalg.det(gram).item():g}; the "
        f"SVD gives X+ = {shown(right[:, 0])}'. X'X is singular whenever tokens span fewer dimensions than the "
        "embedding, as in any short text",
    )


@SOURCE.claim(
    "S1.truncation",
    "2",
    "The best Z of rank r is the truncated SVD of the unconstrained one",
    r"\mathrm{SVD}_r(Z)",
    Outcome.CORRECTED,
    "Truncate in the metric of the data, so that directions without data do not count.",
    premise="one sequence, or sequences with the same Gram matrix X'X",
    truth="truncate (X'X)^(1/2) Z (X'X)^(1/2) and map back",
)
def truncation() -> Finding:
    """Rank-one Z for tokens of unequal size: truncated plainly, and truncated in the metric of the data."""
    x, b, rank = matrix([[10.0, 0.0], [0.0, 1.0]]), matrix([[10.0, 0.0], [0.0, 1.0]]), 1
    plain, metric, best, z = _cuts(x, b, rank)
    scales = torch.tensor([100.0, 30.0, 5.0, 1.0, 0.1, 0.01], dtype=torch.float64)
    drawn = _cuts(draw(20, 6) * scales, draw(20, 20, seed=1), 2)
    fixed = max((metric - best) / best, (drawn[1] - drawn[2]) / drawn[2])
    return Finding(
        at_most("squared error of the plain truncation, against the best possible", plain, best),
        corrected=at_most("relative excess over the best of the truncation in the metric of the data", fixed, 1e-9),
        example=f"X = B = diag(10, 1), rank 1: Z = {shown(z)}, whose SVD keeps the second direction and leaves "
        f"{plain:g}; in the metric of the data the first is kept, which leaves {metric:g}. With 20 tokens of width 6 "
        f"and rank 2: {drawn[0]:.0f} against {drawn[1]:.0f}, best possible {drawn[2]:.0f}",
    )


def _cuts(x: Tensor, b: Tensor, rank: int) -> tuple[float, float, float, Tensor]:
    """||B - X Z X'||^2 for Z truncated plainly, in the metric of the data, and its minimum for that rank; and Z."""
    inverse = torch.linalg.pinv(x)
    z = inverse @ b @ inverse.mT

    def error(y: Tensor) -> float:
        return (b - x @ y @ x.mT).square().sum().item()

    def cut(y: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(y)
        return (u[:, :rank] * s[:rank]) @ v[:rank]

    values, vectors = torch.linalg.eigh(x.mT @ x)
    root = (vectors * values.sqrt()) @ vectors.mT
    back = torch.linalg.inv(root)
    # Eckart-Young on the projected target: X Z X' of rank r are the rank-r matrices within the columns of X
    q, _ = torch.linalg.qr(x)
    energy = torch.linalg.svdvals(q.mT @ b @ q)[:rank].square().sum()
    return error(cut(z)), error(back @ cut(root @ z @ root) @ back), (b.square().sum() - energy).item(), z
