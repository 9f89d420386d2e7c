"""S0, on the loss of rank: softmax, paths, the bound, low rank, the table, and its four open questions."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from headwise.linalg.norms import composite_norm, one_norm, spectral_norm
from headwise.theory import concentration, paths
from headwise.theory.collapse import log_bound
from headwise.theory.complexity import LENGTHS, claimed_growth, fit, growth
from headwise.theory.ledger.entry import Entry, Finding, Outcome, rounding
from headwise.theory.residual import relative_residual, residual
from headwise.theory.search import search
from headwise.theory.stack import random_stack
from headwise.theory.verdict import Verdict


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_generator(seed))


def shift_invariance() -> Finding:
    a, c = _draw(6, 9), _draw(6, 1, seed=1)
    error = (torch.softmax(a + c, -1) - torch.softmax(a, -1)).abs().max().item()
    wrong = (torch.softmax(a + _draw(1, 9, seed=2), -1) - torch.softmax(a, -1)).abs().max().item()
    return Finding(
        rounding("softmax(A + x 1') = softmax(A), a constant for each row", error),
        without=rounding("the same with a constant for each column", wrong),
        example="a constant for each column is not cancelled: the rows then attend elsewhere",
    )


def path_decomposition() -> Finding:
    stack, x = random_stack(3, 3, 6, bias=0.5, scale=1.5, generator=_generator()), _draw(7, 6, seed=1)
    total = sum(y for _, y in paths.single_paths(stack, x))
    groups = paths.by_length(stack, x)
    error = ((total + groups.bias - groups.output).norm() / groups.output.norm()).item()
    return Finding(rounding("27 paths and one bias add up to the network", error))


def path_decomposition_with_skips() -> Finding:
    stack, x = random_stack(3, 2, 6, bias=0.5, skip=True, generator=_generator()), _draw(7, 6, seed=1)
    walked = list(paths.single_paths(stack, x))
    groups = paths.by_length(stack, x)
    error = ((sum(y for _, y in walked) + groups.bias - groups.output).norm() / groups.output.norm()).item()
    count = Verdict("(H + 1)^L paths", "", float(len(walked)), 3.0**3, {})
    return Finding(rounding("(H + 1)^L paths add up to the network", error if count.holds else math.inf))


def _bound_gap(heads: int, seed: int = 0) -> Verdict:
    n, d, k = 5, 4, 2

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        sizes = ((n, d), (heads, d, k), (heads, d, k), (heads, d, d))
        return tuple(torch.randn(*size, dtype=torch.float64, generator=generator) for size in sizes)

    def left(x: Tensor, wq: Tensor, wk: Tensor, w: Tensor) -> Tensor:
        p = torch.softmax((x @ wq) @ (x @ wk).mT / math.sqrt(k), -1)
        return composite_norm(residual((p @ x @ w).sum(0))).log()

    def right(x: Tensor, wq: Tensor, wk: Tensor, w: Tensor) -> Tensor:
        beta = (one_norm(wq @ wk.mT) * composite_norm(w)).max()
        return (4 * heads * beta / math.sqrt(k)).log() + 3 * composite_norm(residual(x)).log()

    worst = search(left, right, draw, starts=6, steps=120, seed=seed)
    return Verdict("largest log(left / right) found by gradient search", "", worst.gap, 0.0, {})


def bound_one_head() -> Finding:
    found = _bound_gap(1)
    return Finding(found, example=f"the tightest case found has left/right = {math.exp(found.measured):.2f}")


def bound_many_heads() -> Finding:
    found = _bound_gap(3)
    return Finding(found, example=f"the tightest case found has left/right = {math.exp(found.measured):.2f}")


def residual_minimiser() -> Finding:
    """The mean against a gradient search for a better row, in the spectral and in the infinity norm."""
    x = _draw(6, 3)

    def gain(norm) -> float:
        best, row = norm(residual(x)).item(), x.mean(0).clone().requires_grad_()
        optimizer = torch.optim.Adam([row], lr=0.02)
        found = best
        for _ in range(300):
            value = norm(x - row)
            found = min(found, value.item())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return (best - found) / best

    infinity = lambda y: y.abs().sum(-1).amax(-1)  # noqa: E731
    return Finding(
        Verdict("how much a better row than the mean gains, 2-norm", "", gain(spectral_norm), 1e-6, {}),
        without=Verdict("the same in the infinity norm", "", gain(infinity), 1e-6, {}),
        example="in the infinity norm another row is closer than the mean",
    )


def composite_is_a_norm() -> Finding:
    a = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    sides = composite_norm(a + a.mT).item(), (composite_norm(a) + composite_norm(a.mT)).item()
    draws = [_draw(4, 5, seed=seed) for seed in range(200)]
    above = max((spectral_norm(x) - composite_norm(x)).item() for x in draws)
    product = max(
        (composite_norm(x.mT @ y) / (composite_norm(x.mT) * composite_norm(y))).item()
        for x, y in itertools.pairwise(draws)
    )
    return Finding(
        Verdict("||A + A'|| against ||A|| + ||A'||", "", sides[0], sides[1], {}),
        corrected=Verdict(
            "||X||_2 <= ||X||_(1,inf), and it is submultiplicative", "", max(above, product - 1), 0.0, {}
        ),
        example=f"A = [[1, 1], [0, 0]]: ||A + A'|| = {sides[0]:.3g} > {sides[1]:.3g} = ||A|| + ||A'||",
    )


def input_residual_below_one() -> Finding:
    def growth(size: float) -> float:
        common = {"beta": 1.0, "heads": 1, "key_width": 16, "log_residual": math.log(size)}
        return log_bound(4, **common) - log_bound(3, **common)

    return Finding(
        Verdict(
            "log of the bound, one layer deeper, where sqrt(4 beta / sqrt d) ||res X|| = 0.9", "", growth(0.9), 0.0, {}
        ),
        without=Verdict("the same where it is 1.1", "", growth(1.1), 0.0, {}),
        example="at beta = 1, d = 16 an input residual of 1.1 makes the bound grow with depth: it is true and empty",
    )


def entrywise_step() -> Finding:
    """(9): P R <= (I + 2D) 1 softmax(r)' R entry by entry, P = softmax(1 r' + E), D_ii = max_jj' |E_ij - E_ij'|."""
    worst, fixed = -math.inf, -math.inf
    for seed in range(50):
        n, d = 5, 3
        r, e, x = _draw(n, seed=seed), 0.2 * _draw(n, n, seed=seed + 100), residual(_draw(n, d, seed=seed + 200))
        p, s = torch.softmax(r + e, -1), torch.softmax(r, -1)
        wide = (e.amax(-1) - e.amin(-1)).unsqueeze(-1)
        assert bool((wide < 1.25).all()), "e^x <= 1 + 2x needs x < 1.25"
        worst = max(worst, (p @ x - (1 + 2 * wide) * (s @ x)).max().item())
        fixed = max(fixed, ((p @ x - s @ x).abs() - 2 * wide * (s @ x.abs())).max().item())
    return Finding(
        Verdict("largest P R - (I + 2D) 1 softmax(r)' R", "", worst, 0.0, {}),
        corrected=Verdict("largest |P R - 1 s'R| - 2D 1 s'|R|", "", fixed, 0.0, {}),
        example="R has entries of both signs (columns sum to zero), and a factor above one lowers a negative number",
    )


def low_rank() -> Finding:
    n, epsilon = 512, 0.5
    p = torch.softmax(_draw(n, 16) @ _draw(16, n, seed=1) / 4, -1)
    w = _draw(n, 1, seed=2)
    w = w - w.mean()
    k = concentration.sketch_size(n, epsilon)
    failed = concentration.failures_of_low_rank(p, w, k, epsilon, 40, generator=_generator(3))
    easy = concentration.failures_of_low_rank(p, 1 + 0.01 * w, k, epsilon, 40, generator=_generator(4))
    mean, error = concentration.measured_square(p, w, k, 60, generator=_generator(5))
    expected = concentration.expected_square(p, w, k)
    return Finding(
        Verdict(f"share of draws in which the claim fails, n = {n}, k = {k}", "", failed.rate, 0.05, {}),
        corrected=Verdict("second moment, distance in standard errors", "", abs(mean - expected) / error, 4.0, {}),
        example=f"zero-mean w fails in {failed.failures} of {failed.draws} draws, nearly constant w in {easy.failures}",
    )


def rank_of_the_sketch() -> Finding:
    sizes = [concentration.sketch_size(n, 0.5) for n in (2**8, 2**16)]
    ratio = sizes[1] / sizes[0]
    return Finding(
        Verdict("distance of k(n^2) / k(n) from 4, as log n * log n would have it", "", abs(ratio - 4), 0.1, {}),
        corrected=Verdict("distance from 2, as log n has it", "", abs(ratio - 2), 0.1, {}),
        example=f"k(256) = {sizes[0]}, k(65536) = {sizes[1]}",
    )


def low_rank_causes_collapse() -> Finding:
    """If low rank were the reason, a P of full rank would keep tokens apart."""
    n, depth = 16, 1000
    x = _draw(n, 8)
    p = torch.softmax(6 * torch.eye(n, dtype=torch.float64) + 0.5 * _draw(n, n, seed=1), -1)
    rank = int((torch.linalg.svdvals(p) > 1e-3).sum())
    y = torch.linalg.matrix_power(p, depth) @ x
    lost = 1 - (relative_residual(y) / relative_residual(x)).item()
    return Finding(
        Verdict(f"share of the residual that {depth} layers of a full-rank P lose", "", lost, 0.5, {}),
        example=f"all {rank} of {n} singular values exceed 1e-3, and after {depth} layers the relative residual is "
        f"{relative_residual(y).item():.0e}: averaging makes tokens equal, not low rank",
    )


def _row(name: str) -> Finding:
    found, claimed = growth(name, "multiply_adds"), claimed_growth(name)
    return Finding(
        Verdict("fitted exponent of counted multiply-adds, claimed exponent", "", found.exponent, claimed + 0.05, {})
    )


def _steps(name: str, claimed: str) -> Finding:
    found = growth(name, "depth").exponent
    limits = {"O(1)": 0.0, "O(log n)": fit(LENGTHS, [math.log2(n) for n in LENGTHS]).exponent, "O(n)": 1.0}
    return Finding(
        Verdict(f"fitted exponent of the longest chain, claimed {claimed}", "", found, limits[claimed] + 0.02, {})
    )


ENTRIES = (
    Entry(
        "S0.shift",
        "2.1",
        "softmax(A + x1') = softmax(A)",
        r"\mathrm{softmax}(A + x\mathbf 1^\top)=\mathrm{softmax}(A)",
        Outcome.HOLDS_WITH_PREMISE,
        "A key bias in attention does nothing; a query bias does.",
        shift_invariance,
        premise="the constant is added to rows, not to columns",
    ),
    Entry(
        "S0.paths",
        "Theorem 2.1",
        "A stack of attention is the sum over its H^L paths, plus a constant row",
        r"\mathrm{SAN}(X)=\sum_{p\in[H]^L}P_pXW_p+\mathbf 1b^\top",
        Outcome.HOLDS,
        "Every head sequence can be looked at by itself.",
        path_decomposition,
    ),
    Entry(
        "S0.paths-skip",
        "Theorem 2.1",
        "With skip connections there are (H+1)^L paths",
        r"|\mathrm{paths}|=(H+1)^L",
        Outcome.HOLDS,
        "Skips are heads whose P is the identity.",
        path_decomposition_with_skips,
    ),
    Entry(
        "S0.bound",
        "Theorem 2.2",
        "Pure attention with one head loses its residual doubly exponentially",
        r"\|\mathrm{res}\,\mathrm{SAN}(X)\|\le(4\beta/\sqrt d)^{(3^L-1)/2}\|\mathrm{res}X\|^{3^L}",
        Outcome.HOLDS,
        "The bound was not broken by a search for violations; it is loose by an order of magnitude at L = 1.",
        bound_one_head,
    ),
    Entry(
        "S0.bound-heads",
        "Theorem 2.2",
        "The same with H heads and 4 H beta",
        r"\beta\to H\beta",
        Outcome.HOLDS,
        "More heads do not prevent collapse; skips do.",
        bound_many_heads,
    ),
    Entry(
        "S0.residual",
        "Definition 2.1",
        "The mean is the row to take away",
        r"\bar x=\arg\min_x\|X-\mathbf 1x^\top\|_2",
        Outcome.HOLDS_WITH_PREMISE,
        "Measure residuals with the mean, in a unitarily invariant norm.",
        residual_minimiser,
        premise="a unitarily invariant norm, such as the 2-norm",
    ),
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
        truth="it bounds the 2-norm from above and is submultiplicative, which is all the proof needs",
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
        "A full-rank attention matrix collapses tokens too: averaging does it.",
        low_rank_causes_collapse,
    ),
    Entry(
        "S0.low-rank",
        "Theorem 2.3",
        "A random sketch of rank O(log n) keeps P w to eps ||P w||",
        r"\|PR^\top Rw-Pw\|\le\varepsilon\|Pw\|",
        Outcome.CORRECTED,
        "The error is relative to ||P|| ||w||, not to the output: for zero-mean values the sketch is noise.",
        low_rank,
        truth="E||PR'Rw - Pw||^2 = (||P||_F^2 ||w||^2 + ||Pw||^2) / k",
    ),
    Entry(
        "S0.rank",
        "2.3",
        "The rank is Theta(log n * log n)",
        r"\mathrm{rank}\,\tilde P=\Theta(\log n\cdot\log n)",
        Outcome.CORRECTED,
        "The theorem above it has Theta(log n).",
        rank_of_the_sketch,
        truth="rank = Theta(log n)",
    ),
    *(
        Entry(
            f"S0.table-{name}",
            "Table 1",
            f"{title} costs {cost} a layer",
            rf"\text{{{title}}}: {cost}",
            Outcome.HOLDS,
            meaning,
            lambda name=name: _row(name),
        )
        for name, title, cost, meaning in (
            ("recurrent", "A recurrent layer", "O(n)", "Linear, but one step after the other."),
            ("softmax", "A Transformer", "O(n^2)", "Exact attention."),
            ("strided", "A Sparse Transformer", "O(n sqrt n)", "Each query meets about 2 sqrt n keys."),
            (
                "hashed",
                "A Reformer",
                "O(n log n)",
                "Its matrix products are linear for a fixed chunk; sorting adds the logarithm.",
            ),
            ("projected", "A Linformer", "O(n)", "For a fixed projection size."),
        )
    ),
    *(
        Entry(
            f"S0.steps-{name}",
            "Table 1",
            f"{title} needs {steps} sequential operations",
            rf"\text{{{title}}}: {steps}",
            Outcome.HOLDS,
            meaning,
            lambda name=name, steps=steps: _steps(name, steps),
        )
        for name, title, steps, meaning in (
            ("recurrent", "A recurrent layer", "O(n)", "It cannot be computed in parallel over tokens."),
            ("softmax", "A Transformer", "O(1)", "All queries at once."),
            ("hashed", "A Reformer", "O(log n)", "The sort."),
            ("projected", "A Linformer", "O(1)", "Two products."),
        )
    ),
)
