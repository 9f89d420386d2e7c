"""Xie's notes (S0) on rank collapse: softmax, paths, the collapse bound, low rank, and their four questions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.ledger.complexity_tables import CHAINS, COSTS, add_table
from headwise.ledger.entry import Finding, Outcome, Source, at_most, draw, equal, generator, matrix, rounding, shown
from headwise.linalg.norms import composite_norm, infinity_norm, one_norm, spectral_norm
from headwise.theory import paths
from headwise.theory.collapse import collapse, layer_constant, published_log_bound, relative_residual, residual
from headwise.theory.collapse_counterexamples import long_layer, two_wide_heads
from headwise.theory.counterexamples import Draw, Side, Worst, search
from headwise.theory.stack import random_stack

SOURCE = Source(
    "S0",
    "Xie Zejian",
    "Attention (2021), notes on Dong, Cordonnier & Loukas 2021 and on Wang et al. 2020",
    "rank collapse",
)


@SOURCE.claim(
    "S0.shift",
    "2.1",
    "softmax(A + x1') = softmax(A)",
    r"\mathrm{softmax}(A + x\mathbf 1^\top)=\mathrm{softmax}(A)",
    Outcome.HOLDS,
    "A key bias in attention does nothing; a query bias does.",
)
def shift_invariance() -> Finding:
    """x 1' is a constant for each row, as printed; a constant for each column, 1 x', is not harmless."""
    a, c = draw(6, 9), draw(6, 1, seed=1)
    small, by_column = matrix([[0.0, 0.0]]), matrix([[math.log(3.0), 0.0]])
    before, after = torch.softmax(small, -1)[0], torch.softmax(small + by_column, -1)[0]
    return Finding(
        equal(
            "softmax(A + x 1') = softmax(A), a constant for each row", torch.softmax(a + c, -1), torch.softmax(a, -1)
        ),
        example=f"the row (0, 0) gives weights {before[0]:g}, {before[1]:g}; adding log 3 to both entries changes "
        f"nothing, adding it to the first column alone gives {after[0]:.3g}, {after[1]:.3g}",
    )


@SOURCE.claim(
    "S0.paths",
    "Theorem 2.1",
    "A stack of attention is the sum over its H^L paths, plus a constant row",
    r"\mathrm{SAN}(X)=\sum_{p\in[H]^L}P_pXW_p+\mathbf 1b^\top",
    Outcome.HOLDS,
    "The contribution of every sequence of heads can be computed separately.",
)
def path_decomposition() -> Finding:
    stack, x = random_stack(3, 3, 6, bias=0.5, scale=1.5, generator=generator()), draw(7, 6, seed=1)
    total = sum(y for _, y in paths.single_paths(stack, x))
    groups = paths.by_length(stack, x)
    error = ((total + groups.bias - groups.output).norm() / groups.output.norm()).item()
    constant = residual(groups.bias).norm().item()
    return Finding(rounding("27 paths and one bias, the same for all tokens, add up to the network", error + constant))


@SOURCE.claim(
    "S0.stacking",
    "2.1",
    "Stacked layers multiply W_h1 W_h2 in the order of P_h1 P_h2",
    r"\mathrm{SA}\circ\mathrm{SA}(X)=\sum_{h_1,h_2}P_{h_1}P_{h_2}XW_{h_1}W_{h_2}+\mathbf 1b^\top",
    Outcome.CORRECTED,
    "Attention matrices accumulate on the left, weights on the right: in reading order they run against each other.",
    premise="P of each layer is that of the forward pass",
    truth="sum P_h2 P_h1 X W_h1 W_h2, where h1 is the first layer",
)
def order_of_weights() -> Finding:
    """Three layers of two heads: all paths, with the W's in both orders, against the network."""
    stack, x = random_stack(3, 2, 5, scale=1.5, generator=generator()), draw(6, 5, seed=1)
    states = stack.states(x)
    attention = [layer.attention(state) for layer, state in zip(stack.layers, states, strict=False)]

    def total(reverse: bool) -> Tensor:
        result = torch.zeros_like(x)
        for heads in itertools.product(range(2), repeat=3):
            left, right = torch.eye(6, dtype=x.dtype), torch.eye(5, dtype=x.dtype)
            for layer, h in enumerate(heads):
                w = stack.layers[layer].w[h]
                left, right = attention[layer][h] @ left, w @ right if reverse else right @ w
            result += left @ x @ right
        return result

    network = residual(states[-1])  # without the bias, which is the same for all tokens
    printed, fixed = ((residual(total(r)) - network).norm() / network.norm() for r in (True, False))
    return Finding(
        rounding("three layers, weights in the printed order, relative error", printed.item()),
        corrected=rounding("with the weights of the first layer first", fixed.item()),
        example=f"three layers of two heads, 8 paths: the printed order is off by {printed.item():.2g}, relative to "
        "the differences between tokens",
    )


