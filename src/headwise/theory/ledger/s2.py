"""S2, on linear attention: scaling functions, Johnson-Lindenstrauss as printed, and what the projection costs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.operators.efficient import efficient
from headwise.operators.factored import factored
from headwise.operators.projections import count_sketch, dense, pooling
from headwise.operators.softmax import softmax
from headwise.theory.complexity import growth
from headwise.theory.concentration import Frequency, sketch, sketch_size
from headwise.theory.ledger.entry import Entry, Finding, Outcome, rounding
from headwise.theory.residual import relative_residual
from headwise.theory.verdict import Verdict


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_generator(seed))


def scaling_functions() -> Finding:
    q, k, v = (_draw(9, 4, seed=i) for i in range(3))
    n = 9
    left = (q / math.sqrt(n)) @ ((k / math.sqrt(n)).mT @ v)
    return Finding(
        rounding("f(Q) f(K)' V = f(Q K') V for f = x/sqrt(n) and x/n", (left - (q @ k.mT / n) @ v).abs().max().item())
    )


def jl_distances() -> Finding:
    """q points, k > 8 ln q / eps^2: some map keeps all squared distances to eps; count how many Gaussian ones do."""
    points, epsilon = 40, 0.5
    k = math.ceil(8 * math.log(points) / epsilon**2) + 1
    x = _draw(points, 300)
    exact = torch.pdist(x).square()
    kept = 0
    for seed in range(20):
        ratio = torch.pdist(x @ sketch(k, 300, _generator(seed)).mT).square() / exact
        kept += bool(((ratio > 1 - epsilon) & (ratio < 1 + epsilon)).all())
    return Finding(
        Verdict(f"1 - share of Gaussian maps that do, {points} points, k = {k}", "", 1 - kept / 20, 0.99, {})
    )


def _failures(test, draws: int = 300) -> Frequency:
    return Frequency(sum(bool(test(_generator(seed))) for seed in range(draws)), draws)


def jl_lemma_1() -> Finding:
    n, k, epsilon = 64, 60, 0.5
    x = _draw(n)
    found = _failures(lambda g: (sketch(k, n, g) @ x).norm() > (1 + epsilon) * x.norm())
    allowed = 2 * math.exp(-(epsilon**2 - epsilon**3) * k / 4)
    return Finding(Verdict("upper end of the failure rate's interval", "", found.interval[1], allowed, {}))


def jl_lemma_2() -> Finding:
    n, epsilon = 64, 0.5
    k = 100
    x, y = _draw(n), _draw(n, seed=1)
    y = y - x * (x @ y) / (x @ x) + 0.05 * x  # nearly orthogonal: x.y is small, the lengths are not
    allowed = 2 * math.exp(-(epsilon**2 - epsilon**3) * k / 4)

    def error(g: torch.Generator) -> Tensor:
        r = sketch(k, n, g)
        return (r @ x) @ (r @ y)

    printed = _failures(lambda g: error(g).abs() > epsilon * (x @ y).abs())
    true = _failures(lambda g: (error(g) - x @ y).abs() > epsilon * x.norm() * y.norm())
    return Finding(
        Verdict("lower end of the failure rate's interval, as printed", "", printed.interval[0], allowed, {}),
        corrected=Verdict("upper end, |xR'Ry - xy| <= eps ||x|| ||y||", "", true.interval[1], allowed, {}),
        example=f"as printed it fails in {printed.failures} of {printed.draws} draws, corrected in {true.failures}",
    )


def rank_at_most_k() -> Finding:
    n, k = 40, 6
    p = efficient(_draw(n, 8), _draw(n, 8, seed=1)).dense()
    r = sketch(k, n, _generator(2))
    rank = int(torch.linalg.matrix_rank(p @ r.mT @ r))
    return Finding(Verdict("rank of P R'R", "", rank, k, {}))


def stochastic_reading() -> Finding:
    """D as printed sums columns of exp(A); read by rows, HL averages."""
    a, b = _draw(9, 4) / 2, _draw(4, 9, seed=1) / 2
    by_columns = (a.exp() / a.exp().sum(0)) @ (b.exp() / b.exp().sum(0))
    by_rows = torch.softmax(a, -1) @ torch.softmax(b, -1)
    off = lambda p: (p.sum(-1) - 1).abs().max().item()  # noqa: E731
    return Finding(
        Verdict("rows of exp(A) D_A^-1 exp(B) D_B^-1 less one", "", off(by_columns), 1e-9, {}),
        corrected=rounding("rows of softmax_rows(A) softmax_rows(B) less one", off(by_rows)),
        example="with column sums the weights of a query do not add up to one",
    )


def order_of_products() -> Finding:
    n, d, k = 64, 8, 24
    direct = 2 * n * d * k
    other = n * d * d + d * k * d
    h, low, x = _draw(n, d), _draw(d, k, seed=1), _draw(k, d, seed=2)
    same = ((h @ low) @ x - h @ (low @ x)).abs().max().item()
    return Finding(
        Verdict("multiply-adds of H(LX), against (HL)X", "", other if same < 1e-10 else math.inf, direct, {})
    )


def independent_of_k() -> Finding:
    """Multiply-adds of the whole layer at k = 16 and k = 256, with dense and with cheap projections."""
    n, d = 1024, 16
    q, key = _draw(n, d).float(), _draw(n, d, seed=1).float()

    def ratio(make) -> float:
        return factored(q, key, make(256)).cost(d).multiply_adds / factored(q, key, make(16)).cost(d).multiply_adds

    full = ratio(lambda k: dense(_draw(k, n, seed=2).float()))
    pooled = ratio(lambda k: pooling(n, n // k))
    hashed = ratio(lambda k: count_sketch(n, k, generator=_generator(3)))
    return Finding(
        Verdict("cost at k = 256 over cost at k = 16, dense E and F", "", full, 1.5, {}),
        corrected=Verdict("the same with pooling or a CountSketch", "", max(pooled, hashed), 1.5, {}),
        example=f"dense projections: {full:.1f} times the work; pooling {pooled:.2f}, CountSketch {hashed:.2f}",
    )


def delta_construction() -> Finding:
    """E = delta R, F = e^-delta R with delta = 2^-n: how different the output rows still are."""
    n, d, k = 64, 8, 16
    q, key, v = (_draw(n, d, seed=i) for i in range(3))
    r = sketch(k, n, _generator(3))

    def spread(delta: float) -> float:
        h = torch.softmax(q / math.sqrt(d), -1)
        low = torch.softmax((delta * r @ key).mT / math.sqrt(d), -1)
        return relative_residual(h @ (low @ (math.exp(-delta) * r @ v))).item()

    tiny, one = spread(2.0**-n), spread(1.0)
    exact = relative_residual(softmax(q, key)(v)).item()
    return Finding(
        Verdict("residual of softmax attention kept, 0.5 would be half of it", "", 0.5, tiny / exact, {}),
        example=f"relative residual {tiny:.0e} at delta = 2^-{n}, {one:.2g} at delta = 1, {exact:.2f} for softmax: "
        "every token gets the same output",
    )


def norm_of_a_product() -> Finding:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    return Finding(
        Verdict("| |ab| - ||a|| ||b|| | for a = (1, 0), b = (0, 1)'", "", abs(abs((a @ b).item()) - 1.0), 1e-9, {}),
        corrected=Verdict(
            "|ab| <= ||a|| ||b||, largest excess over 100 draws",
            "",
            max(
                (_draw(4, seed=s) @ _draw(4, seed=s + 500)).abs().item()
                - (_draw(4, seed=s).norm() * _draw(4, seed=s + 500).norm()).item()
                for s in range(100)
            ),
            0.0,
            {},
        ),
        example="orthogonal vectors: the product is 0, the product of the lengths is 1",
    )


def size_of_the_sketch() -> Finding:
    """k = 5 log(n) (eps^2 - eps^3), a product, against the quotient: how often a length is off by more than eps."""
    n, epsilon = 512, 0.5
    x = _draw(n)
    small, right = max(1, round(5 * math.log(n) * (epsilon**2 - epsilon**3))), sketch_size(n, epsilon)

    def rate(k: int) -> float:
        return _failures(lambda g: ((sketch(k, n, g) @ x).norm() / x.norm() - 1).abs() > epsilon, 200).interval[1]

    return Finding(
        Verdict(f"failure rate, at most, with the product k = {small}", "", rate(small), 0.05, {}),
        corrected=Verdict(f"failure rate, at most, with the quotient k = {right}", "", rate(right), 0.05, {}),
        example=f"the product gives k = {small} for n = {n}, the quotient {right}",
    )


def long_tail() -> Finding:
    """Figure 1: the double softmax has rank at most d, whatever n."""
    ranks = [int(torch.linalg.matrix_rank(efficient(_draw(n, 8), _draw(n, 8, seed=1)).dense())) for n in (32, 128)]
    plain = int(torch.linalg.matrix_rank(softmax(3 * _draw(128, 8), 3 * _draw(128, 8, seed=1)).dense(), rtol=1e-6))
    return Finding(
        Verdict("rank of the double softmax, d = 8", "", max(ranks), 8, {}),
        example=f"n = 128: the double softmax has rank {ranks[1]}, softmax attention on sharp scores {plain}",
    )


def linear_cost() -> Finding:
    found = growth("efficient", "multiply_adds").exponent
    return Finding(Verdict("fitted exponent in n of counted multiply-adds", "", found, 1.05, {}))


ENTRIES = (
    Entry(
        "S2.scaling",
        "2, step (a)",
        "With scaling functions, f(Q)f(K)'V and f(QK')V are the same",
        r"\tfrac{Q}{\sqrt n}\big(\tfrac{K^\top}{\sqrt n}V\big)=\tfrac{QK^\top}nV",
        Outcome.HOLDS,
        "Without a softmax, attention is linear in cost for free.",
        scaling_functions,
    ),
    Entry(
        "S2.jl",
        "2, JL lemma",
        "8 ln q / eps^2 dimensions keep distances between q points",
        r"n>8\ln q/\varepsilon^2",
        Outcome.HOLDS,
        "Random projections keep geometry.",
        jl_distances,
    ),
    Entry(
        "S2.lemma-1",
        "3.1, Lemma 1",
        "A random projection rarely stretches a vector",
        r"\Pr(\|Rx\|\le(1+\varepsilon)\|x\|)\ge1-2e^{-(\varepsilon^2-\varepsilon^3)k/4}",
        Outcome.HOLDS,
        "True, with room to spare.",
        jl_lemma_1,
    ),
    Entry(
        "S2.lemma-2",
        "3.1, Lemma 2",
        "||xR'Ry|| <= eps ||xy|| with high probability",
        r"\Pr(\|xR^\top Ry\|\le\varepsilon\|xy\|)\ge1-2e^{-(\varepsilon^2-\varepsilon^3)k/4}",
        Outcome.CORRECTED,
        "Inner products are kept relative to lengths; an inner product near zero is not kept relative to itself.",
        jl_lemma_2,
        truth="|xR'Ry - xy| <= eps ||x|| ||y||",
    ),
    Entry(
        "S2.rank",
        "3.1",
        "P R'R has rank at most k",
        r"\mathrm{rank}(PR^\top R)\le k",
        Outcome.HOLDS,
        "So it can be applied in linear time.",
        rank_at_most_k,
    ),
    Entry(
        "S2.normaliser",
        "3.1",
        "exp(A) D_A^-1 exp(B) D_B^-1 with column sums is the attention",
        r"(D_A)_{ii}=\sum_j\exp(A_{ji})",
        Outcome.CORRECTED,
        "Read by rows, the product of two softmaxes averages, as attention should.",
        stochastic_reading,
        truth="rows of both factors sum to one",
    ),
    Entry(
        "S2.order",
        "3.2",
        "H(LX) is cheaper than (HL)X",
        r"nd^2+d^2k<2ndk",
        Outcome.HOLDS,
        "Multiply the small matrices first.",
        order_of_products,
    ),
    Entry(
        "S2.independent",
        "3.2, Table 1",
        "The cost O(n d^2) does not depend on the projection dimension k",
        r"O(nd^2)",
        Outcome.CORRECTED,
        "Forming E K and F V with dense E, F costs O(nkd). Pool, or sketch by signs, and it becomes true.",
        independent_of_k,
        truth="independent of k for projections that cost O(nd)",
    ),
    Entry(
        "S2.delta",
        "3.2",
        "E = delta R, F = e^-delta R, delta = 2^-n is close to the unprojected attention",
        r"E=\delta R,\ F=e^{-\delta}R,\ \delta=2^{-n}",
        Outcome.REFUTED,
        "Never build it: E K vanishes and every token gets the same output. Learn E and F, or pool.",
        delta_construction,
    ),
    Entry(
        "S2.product-norm",
        "3.2",
        "||ab|| = ||a|| ||b|| for two vectors",
        r"\|ab\|=\|a\|\|b\|",
        Outcome.CORRECTED,
        "Only for outer products; for inner products it is an inequality.",
        norm_of_a_product,
        truth="|ab| <= ||a|| ||b||",
    ),
    Entry(
        "S2.sketch-size",
        "3.2",
        "k = 5 log(n) (eps^2 - eps^3) suffices",
        r"k=5\log n\,(\varepsilon^2-\varepsilon^3)",
        Outcome.CORRECTED,
        "The printed product gives a handful of dimensions; the quotient is meant.",
        size_of_the_sketch,
        truth="k = 5 log(n) / (eps^2 - eps^3)",
    ),
    Entry(
        "S2.figure-1",
        "Figure 1",
        "The new context matrix is low rank",
        r"\mathrm{rank}(HL)\le d",
        Outcome.HOLDS,
        "Because it is a product through d features; that says nothing about softmax attention.",
        long_tail,
    ),
    Entry(
        "S2.table",
        "Table 1",
        "This model costs O(n d^2)",
        r"O(nd^2)",
        Outcome.HOLDS,
        "For E = F = I, that is, Efficient Attention.",
        linear_cost,
    ),
)
