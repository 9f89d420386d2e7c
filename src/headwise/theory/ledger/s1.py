"""S1, on growing attention: parameter counts, biases, the least-squares problem and its low-rank solution."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.nn.multihead import MultiHead
from headwise.theory.ledger.entry import Entry, Finding, Outcome, rounding
from headwise.theory.verdict import Verdict


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def parameter_count() -> Finding:
    counts = {
        heads: sum(
            p.numel()
            for p in MultiHead(12, heads, key_width=24 // heads, value_width=36 // heads, bias=False).parameters()
        )
        for heads in (1, 2, 3, 4)
    }
    formula = 2 * 12 * 24 + 12 * 36 + 36 * 12
    return Finding(
        Verdict(
            "largest difference from 2 d_e d_k + 2 d_e d_v over h = 1 ... 4",
            "",
            max(abs(c - formula) for c in counts.values()),
            0,
            {},
        )
    )


def bias_by_augmentation() -> Finding:
    x, w, b = _draw(7, 5), _draw(5, 3, seed=1), _draw(3, seed=2)
    wide = torch.cat([x, torch.ones(7, 1, dtype=x.dtype)], 1) @ torch.cat([w, b[None]])
    return Finding(rounding("[X | 1] [W; b'] = X W + 1 b'", (wide - (x @ w + b)).abs().max().item()))


def _attention_loss(s: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return (torch.softmax(s, -1) @ v - target).square().sum()


def sign_of_the_target() -> Finding:
    """Move the scores to B and compare the loss with B = S + eta grad and with B = S - eta grad."""
    s, v, target = _draw(6, 6).requires_grad_(), _draw(6, 4, seed=1), _draw(6, 4, seed=2)
    loss = _attention_loss(s, v, target)
    (gradient,) = torch.autograd.grad(loss, s)
    step = 0.05
    up = _attention_loss(s + step * gradient, v, target).item() - loss.item()
    down = _attention_loss(s - step * gradient, v, target).item() - loss.item()
    return Finding(
        Verdict("change of the loss when scores move to S + eta grad", "", up, 0.0, {}),
        corrected=Verdict("change when they move to S - eta grad", "", down, 0.0, {}),
        example=f"with plus the loss changes by {up:+.3f}, with minus by {down:+.3f}",
    )


def first_order() -> Finding:
    s, v, target, move = _draw(6, 6).requires_grad_(), _draw(6, 4, seed=1), _draw(6, 4, seed=2), _draw(6, 6, seed=3)
    loss = _attention_loss(s, v, target)
    (gradient,) = torch.autograd.grad(loss, s)

    def rest(size: float) -> float:
        moved = _attention_loss(s + size * move, v, target)
        return abs((moved - loss - size * (gradient * move).sum()).item()) / size

    return Finding(Verdict("remainder over step, at 1e-5 relative to 1e-3", "", rest(1e-5) / rest(1e-3), 0.02, {}))


def convex() -> Finding:
    x, b = _draw(8, 5), _draw(8, 8, seed=1)
    f = lambda z: (b - x @ z @ x.mT).square().sum().item()  # noqa: E731
    gaps = []
    for seed in range(50):
        z, y = _draw(5, 5, seed=seed + 2), _draw(5, 5, seed=seed + 99)
        gaps.append(f((z + y) / 2) - (f(z) + f(y)) / 2)
    return Finding(Verdict("largest f(midpoint) - mean of f at the ends", "", max(gaps), 0.0, {}))


def gradient() -> Finding:
    x, b, z = _draw(8, 5), _draw(8, 8, seed=1), _draw(5, 5, seed=2).requires_grad_()
    (found,) = torch.autograd.grad((b - x @ z @ x.mT).square().sum(), z)
    formula = -2 * x.mT @ (b - x @ z.detach() @ x.mT) @ x
    return Finding(rounding("gradient of f = -2 X'(B - X Z X')X", ((found - formula).norm() / formula.norm()).item()))


def closed_form() -> Finding:
    x, b = _draw(8, 5), _draw(8, 8, seed=1)
    inverse = torch.linalg.inv(x.mT @ x)
    z = inverse @ x.mT @ b @ x @ inverse
    zero = x.mT @ (b - x @ z @ x.mT) @ x
    return Finding(rounding("gradient at (X'X)^-1 X'B X (X'X)^-1", (zero.norm() / (x.mT @ b @ x).norm()).item()))


def pseudo_inverse() -> Finding:
    """A rank-deficient X: the printed formula against the SVD's pseudo-inverse."""
    x = _draw(6, 2) @ _draw(2, 5, seed=1)
    b = _draw(6, 6, seed=2)
    scale = (x.mT @ b @ x).norm()

    def left_over(inverse: Tensor) -> float:
        z = inverse @ b @ inverse.mT
        return ((x.mT @ (b - x @ z @ x.mT) @ x).norm() / scale).item()

    gram = x.mT @ x
    try:
        printed = left_over(torch.linalg.inv(gram) @ x.mT)
    except RuntimeError:  # torch's error for a singular matrix is one
        printed = float("inf")
    return Finding(
        Verdict("gradient left by X+ = (X'X)^-1 X' where X has rank 2 of 5", "", printed, 1e-8, {}),
        corrected=Verdict(
            "gradient left by the pseudo-inverse from the SVD", "", left_over(torch.linalg.pinv(x)), 1e-8, {}
        ),
        example="X'X is singular whenever tokens span fewer dimensions than the embedding, as in any short text",
    )