@SOURCE.claim(
    "S0.paths-skip",
    "Theorem 2.1",
    "With skip connections there are (H+1)^L paths",
    r"|\mathrm{paths}|=(H+1)^L",
    Outcome.HOLDS,
    "A skip connection is one more head, with P = I.",
)
def path_decomposition_with_skips() -> Finding:
    stack, x = random_stack(3, 2, 6, bias=0.5, skip=True, generator=generator()), draw(7, 6, seed=1)
    walked = list(paths.single_paths(stack, x))
    groups = paths.by_length(stack, x)
    error = ((sum(y for _, y in walked) + groups.bias - groups.output).norm() / groups.output.norm()).item()
    return Finding(rounding("(H + 1)^L paths add up to the network", error if len(walked) == 3**3 else math.inf))


def bound_gap(
    heads: int, n: int, d: int, k: int, *, constant: float | None = None, starts: int = 20, steps: int = 250
) -> Worst:
    """Search for weights and inputs that break the bound of one layer; by default with the constant that is proven."""
    factor = (layer_constant(n, d) if constant is None else constant) / math.sqrt(k)

    def left(x: Tensor, wq: Tensor, wk: Tensor, w: Tensor) -> Tensor:
        p = torch.softmax((x @ wq) @ (x @ wk).mT / math.sqrt(k), -1)
        return composite_norm(residual((p @ x @ w).sum(0))).log()

    def right(x: Tensor, wq: Tensor, wk: Tensor, w: Tensor) -> Tensor:
        scores = one_norm(wq @ wk.mT)
        columns, rows = (scores * one_norm(w)).sum(), (scores * infinity_norm(w)).sum()
        return math.log(factor) + (columns.log() + rows.log()) / 2 + 3 * composite_norm(residual(x)).log()

    start = _normal((n, d), (heads, d, k), (heads, d, k), (heads, d, d))
    return search(left, right, start, starts=starts, steps=steps)


def _tightest(heads: int, sizes: Sequence[tuple[int, int, int]], constant: float | None = None) -> Worst:
    """The largest `bound_gap` over sizes (n, d, k); fewer starts for the last, which is the largest."""
    starts = [20] * (len(sizes) - 1) + [4]
    found = [
        bound_gap(heads, *size, constant=constant, starts=count) for size, count in zip(sizes, starts, strict=True)
    ]
    return max(found, key=lambda result: result.gap)


def _normal(*sizes: tuple[int, ...]) -> Draw:
    return lambda g: tuple(torch.randn(*size, dtype=torch.float64, generator=g) for size in sizes)


def _deepest(heads: int) -> float:
    """log(left / right) of four random layers at its largest, for inputs so small that the bound shrinks and others."""
    found = -math.inf
    for seed, size in itertools.product(range(10), (0.02, 1.0)):
        stack = random_stack(4, heads, 6, generator=generator(seed))
        found = max(found, collapse(stack, size * draw(5, 6, seed=seed + 100)).verdict().measured)
    return found


