"""The four questions with which S0 ends: a step of the proof, the norm, the size of the input, and the conclusion.

The first two are answered by a gradient search: its worst case, rounded so that a reader can check it, is shown.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from headwise.ledger.draws import draw, matrix, shown
from headwise.ledger.entry import Entry, Finding, Outcome
from headwise.linalg.norms import composite_norm, spectral_norm
from headwise.theory.collapse import log_bound
from headwise.theory.counterexamples import Worst, search
from headwise.theory.residual import relative_residual, residual
from headwise.theory.verdict import Verdict

WIDEST = 1.25  # e^x <= 1 + 2x, which the step rests on, up to there


def _sides(r: Tensor, e: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, softmax(r), D and R for scores 1 r' + E, where rows of E spread by less than `WIDEST`, and res X of size "
    "one."""
    e = WIDEST * torch.sigmoid(e)
    rest = residual(x)
    return torch.softmax(r + e, -1), torch.softmax(r, -1), _spread(e), rest / rest.abs().max()


def _spread(e: Tensor) -> Tensor:
    return (e.amax(-1) - e.amin(-1)).unsqueeze(-1)


def _starts(n: int, d: int):
    return lambda g: tuple(torch.randn(*size, dtype=torch.float64, generator=g) for size in ((n,), (n, n), (n, d)))


def entrywise_gap(n: int, d: int) -> Worst:
    """exp(P R) <= exp((I + 2D) 1 softmax(r)' R), the same inequality with both sides positive, at its worst entry."""

    def left(*z: Tensor) -> Tensor:
        p, s, wide, rest = _sides(*z)
        return (p @ rest - (1 + 2 * wide) * (s @ rest)).max()

    return search(left, lambda *z: torch.zeros_like(z[0]).sum(), _starts(n, d), starts=8, steps=150)


def corrected_gap(n: int, d: int) -> Worst:
    """|P R - 1 s'R| <= 2D 1 s'|R| at its worst entry."""

    def left(*z: Tensor) -> Tensor:
        p, s, wide, rest = _sides(*z)
        return ((p @ rest - s @ rest).abs() / (2 * wide * (s @ rest.abs()))).max().log()

    return search(left, lambda *z: torch.zeros_like(z[0]).sum(), _starts(n, d), starts=20, steps=150)


def entrywise_step() -> Finding:
    """(9): P R <= (I + 2D) 1 softmax(r)' R entry by entry, P = softmax(1 r' + E), D_ii = max_jj' |E_ij - E_ij'|."""
    r, e, _ = entrywise_gap(2, 1).at
    r, e = ((r - r.min()) * 10).round() / 10, (WIDEST * torch.sigmoid(e) * 10).round() / 10  # one digit, to be checked
    e = e - e.amin(-1, keepdim=True)
    rest = matrix([[1.0], [-1.0]]) * (1 if r[0] < r[1] else -1)
    left, right = torch.softmax(r + e, -1) @ rest, (1 + 2 * _spread(e)) * (torch.softmax(r, -1) @ rest)
    row = int((left - right).argmax())
    fixed = max(corrected_gap(n, d).gap for n, d in ((2, 1), (5, 3)))
    return Finding(
        Verdict("P R - (I + 2D) 1 softmax(r)' R at its worst entry", "", (left - right).max().item(), 0.0, {}),
        corrected=Verdict("largest log(|P R - 1 s'R| / 2D 1 s'|R|) found by gradient search", "", fixed, 0.0, {}),
        example=f"two tokens, R = {shown(rest[:, 0])}', r = {shown(r)}, this row of E = {shown(e[row])}: the left side "
        f"is {left[row].item():.3f}, the right side {right[row].item():.3f} (found by gradient search, seed 0, and "
        "rounded). A factor above one lowers a negative number, and R has both signs since its columns sum to zero",
    )


def triangle_gap(n: int = 2) -> Worst:
    """||A + B|| <= ||A|| + ||B|| for the composite norm."""
    return search(
        lambda a, b: composite_norm(a + b).log(),
        lambda a, b: (composite_norm(a) + composite_norm(b)).log(),
        lambda g: tuple(torch.randn(n, n, dtype=torch.float64, generator=g) for _ in range(2)),
        starts=20,
        steps=200,
        rate=0.02,
    )