def truncation() -> Finding:
    """Rank-2 Z for an ill-conditioned X: the SVD of Z cut, against the cut in the data's metric."""
    scales = torch.tensor([100.0, 30.0, 5.0, 1.0, 0.1, 0.01], dtype=torch.float64)
    x, b, rank = _draw(20, 6) * scales, _draw(20, 20, seed=1), 2
    inverse = torch.linalg.pinv(x)
    z = inverse @ b @ inverse.mT
    error = lambda y: (b - x @ y @ x.mT).square().sum().item()  # noqa: E731

    def cut(y: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(y)
        return (u[:, :rank] * s[:rank]) @ v[:rank]

    values, vectors = torch.linalg.eigh(x.mT @ x)
    root = (vectors * values.sqrt()) @ vectors.mT
    back = torch.linalg.inv(root)
    plain, metric = error(cut(z)), error(back @ cut(root @ z @ root) @ back)
    floor = error(z)
    best = _best_of_rank(x, b, rank)
    return Finding(
        Verdict(
            "what the plain cut leaves beyond the best, relative to the data",
            "",
            (plain - best) / (error(0 * z) - floor),
            1e-6,
            {},
        ),
        corrected=Verdict(
            "what the cut in the data's metric leaves", "", (metric - best) / (error(0 * z) - floor), 1e-6, {}
        ),
        example=f"squared error {plain:.1f} by cutting Z, {metric:.1f} in the data's metric, best possible {best:.1f}",
    )


def _best_of_rank(x: Tensor, b: Tensor, rank: int) -> float:
    """Eckart-Young on the projected target: X Z X' of rank r are the rank-r matrices within the columns of X."""
    q, _ = torch.linalg.qr(x)
    inside = q.mT @ b @ q
    values = torch.linalg.svdvals(inside)
    return (b.square().sum() - values[:rank].square().sum()).item()


ENTRIES = (
    Entry(
        "S1.count",
        "Remark 1.2.1",
        "The number of parameters does not depend on the number of heads",
        r"2d_ed_k+2d_ed_v",
        Outcome.HOLDS,
        "Heads are free in parameters when total widths are kept.",
        parameter_count,
    ),
    Entry(
        "S1.bias",
        "Remark 1.2.2",
        "Biases are a column of ones",
        r"[X\mid\mathbf 1][W;b^\top]=XW+\mathbf 1b^\top",
        Outcome.HOLDS,
        "Everything proved without biases holds with them.",
        bias_by_augmentation,
    ),
    Entry(
        "S1.first-order",
        "2",
        "The loss is linear in the scores to first order",
        r"L(S+\partial S)=L(S)+\langle\nabla_SL,\partial S\rangle+o(\|\partial S\|)",
        Outcome.HOLDS,
        "The gradient at the scores says where to go.",
        first_order,
    ),
    Entry(
        "S1.sign",
        "2",
        "The scores should move to B = grad + S",
        r"B=\nabla_SL+XW_QW_K^\top X^\top",
        Outcome.CORRECTED,
        "With plus the loss goes up: growth would make the model worse.",
        sign_of_the_target,
        truth="B = S - eta grad, with a step eta > 0",
    ),
    Entry(
        "S1.convex",
        "2",
        "f(Z) = ||B - X Z X'||^2 is convex",
        r"f(\tfrac{Y+Z}2)\le\tfrac{f(Y)+f(Z)}2",
        Outcome.HOLDS,
        "Without a rank constraint there is one best value.",
        convex,
    ),
    Entry(
        "S1.gradient",
        "2",
        "Its gradient is -2 X'(B - X Z X')X",
        r"\nabla f=-2X^\top(B-XZX^\top)X",
        Outcome.HOLDS,
        "The normal equations follow.",
        gradient,
    ),
    Entry(
        "S1.closed-form",
        "2",
        "Its minimiser is (X'X)^-1 X'B X (X'X)^-1",
        r"Z=(X^\top X)^{-1}X^\top BX(X^\top X)^{-1}",
        Outcome.HOLDS,
        "For X of full column rank.",
        closed_form,
        premise="X has full column rank, as the source says",
    ),
    Entry(
        "S1.pseudo-inverse",
        "2",
        "In the general case X+ = (X'X)^-1 X'",
        r"X^+=(X^\top X)^{-1}X^\top",
        Outcome.CORRECTED,
        "Short texts make X'X singular; use the SVD.",
        pseudo_inverse,
        truth="X+ from the singular value decomposition",
    ),
    Entry(
        "S1.truncation",
        "2",
        "The best Z of rank r is the truncated SVD of the unconstrained one",
        r"\mathrm{SVD}_r(Z)",
        Outcome.CORRECTED,
        "Cut in the data's metric: directions that the data never visits must not count.",
        truncation,
        truth="cut (X'X)^(1/2) Z (X'X)^(1/2) and map back",
    ),
)