@SOURCE.claim(
    "S0.bound",
    "Theorem 2.2",
    "Pure attention with one head loses its residual doubly exponentially",
    r"\|\mathrm{res}\,\mathrm{SAN}(X)\|\le(4\beta/\sqrt d)^{(3^L-1)/2}\|\mathrm{res}X\|^{3^L}",
    Outcome.HOLDS_WITH_PREMISE,
    "Collapse is proven where the bound shrinks and W_V is not tiny; the constant 4 is not universal.",
    premise="at most 33 tokens, or width at most 16, or scores E whose rows spread by at most 1.97",
)
def bound_one_head() -> Finding:
    """Proven under the premise (docs/explanation/rank-collapse.md), and searched; a long, wide layer without it."""
    worst = _tightest(1, ((2, 1, 1), (5, 4, 2), (12, 24, 4)), constant=4.0)
    x, deep = worst.at[0], _deepest(1)
    n, width = 10**6, 175_001
    broken = long_layer(n, width, strength=19.75, lead=16.75)
    return Finding(
        at_most("largest log(left / right) found by gradient search, at most 33 tokens", max(worst.gap, deep), 0.0),
        without=at_most(f"log(left / right) of a layer of {n:,} tokens of width {width:,}", math.log(broken.ratio), 0),
        example=f"the tightest layer found has left/right = {math.exp(worst.gap):.3f}, with {x.shape[0]} tokens of "
        f"width {x.shape[1]}; four layers of random weights reach {math.exp(deep):.2g}. {n:,} tokens of width "
        f"{width:,}, a third of them in pairs that attend to themselves, the others to one token: left/right = "
        f"{broken.ratio:.2f}, evaluated in closed form; the ratio grows like sqrt(n) / log n",
    )


@SOURCE.claim(
    "S0.bound-heads",
    "Theorem 2.2",
    "The same bound holds for H heads, with H beta in place of beta",
    r"\beta\to H\beta",
    Outcome.CORRECTED,
    "More heads do not prevent collapse; skip connections do. Sum the two factors of the norm over heads separately.",
    premise="as for one head",
    truth="beta -> sqrt(sum_h w_h ||W_h||_1 sum_h w_h ||W_h||_inf), w_h = ||W_QK,h||_1",
)
def bound_many_heads() -> Finding:
    width = 10**5
    broken = two_wide_heads(width)
    worst = _tightest(3, ((3, 2, 1), (5, 4, 2), (6, 24, 2)))
    x, deep = worst.at[0], _deepest(3)
    return Finding(
        at_most(f"log(left / right) of two heads on two tokens of width {width:,}", math.log(broken.ratio), 0.0),
        corrected=at_most("largest log(left / right) found by gradient search", max(worst.gap, deep), 0.0),
        example=f"tokens (a, 0, …) and (-a, 0, …), W_QK = e_1 e_1' for both heads; one W_V keeps the first column, the "
        f"other copies it to all {width:,} columns, divided by the root of their number. Both have the composite norm "
        f"1, and left/right = {broken.ratio:.3f}: the composite norm has no triangle inequality, so heads may not be "
        f"added with it. Corrected, the tightest layer found has left/right = {math.exp(worst.gap):.3f}, with "
        f"{x.shape[0]} tokens of width {x.shape[1]} and 3 heads; four layers of random weights reach "
        f"{math.exp(deep):.2g}",
    )


@SOURCE.claim(
    "S0.residual",
    "Definition 2.1",
    "The mean is the best row to subtract",
    r"\bar x=\arg\min_x\|X-\mathbf 1x^\top\|_2",
    Outcome.HOLDS,
    "Measure residuals with the mean, in a unitarily invariant norm such as the 2-norm, as printed.",
)
def residual_minimiser() -> Finding:
    """The mean against a gradient search for a better row, in the spectral and in the infinity norm."""

    def gain(norm, x: Tensor) -> tuple[float, float]:
        best, row = norm(residual(x)).item(), x.mean(0).clone().requires_grad_()
        optimizer = torch.optim.Adam([row], lr=0.02)
        smallest = best
        for _ in range(300):
            value = norm(x - row)
            smallest = min(smallest, value.item())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return (best - smallest) / best, smallest

    x = matrix([[0.0], [0.0], [3.0]])
    _, better = gain(infinity_norm, x)
    return Finding(
        at_most("relative gain of the best row over the mean, 2-norm", gain(spectral_norm, draw(6, 3))[0], 1e-6),
        example=f"in other norms the mean is not the best row: X = (0, 0, 3)', subtracting the mean 1 leaves "
        f"(-1, -1, 2), infinity norm {infinity_norm(residual(x)):g}; a gradient search finds a row that leaves "
        f"{better:.3g}",
    )