def composite_is_a_norm() -> Finding:
    worst = triangle_gap()
    a, b = ((x / x.abs().max()).round() for x in worst.at)  # whole numbers, to be checked by hand
    sides = composite_norm(a + b).item(), (composite_norm(a) + composite_norm(b)).item()
    draws = [draw(4, 5, seed=seed) for seed in range(200)]
    above = max((spectral_norm(x) / composite_norm(x)).log().item() for x in draws)
    product = max(
        (composite_norm(x.mT @ y) / (composite_norm(x.mT) * composite_norm(y))).log().item()
        for x, y in itertools.pairwise(draws)
    )
    return Finding(
        Verdict("||A + B|| against ||A|| + ||B||", "", sides[0], sides[1], {}),
        corrected=Verdict(
            "log(||X||_2 / ||X||_(1,inf)) and log(||XY|| / ||X|| ||Y||)", "", max(above, product), 0.0, {}
        ),
        example=f"A = {shown(a)}, B = {shown(b)}: ||A + B|| = {sides[0]:.3g} > {sides[1]:.3g} = ||A|| + ||B||. The "
        f"gradient search (seed 0, start {worst.start}) reaches a ratio of {math.exp(worst.gap):.4f} and these are its "
        f"matrices in whole numbers, ratio {sides[0] / sides[1]:.4f}",
    )


def input_residual_below_one() -> Finding:
    def change(size: float) -> float:
        known = {"beta": 1.0, "heads": 1, "key_width": 16, "log_residual": math.log(size)}
        return log_bound(4, **known) - log_bound(3, **known)

    return Finding(
        Verdict(
            "log of the bound, one layer deeper, where sqrt(4 beta / sqrt d) ||res X|| = 0.9", "", change(0.9), 0.0, {}
        ),
        without=Verdict("the same where it is 1.1", "", change(1.1), 0.0, {}),
        example="at beta = 1, d = 16 the bound is ||res X||^(3^L): 0.9, 0.729, 0.387 … or 1.1, 1.331, 2.358 …; the "
        "second is true and empty",
    )


def low_rank_causes_collapse() -> Finding:
    """If low rank were the reason, a P of full rank would keep tokens apart."""
    p = matrix([[0.9, 0.1], [0.1, 0.9]])
    x, depth = matrix([[1.0], [-1.0]]), 100
    values = torch.linalg.svdvals(p)
    y = torch.linalg.matrix_power(p, depth) @ (x + 1)
    lost = 1 - (relative_residual(y) / relative_residual(x + 1)).item() if values.min() > 0.5 else 0.0
    return Finding(
        Verdict(f"share of the residual that {depth} layers of a full-rank P lose", "", lost, 0.5, {}),
        example=f"P = {shown(p)}, the softmax of [[log 9, 0], [0, log 9]], has singular values {values[0]:.3g} and "
        f"{values[1]:.3g}: full rank. Each layer multiplies the difference of two tokens by 0.8, and after {depth} "
        f"layers the relative residual is {relative_residual(y).item():.0e}. Averaging makes tokens equal, not low "
        "rank",
    )


ENTRIES = (
    Entry(
        "S0.question-1",
        "2.4, step (9)",
        "P R <= (I + 2D) 1 softmax(r)' R entry by entry",
        r"PR\le(I+2D)\mathbf 1\,\mathrm{softmax}(r)^\top R",
        Outcome.CORRECTED,
        "The proof survives with absolute values, and so does the theorem.",
        entrywise_step,
        truth="|PR - 1 softmax(r)'R| <= 2D 1 softmax(r)'|R|",
    ),
    Entry(
        "S0.question-2",
        "2.4, question 2",
        "The composite norm is a norm",
        r"\|A+B\|_{1,\infty}\le\|A\|_{1,\infty}+\|B\|_{1,\infty}",
        Outcome.CORRECTED,
        "It cannot serve as a distance, but if it vanishes every norm does.",
        composite_is_a_norm,
        truth="it bounds the 2-norm from above and is submultiplicative, which is all the proof needs for one head",
    ),
    Entry(
        "S0.question-3",
        "2.4, question 3",
        "The bound tends to zero with depth",
        r"\sqrt{4\beta/\sqrt d}\,\|\mathrm{res}X\|<1",
        Outcome.HOLDS_WITH_PREMISE,
        "For inputs and weights of ordinary size the bound says nothing; collapse still happens, for other reasons.",
        input_residual_below_one,
        premise="sqrt(4 beta / sqrt(d)) ||res X|| < 1",
    ),
    Entry(
        "S0.question-4",
        "2.3 and 2.4, conclusion",
        "Low rank of softmax matrices is the reason for the loss of rank",
        r"\mathrm{rank}(\tilde P)\ll n\Rightarrow\text{collapse}",
        Outcome.REFUTED,
        "A full-rank attention matrix collapses tokens too: averaging does it. Look at what is averaged, not at rank.",
        low_rank_causes_collapse,
    ),
)
