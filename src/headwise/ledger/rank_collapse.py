"""S0, on the loss of rank: softmax, paths, the bound, low rank.  The questions it ends with are in s0_questions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.ledger.draws import draw, generator, matrix
from headwise.ledger.entry import Entry, Finding, Outcome, rounding
from headwise.linalg.norms import composite_norm, infinity_norm, one_norm, spectral_norm
from headwise.theory import concentration, paths
from headwise.theory.collapse import collapse
from headwise.theory.counterexamples import Worst, search
from headwise.theory.residual import residual
from headwise.theory.stack import random_stack
from headwise.theory.verdict import Verdict


def shift_invariance() -> Finding:
    a, c = draw(6, 9), draw(6, 1, seed=1)
    error = (torch.softmax(a + c, -1) - torch.softmax(a, -1)).abs().max().item()
    small, by_column = matrix([[0.0, 0.0]]), matrix([[math.log(3.0), 0.0]])
    before, after = torch.softmax(small, -1)[0], torch.softmax(small + by_column, -1)[0]
    return Finding(
        rounding("softmax(A + x 1') = softmax(A), a constant for each row", error),
        without=rounding("the same with a constant for each column", (after - before).abs().max().item()),
        example=f"the row (0, 0) gives weights {before[0]:g}, {before[1]:g}; adding log 3 to the first column gives "
        f"{after[0]:.3g}, {after[1]:.3g}, adding it to both changes nothing",
    )


def path_decomposition() -> Finding:
    stack, x = random_stack(3, 3, 6, bias=0.5, scale=1.5, generator=generator()), draw(7, 6, seed=1)
    total = sum(y for _, y in paths.single_paths(stack, x))
    groups = paths.by_length(stack, x)
    error = ((total + groups.bias - groups.output).norm() / groups.output.norm()).item()
    constant = residual(groups.bias).norm().item()
    return Finding(rounding("27 paths and one bias, the same for all tokens, add up to the network", error + constant))


def path_decomposition_with_skips() -> Finding:
    stack, x = random_stack(3, 2, 6, bias=0.5, skip=True, generator=generator()), draw(7, 6, seed=1)
    walked = list(paths.single_paths(stack, x))
    groups = paths.by_length(stack, x)
    error = ((sum(y for _, y in walked) + groups.bias - groups.output).norm() / groups.output.norm()).item()
    return Finding(rounding("(H + 1)^L paths add up to the network", error if len(walked) == 3**3 else math.inf))


def bound_gap(
    heads: int, n: int, d: int, k: int, *, constant: float = 4.0, starts: int = 20, steps: int = 250
) -> Worst:
    """Search for weights and inputs that break the bound of one layer, with `constant` where the theorem has 4."""

    def start(g: torch.Generator) -> tuple[Tensor, ...]:
        sizes = ((n, d), (heads, d, k), (heads, d, k), (heads, d, d))
        return tuple(torch.randn(*size, dtype=torch.float64, generator=g) for size in sizes)

    def left(x: Tensor, wq: Tensor, wk: Tensor, w: Tensor) -> Tensor:
        p = torch.softmax((x @ wq) @ (x @ wk).mT / math.sqrt(k), -1)
        return composite_norm(residual((p @ x @ w).sum(0))).log()

    def right(x: Tensor, wq: Tensor, wk: Tensor, w: Tensor) -> Tensor:
        beta = (one_norm(wq @ wk.mT) * composite_norm(w)).max()
        return (constant * heads * beta / math.sqrt(k)).log() + 3 * composite_norm(residual(x)).log()

    return search(left, right, start, starts=starts, steps=steps)


def _deep_gap(heads: int) -> float:
    """Four layers, small inputs so that the bound shrinks, and inputs of ordinary size."""
    found = []
    for seed in range(10):
        stack = random_stack(4, heads, 6, generator=generator(seed))
        found += [collapse(stack, size * draw(5, 6, seed=seed + 100)).verdict().measured for size in (0.02, 1.0)]
    return max(found)


def _bound(heads: int, small: tuple[int, int, int], large: tuple[int, int, int]) -> Finding:
    found = [bound_gap(heads, *sizes) for sizes in (small, large)]
    deep = _deep_gap(heads)
    worst = max(found, key=lambda each: each.gap)
    x = worst.at[0]
    return Finding(
        Verdict("largest log(left / right) found by gradient search", "", max(worst.gap, deep), 0.0, {}),
        example=f"the tightest layer found has left/right = {math.exp(worst.gap):.3f}, with {x.shape[0]} tokens of "
        f"width {x.shape[1]}; four layers of random weights reach {math.exp(deep):.2g}",
    )


def bound_one_head() -> Finding:
    return _bound(1, (2, 1, 1), (5, 4, 2))


def bound_many_heads() -> Finding:
    return _bound(3, (3, 2, 1), (5, 4, 2))


def residual_minimiser() -> Finding:
    """The mean against a gradient search for a better row, in the spectral and in the infinity norm."""

    def gain(norm, x: Tensor) -> tuple[float, float]:
        best, row = norm(residual(x)).item(), x.mean(0).clone().requires_grad_()
        optimizer = torch.optim.Adam([row], lr=0.02)
        found = best
        for _ in range(300):
            value = norm(x - row)
            found = min(found, value.item())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return (best - found) / best, found

    x = matrix([[0.0], [0.0], [3.0]])
    lost, better = gain(infinity_norm, x)
    return Finding(
        Verdict("how much a better row than the mean gains, 2-norm", "", gain(spectral_norm, draw(6, 3))[0], 1e-6, {}),
        without=Verdict("the same in the infinity norm", "", lost, 1e-6, {}),
        example=f"X = (0, 0, 3)': the mean 1 leaves (-1, -1, 2), infinity norm {infinity_norm(residual(x)):g}; the "
        f"search finds a row that leaves {better:.3g}",
    )


def low_rank() -> Finding:
    return sketched(torch.softmax(draw(512, 16) @ draw(16, 512, seed=1) / 4, -1))


def sketched(p: Tensor, epsilon: float = 0.5) -> Finding:
    """||P R'R w - P w|| <= eps ||P w|| for a w of zero mean, and the second-moment law in its place."""
    n = p.shape[-1]
    w = draw(n, 1, seed=2)
    w = w - w.mean()
    k = concentration.sketch_size(n, epsilon)
    failed = concentration.failures_of_low_rank(p, w, k, epsilon, 40, generator=generator(3))
    easy = concentration.failures_of_low_rank(p, 1 + 0.01 * w, k, epsilon, 40, generator=generator(4))
    mean, error = concentration.measured_square(p, w, k, 60, generator=generator(5))
    expected = concentration.expected_square(p, w, k)
    best, random = concentration.best_rank_error(p, k), concentration.sketch_error(p, k, 5, generator=generator(6))
    size = p.norm().item()
    two, r = matrix([[0.5, 0.5]]), concentration.sketch(8, 2, generator(7))
    off = (two @ r.mT @ r @ matrix([[1.0], [-1.0]])).item()
    return Finding(
        Verdict(f"lower end of the failure rate's interval, n = {n}, k = {k}", "", failed.interval[0], 0.05, {}),
        corrected=Verdict("second moment, distance in standard errors", "", abs(mean - expected) / error, 4.0, {}),
        example=f"P = (1/2, 1/2), w = (1, -1)': P w = 0, so the claim allows no error, and a sketch of 8 rows has "
        f"{off:+.3f}; at n = {n}, w of zero mean fails in {failed.failures} of {failed.draws} draws, w nearly constant "
        f"in {easy.failures}; of ||P||_F = {size:.3g} the sketch loses {random:.3g} and the best matrix of that rank "
        f"{best:.2g}",
    )