WIDEST = 4.0  # the largest spread that the search may reach; beyond 1.2564 the published factor 2D is too small


def _sides(r: Tensor, e: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, softmax(r), D and R for scores 1 r' + E, where rows of E spread by less than WIDEST, and max |R| = 1."""
    e = WIDEST * torch.sigmoid(e)
    rest = residual(x)
    return torch.softmax(r + e, -1), torch.softmax(r, -1), _spread(e), rest / rest.abs().max()


def _spread(e: Tensor) -> Tensor:
    return (e.amax(-1) - e.amin(-1)).unsqueeze(-1)


def _step_gap(excess: Side, n: int, d: int, starts: int) -> Worst:
    """The largest `excess` of the four matrices of `_sides`."""
    zero: Side = lambda *z: torch.zeros_like(z[0]).sum()  # noqa: E731
    start = _normal((n,), (n, n), (n, d))
    return search(lambda *z: excess(*_sides(*z)), zero, start, starts=starts, steps=150)


def entrywise_gap(n: int, d: int) -> Worst:
    """exp(P R) <= exp((I + 2D) 1 softmax(r)' R), the same inequality with both sides positive, at its worst entry."""
    return _step_gap(lambda p, s, wide, rest: (p @ rest - (1 + 2 * wide) * (s @ rest)).max(), n, d, 8)


def corrected_gap(n: int, d: int) -> Worst:
    """|P R - 1 s'R| <= (e^D - 1) 1 s'|R| at its worst entry."""

    def excess(p: Tensor, s: Tensor, wide: Tensor, rest: Tensor) -> Tensor:
        return ((p @ rest - s @ rest).abs() / (wide.expm1() * (s @ rest.abs()))).max().log()

    return _step_gap(excess, n, d, 20)


def doubled_step(n: int = 50, score: float = 4.0) -> tuple[float, float]:
    """|P R - 1 s'R| and 2D 1 s'|R| for r = 0, one entry `score` in a row of E, and R = (1, -1/(n-1), ...)."""
    rest = torch.full((n,), -1 / (n - 1), dtype=torch.float64)
    e = torch.zeros(n, dtype=torch.float64)
    rest[0], e[0] = 1.0, score
    return (torch.softmax(e, -1) @ rest - rest.mean()).abs().item(), 2 * score * rest.abs().mean().item()


@SOURCE.claim(
    "S0.question-1",
    "2.4, step (9)",
    "P R <= (I + 2D) 1 softmax(r)' R entry by entry",
    r"PR\le(I+2D)\mathbf 1\,\mathrm{softmax}(r)^\top R",
    Outcome.CORRECTED,
    "With absolute values and e^D - 1 the step is true. The theorem needs another argument (S0.bound).",
    premise="none for e^D - 1; it is at most 2D where D <= 1.2564, the root of e^x = 1 + 2x",
    truth="|PR - 1 softmax(r)'R| <= (e^D - 1) 1 softmax(r)'|R|",
)
def entrywise_step() -> Finding:
    """(9): P R <= (I + 2D) 1 softmax(r)' R entry by entry, P = softmax(1 r' + E), D_ii = max_jj' |E_ij - E_ij'|."""
    r, e, _ = entrywise_gap(2, 1).at
    r, e = ((x * 10).round() / 10 for x in (r - r.min(), WIDEST * torch.sigmoid(e)))  # one digit, to check by hand
    e = e - e.amin(-1, keepdim=True)
    rest = matrix([[1.0], [-1.0]]) * (1 if r[0] < r[1] else -1)
    left, right = torch.softmax(r + e, -1) @ rest, (1 + 2 * _spread(e)) * (torch.softmax(r, -1) @ rest)
    row = int((left - right).argmax())
    fixed = max(corrected_gap(n, d).gap for n, d in ((2, 1), (5, 3)))
    moved, doubled = doubled_step()
    return Finding(
        at_most("P R - (I + 2D) 1 softmax(r)' R at its worst entry", (left - right).max().item(), 0.0),
        corrected=at_most("largest log(|P R - 1 s'R| / (e^D - 1) 1 s'|R|) found by gradient search", fixed, 0.0),
        example=f"two tokens, R = {shown(rest[:, 0])}', r = {shown(r)}, this row of E = {shown(e[row])}: the left side "
        f"is {left[row].item():.3f}, the right side {right[row].item():.3f} (found by gradient search, seed 0, and "
        "rounded). A factor above one lowers a negative number, and R has both signs since its columns sum to zero. "
        f"With absolute values alone the factor 2D is too small where D is large: 50 tokens, r = 0, one score of 4, "
        f"R = (1, -1/49, …): {moved:.3f} > {doubled:.3f}",
    )


def lower_gap(n: int, d: int) -> Worst:
    """P R >= (I - D) 1 softmax(r)' R at its worst entry, as a difference."""
    return _step_gap(lambda p, s, wide, rest: ((1 - wide) * (s @ rest) - p @ rest).max(), n, d, 8)


@SOURCE.claim(
    "S0.lower",
    "2.4, after (10)",
    "P X >= 1 (x' + softmax(r)' R) - D 1 softmax(r)' R entry by entry",
    r"PX\ge\mathbf 1(x^\top+\mathrm{softmax}(r)^\top R)-D\mathbf 1\,\mathrm{softmax}(r)^\top R",
    Outcome.CORRECTED,
    "The companion of step (9), with the same two faults: R has both signs, and 1 - e^-D < D is not enough for them.",
    premise="none",
    truth="PR - 1 softmax(r)'R >= -(e^D - 1) 1 softmax(r)'|R|",
)
def lower_inequality() -> Finding:
    worst = lower_gap(2, 1)
    p, s, wide, rest = _sides(*worst.at)
    excess = (1 - wide) * (s @ rest) - p @ rest
    row = int(excess.argmax())

    def below(p: Tensor, s: Tensor, wide: Tensor, rest: Tensor) -> Tensor:
        return ((s @ rest - p @ rest) / (wide.expm1() * (s @ rest.abs()))).max()

    fixed = max(_step_gap(below, n, d, 20).gap for n, d in ((2, 1), (5, 3)))
    return Finding(
        at_most("(1 - D) softmax(r)' R - P R at its worst entry", worst.gap, 0.0),
        corrected=at_most("largest (1 s'R - P R) / (e^D - 1) 1 s'|R| found by gradient search", fixed, 1.0),
        example=f"two tokens, R = {shown(rest[:, 0])}', softmax(r) = {shown(s)}, D = {wide[row].item():.3g}: the left "
        f"side is {(p @ rest)[row].item():.3f}, the right side {((1 - wide) * (s @ rest))[row].item():.3f} (found by "
        "gradient search, seed 0)",
    )


def triangle_gap(n: int = 2) -> Worst:
    """||A + B|| <= ||A|| + ||B|| for the composite norm."""
    return search(
        lambda a, b: composite_norm(a + b).log(),
        lambda a, b: (composite_norm(a) + composite_norm(b)).log(),
        _normal((n, n), (n, n)),
        starts=20,
        steps=200,
        rate=0.02,
    )


@SOURCE.claim(
    "S0.question-2",
    "2.4, question 2",
    "The composite norm is a norm",
    r"\|A+B\|_{1,\infty}\le\|A\|_{1,\infty}+\|B\|_{1,\infty}",
    Outcome.CORRECTED,
    "It is not a distance, but where it tends to zero every norm does.",
    premise="none",
    truth="it bounds the 2-norm from above and is submultiplicative, which is all the proof needs for one head",
)
def composite_is_a_norm() -> Finding:
    worst = triangle_gap()
    a, b = ((x / x.abs().max()).round() for x in worst.at)  # integers, to check by hand
    sides = composite_norm(a + b).item(), (composite_norm(a) + composite_norm(b)).item()
    draws = [draw(4, 5, seed=seed) for seed in range(200)]
    above = max((spectral_norm(x) / composite_norm(x)).log().item() for x in draws)
    product = max(
        (composite_norm(x.mT @ y) / (composite_norm(x.mT) * composite_norm(y))).log().item()
        for x, y in itertools.pairwise(draws)
    )
    return Finding(
        at_most("||A + B|| against ||A|| + ||B||", sides[0], sides[1]),
        corrected=at_most("log(||X||_2 / ||X||_(1,inf)) and log(||XY|| / ||X|| ||Y||)", max(above, product), 0.0),
        example=f"A = {shown(a)}, B = {shown(b)}: ||A + B|| = {sides[0]:.3g} > {sides[1]:.3g} = ||A|| + ||B||. The "
        f"gradient search (seed 0, start {worst.start}) reaches a ratio of {math.exp(worst.gap):.4f} and these are its "
        f"matrices rounded to integers, ratio {sides[0] / sides[1]:.4f}",
    )


@SOURCE.claim(
    "S0.question-3",
    "2.4, question 3",
    "The bound tends to zero with depth",
    r"\sqrt{4\beta/\sqrt d}\,\|\mathrm{res}X\|<1",
    Outcome.HOLDS_WITH_PREMISE,
    "For inputs and weights of ordinary size the bound is vacuous; collapse still happens, for other reasons.",
    premise="sqrt(4 beta / sqrt(d)) ||res X|| < 1",
)
def input_residual_below_one() -> Finding:
    def change(size: float) -> float:
        known = {"beta": 1.0, "heads": 1, "key_width": 16, "log_residual": math.log(size)}
        return published_log_bound(4, **known) - published_log_bound(3, **known)

    return Finding(
        at_most("log of the bound, one layer deeper, where sqrt(4 beta / sqrt d) ||res X|| = 0.9", change(0.9), 0.0),
        without=at_most("the same where it is 1.1", change(1.1), 0.0),
        example="at beta = 1, d = 16 the bound is ||res X||^(3^L): 0.9, 0.729, 0.387 … or 1.1, 1.331, 2.358 …; the "
        "second is true but vacuous",
    )


@SOURCE.claim(
    "S0.question-4",
    "2.3 and 2.4, conclusion",
    "Low rank of softmax matrices causes rank collapse",
    r"\mathrm{rank}(\tilde P)\ll n\Rightarrow\text{collapse}",
    Outcome.REFUTED,
    "A full-rank attention matrix collapses tokens too: the cause is averaging, not low rank.",
)
def low_rank_causes_collapse() -> Finding:
    """If low rank were the cause, a P of full rank would keep tokens apart."""
    p = matrix([[0.9, 0.1], [0.1, 0.9]])
    x, depth = matrix([[1.0], [-1.0]]), 100
    values = torch.linalg.svdvals(p)
    y = torch.linalg.matrix_power(p, depth) @ (x + 1)
    lost = 1 - (relative_residual(y) / relative_residual(x + 1)).item() if values.min() > 0.5 else 0.0
    return Finding(
        at_most(f"share of the residual that {depth} layers of a full-rank P lose", lost, 0.5),
        example=f"P = {shown(p)}, the softmax of [[log 9, 0], [0, log 9]], has singular values {values[0]:.3g} and "
        f"{values[1]:.3g}: full rank. Each layer multiplies the difference of two tokens by 0.8, and after {depth} "
        f"layers the relative residual is {relative_residual(y).item():.0e}. Averaging makes tokens equal, not low "
        "rank",
    )


add_table(SOURCE, {**COSTS, "projected": ("A Linformer", "O(n)", "For a fixed projection size.")}, CHAINS)