def rank_of_the_sketch() -> Finding:
    sizes = [concentration.sketch_size(n, 0.5) for n in (2**8, 2**16)]
    ratio = sizes[1] / sizes[0]
    return Finding(
        Verdict("distance of k(n^2) / k(n) from 4, as log n * log n would have it", "", abs(ratio - 4), 0.1, {}),
        corrected=Verdict("distance from 2, as log n has it", "", abs(ratio - 2), 0.1, {}),
        example=f"5 ln n / (eps^2 - eps^3) at eps = 1/2: k(256) = {sizes[0]}, k(256^2) = {sizes[1]}, twice as large",
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
        premise="the constant is added to whole rows (x is a column), not to whole columns",
    ),
    Entry(
        "S0.paths",
        "Theorem 2.1",
        "A stack of attention is the sum over its H^L paths, plus a constant row",
        r"\mathrm{SAN}(X)=\sum_{p\in[H]^L}P_pXW_p+\mathbf 1b^\top",
        Outcome.HOLDS,
        "Every sequence of heads can be looked at by itself.",
        path_decomposition,
    ),
    Entry(
        "S0.paths-skip",
        "Theorem 2.1",
        "With skip connections there are (H+1)^L paths",
        r"|\mathrm{paths}|=(H+1)^L",
        Outcome.HOLDS,
        "A skip is one more head, whose P is the identity.",
        path_decomposition_with_skips,
    ),
    Entry(
        "S0.bound",
        "Theorem 2.2",
        "Pure attention with one head loses its residual doubly exponentially",
        r"\|\mathrm{res}\,\mathrm{SAN}(X)\|\le(4\beta/\sqrt d)^{(3^L-1)/2}\|\mathrm{res}X\|^{3^L}",
        Outcome.HOLDS,
        "A search for a violation found none: evidence, not proof. The bound is loose by a factor of 8 at its best.",
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
        "S0.low-rank",
        "Theorem 2.3",
        "A random sketch of rank O(log n) keeps P w to eps ||P w||",
        r"\|PR^\top Rw-Pw\|\le\varepsilon\|Pw\|",
        Outcome.CORRECTED,
        "The error is relative to ||P|| ||w||, not to the output: for zero-mean values the sketch is noise. If you "
        "want rank k, take it from the spectrum or learn it.",
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
)
