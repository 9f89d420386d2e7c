"""Verma's paper (S2) on linear attention: scaling functions, Johnson-Lindenstrauss, the cost of projections."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from headwise.ledger.complexity_tables import SLACK, add_table, timed_growth
from headwise.ledger.entry import Finding, Outcome, Source, at_most, draw, equal, generator, matrix, shown
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projections import count_sketch, dense, pooling
from headwise.operators.softmax import softmax
from headwise.operators.sparse.hashed import hashed
from headwise.theory.complexity import exponent, formed_memory_growth, growth, memory_growth
from headwise.theory.concentration import (
    Frequency,
    sketch,
)

SOURCE = Source(
    "S2",
    "Madhusudan Verma",
    "Revisiting Linformer with a modified self-attention with linear complexity",
    "linear attention",
)


@SOURCE.claim(
    "S2.scaling",
    "2, step (a)",
    "With scaling functions, f(Q)f(K)'V and f(QK')V are the same",
    r"\tfrac{Q}{\sqrt n}\big(\tfrac{K^\top}{\sqrt n}V\big)=\tfrac{QK^\top}nV",
    Outcome.HOLDS,
    "Without a softmax, attention has linear cost.",
)
def scaling_functions() -> Finding:
    q, k, v = (draw(9, 4, seed=i) for i in range(3))
    n = 9
    left = (q / math.sqrt(n)) @ ((k / math.sqrt(n)).mT @ v)
    return Finding(equal("f(Q) f(K)' V = f(Q K') V for f = x/sqrt(n) and x/n", left, (q @ k.mT / n) @ v))


@SOURCE.claim(
    "S2.jl",
    "2, JL lemma",
    "8 ln q / eps^2 dimensions preserve distances between q points",
    r"n>8\ln q/\varepsilon^2",
    Outcome.HOLDS,
    "Random projections preserve distances.",
)
def jl_distances() -> Finding:
    """q points, k > 8 ln q / eps^2: the share of Gaussian maps that preserve all squared distances within eps."""
    points, epsilon = 40, 0.5
    k = math.ceil(8 * math.log(points) / epsilon**2) + 1
    x = draw(points, 300)
    exact = torch.pdist(x).square()
    preserved = 0
    for seed in range(20):
        ratio = torch.pdist(x @ sketch(k, 300, generator(1000 + seed)).mT).square() / exact
        preserved += bool(((ratio > 1 - epsilon) & (ratio < 1 + epsilon)).all())
    return Finding(at_most(f"1 - share of Gaussian maps that do, {points} points, k = {k}", 1 - preserved / 20, 0.99))


def failures(test, draws: int = 300) -> Frequency:
    """Seeds differ from those of the vectors, so that sketch and vector are independent."""
    return Frequency(sum(bool(test(generator(1000 + seed))) for seed in range(draws)), draws)


@SOURCE.claim(
    "S2.lemma-1",
    "3.1, Lemma 1",
    "A random projection rarely stretches a vector",
    r"\Pr(\|Rx\|\le(1+\varepsilon)\|x\|)\ge1-2e^{-(\varepsilon^2-\varepsilon^3)k/4}",
    Outcome.HOLDS,
    "True, with a large margin.",
)
def jl_lemma_1() -> Finding:
    n, k, epsilon = 64, 60, 0.5
    x = draw(n)
    stretched = failures(lambda g: (sketch(k, n, g) @ x).norm() > (1 + epsilon) * x.norm())
    allowed = 2 * math.exp(-(epsilon**2 - epsilon**3) * k / 4)
    return Finding(at_most("upper end of the failure rate's interval", stretched.interval[1], allowed))


@SOURCE.claim(
    "S2.lemma-2",
    "3.1, Lemma 2",
    "||xR'Ry|| <= eps ||xy|| with high probability",
    r"\Pr(\|xR^\top Ry\|\le\varepsilon\|xy\|)\ge1-2e^{-(\varepsilon^2-\varepsilon^3)k/4}",
    Outcome.CORRECTED,
    "The error is relative to the lengths of the vectors, not to an inner product near zero.",
    premise="R is independent of x and y; with the stated probability",
    truth="|xR'Ry - xy| <= eps ||x|| ||y||",
)
def jl_lemma_2() -> Finding:
    """As printed, the sketched product itself is bounded; for orthogonal vectors it would have to vanish."""
    n, epsilon, k = 2, 0.5, 100
    x, y = matrix([[1.0, 0.0]])[0], matrix([[0.0, 1.0]])[0]
    allowed = 2 * math.exp(-(epsilon**2 - epsilon**3) * k / 4)

    def sketched(g: torch.Generator) -> Tensor:
        r = sketch(k, n, g)
        return (r @ x) @ (r @ y)

    printed = failures(lambda g: sketched(g).abs() > epsilon * (x @ y).abs())
    true = failures(lambda g: (sketched(g) - x @ y).abs() > epsilon * x.norm() * y.norm())
    return Finding(
        at_most("lower end of the failure rate's interval, as printed", printed.interval[0], allowed),
        corrected=at_most("upper end, |xR'Ry - xy| <= eps ||x|| ||y||", true.interval[1], allowed),
        example=f"x = (1, 0), y = (0, 1): xy = 0, so xR'Ry would have to be 0; with k = {k} the first draw gives "
        f"{sketched(generator(1000)).item():+.3f}. As printed it fails in {printed.failures} of {printed.draws} draws, "
        f"corrected in {true.failures}",
    )


@SOURCE.claim(
    "S2.union",
    "3.1, eq. (1)",
    "Without eps: ||uR'Rw - uw|| <= ||uw|| with probability 1 - 2 e^(-(eps^2 - eps^3) k / 4)",
    r"\Pr(\|uR^\top Rw-uw\|\le\|uw\|)>1-2e^{-(\varepsilon^2-\varepsilon^3)k/4}",
    Outcome.CORRECTED,
    "The eps of the lemma is lost, and with it what the theorem is about; relative to uw even that fails.",
    premise="R is independent of u and w",
    truth="|uR'Rw - uw| <= eps ||u|| ||w|| with the stated probability",
)
def lost_epsilon() -> Finding:
    """Row vectors u and w of cosine 1/20, k = 100: an error of the whole product is allowed, and exceeded."""
    n, k, epsilon = 64, 100, 0.5
    u, w = draw(n), draw(n, seed=1)
    w = w - (w @ u) / (u @ u) * u
    w = w / w.norm() + u / u.norm() / 20
    allowed = 2 * math.exp(-(epsilon**2 - epsilon**3) * k / 4)

    def error(g: torch.Generator) -> Tensor:
        r = sketch(k, n, g)
        return ((r @ u) @ (r @ w) - u @ w).abs()

    printed = failures(lambda g: error(g) > (u @ w).abs())
    fixed = failures(lambda g: error(g) > epsilon * u.norm() * w.norm())
    return Finding(
        at_most("lower end of the failure rate's interval, as printed", printed.interval[0], allowed),
        corrected=at_most("upper end, within eps ||u|| ||w||", fixed.interval[1], allowed),
        example=f"cosine 1/20, k = {k}: the error exceeds the whole product uw in {printed.failures} of "
        f"{printed.draws} draws, and eps ||u|| ||w|| in {fixed.failures}; allowed is a rate of {allowed:.3f}",
    )


@SOURCE.claim(
    "S2.rank",
    "3.1",
    "P R'R has rank at most k",
    r"\mathrm{rank}(PR^\top R)\le k",
    Outcome.HOLDS,
    "So it can be applied in linear time.",
)
def rank_at_most_k() -> Finding:
    n, k = 40, 6
    p = efficient(draw(n, 8), draw(n, 8, seed=1)).dense()
    r = sketch(k, n, generator(2))
    rank = int(torch.linalg.matrix_rank(p @ r.mT @ r))
    return Finding(at_most("rank of P R'R", rank, k))


@SOURCE.claim(
    "S2.normaliser",
    "3.1",
    "exp(A) D_A^-1 exp(B) D_B^-1 with column sums is the attention",
    r"(D_A)_{ii}=\sum_j\exp(A_{ji})",
    Outcome.CORRECTED,
    "Read by rows, the product of two softmaxes averages, as attention should.",
    premise="none",
    truth="rows of both factors sum to one",
)
def stochastic_reading() -> Finding:
    """D as printed sums the columns of exp(A); with row sums, H L averages."""
    a, b = matrix([[math.log(3.0), 0.0], [0.0, 0.0]]), matrix([[0.0, 0.0], [0.0, 0.0]])
    by_columns = (a.exp() / a.exp().sum(0)) @ (b.exp() / b.exp().sum(0))
    by_rows = torch.softmax(draw(9, 4), -1) @ torch.softmax(draw(4, 9, seed=1), -1)
    return Finding(
        equal("rows of exp(A) D_A^-1 exp(B) D_B^-1 less one", by_columns.sum(-1), 1.0, 1e-9),
        corrected=equal("rows of softmax_rows(A) softmax_rows(B) less one", by_rows.sum(-1), 1.0),
        example=f"exp(A) = [[3, 1], [1, 1]], B = 0: the product is {shown(by_columns)}, whose rows sum to "
        f"{by_columns[0].sum().item():g} and {by_columns[1].sum().item():g}: the weights of a query do not add up to "
        "one",
    )


@SOURCE.claim(
    "S2.order",
    "3.2",
    "H(LX) is cheaper than (HL)X",
    r"nd^2+d^2k<2ndk",
    Outcome.HOLDS_WITH_PREMISE,
    "Multiply the small matrices first; which they are depends on d and k.",
    premise="d (n + k) < 2 n k, so d below about 2 k",
)
def order_of_products() -> Finding:
    def counts(n: int, d: int, k: int) -> tuple[int, int]:
        return n * d * d + d * k * d, 2 * n * d * k

    n, d, k = 64, 8, 24
    h, low, x = draw(n, d), draw(d, k, seed=1), draw(k, d, seed=2)
    same = bool(((h @ low) @ x - h @ (low @ x)).abs().max() < 1e-10)
    first, wide = counts(n, d, k), counts(n, 64, 16)
    return Finding(
        at_most(f"multiply-adds of H(LX), against (HL)X, d = {d}", first[0] if same else math.inf, first[1]),
        without=at_most("the same with d = 64, k = 16", wide[0], wide[1]),
        example=f"n = 64: {first[0]:,} against {first[1]:,} at d = 8, k = 24; {wide[0]:,} against {wide[1]:,} at d = "
        "64, k = 16",
    )


@SOURCE.claim(
    "S2.independent",
    "3.2, Table 1",
    "The cost O(n d^2) does not depend on the projection dimension k",
    r"O(nd^2)",
    Outcome.CORRECTED,
    "Forming E K and F V with dense E, F costs O(nkd). Pool, or sketch by signs, and it becomes true.",
    premise="pooling, CountSketch, or another projection whose cost does not grow with k",
    truth="independent of k for projections that cost O(nd)",
)
def independent_of_k() -> Finding:
    """Multiply-adds of the whole layer at k = 16 and k = 256, with dense and with cheap projections."""
    n, d = 1024, 16
    q, key = draw(n, d).float(), draw(n, d, seed=1).float()

    def ratio(make) -> float:
        return factored(q, key, make(256)).cost(d).multiply_adds / factored(q, key, make(16)).cost(d).multiply_adds

    full = ratio(lambda k: dense(draw(k, n, seed=2).float()))
    pooled = ratio(lambda k: pooling(n, n // k))
    hashed = ratio(lambda k: count_sketch(n, k, generator=generator(3)))
    return Finding(
        at_most("cost at k = 256 over cost at k = 16, dense E and F", full, 1.5),
        corrected=at_most("the same with pooling or a CountSketch", max(pooled, hashed), 1.5),
        example=f"n = {n}, d = {d}: forming E K and F V with dense E and F takes 2 n k d products, {2 * n * 16 * d:,} "
        f"at k = 16 and {2 * n * 256 * d:,} at k = 256. The whole layer does {full:.1f} times the work; with pooling "
        f"{pooled:.2f} times, with a CountSketch {hashed:.2f} times",
    )


@SOURCE.claim(
    "S2.figure-1",
    "Figure 1",
    "The new context matrix is low rank",
    r"\mathrm{rank}(HL)\le d",
    Outcome.HOLDS,
    "It is a product through d features; softmax attention is not low rank for this reason.",
)
def long_tail() -> Finding:
    """Figure 1: the double softmax has rank at most d, whatever n."""
    ranks = [int(torch.linalg.matrix_rank(efficient(draw(n, 8), draw(n, 8, seed=1)).dense())) for n in (32, 128)]
    plain = int(torch.linalg.matrix_rank(softmax(3 * draw(128, 8), 3 * draw(128, 8, seed=1)).dense(), rtol=1e-6))
    return Finding(
        at_most("rank of the double softmax, d = 8", max(ranks), 8),
        example=f"n = 128: the double softmax has rank {ranks[1]}, softmax attention on sharp scores {plain}",
    )


add_table(
    SOURCE,
    {"efficient": ("This model", "O(nd^2)", "For E = F = I, which is Efficient Attention.")},
    {"efficient": ("This model", "O(1)", "Three products.")},
)


@SOURCE.claim(
    "S2.table-projected",
    "Table 1",
    "A Linformer costs O(nk) a layer",
    r"\text{Linformer}: O(nk)",
    Outcome.HOLDS,
    "Choose k once; it does not grow with n.",
    timing=partial(timed_growth, "projected"),
)
def linformer_in_k() -> Finding:
    """O(nk): the cost at a fixed length against the projection size."""
    n, sizes = 512, (32, 64, 128, 256)
    q, k = draw(n, 16).float(), draw(n, 16, seed=1).float()
    costs = [projected(q, k, dense(draw(size, n, seed=2).float())).cost(16).multiply_adds for size in sizes]
    in_k, in_n = exponent(sizes, costs).value, growth("projected", "multiply_adds").value
    return Finding(
        at_most("larger of the fitted exponents in n and in k", max(in_k, in_n), 1 + SLACK),
        example=f"in k: exponent {in_k:.2f}, in n: {in_n:.2f}",
    )


@SOURCE.claim(
    "S2.reformer",
    "1",
    "The efficiency gain of the Reformer appears only after a length of 2048",
    r"n>2048",
    Outcome.HOLDS_WITH_PREMISE,
    "By counted operations the gain begins at about 256 keys a round; by the clock it depends on the implementation "
    "(`headwise bench peers`).",
    premise="eight rounds of hashing with chunks of 64; with four rounds it begins at half that length",
)
def where_the_reformer_gains() -> Finding:
    """The smallest power of two at which hashed attention does fewer multiply-adds than exact attention."""

    def begins(rounds: int) -> int:
        for n in (128, 256, 512, 1024, 2048, 4096):
            q, k = draw(n, 16).float(), draw(n, 16, seed=1).float()
            cost = hashed(q, k, rounds=rounds, chunk=64, generator=generator(2)).cost(16).multiply_adds
            if cost < softmax(q, k).cost(16).multiply_adds:
                return n
        return 8192

    four, eight = begins(4), begins(8)
    return Finding(
        at_most("2048 over the length at which eight rounds gain", 2048 / eight, 1.0),
        without=at_most("the same with four rounds", 2048 / four, 1.0),
        example=f"fewer multiply-adds than exact attention from n = {four} with four rounds, {eight} with eight, among "
        "powers of two",
    )


@SOURCE.claim(
    "S2.quadratic-space",
    "1",
    "Self-attention uses quadratic time and space",
    r"O(n^2)\text{ space}",
    Outcome.HOLDS_WITH_PREMISE,
    "Memory is no longer a reason to replace exact attention; time is.",
    premise="P is formed; a fused kernel needs quadratic time and linear space",
)
def quadratic_space() -> Finding:
    """Exact attention with P formed, and with a kernel that never forms it."""
    formed, fused = formed_memory_growth(), memory_growth("softmax")
    return Finding(
        at_most("distance of the exponent of peak memory from 2, P formed", abs(formed.value - 2), SLACK),
        without=at_most("the same with a fused kernel", abs(fused.value - 2), SLACK),
        example=f"peak memory {formed} with P formed, {fused} with torch's fused attention, for the same output",
    )


@SOURCE.claim(
    "S2.linear-space",
    "Abstract",
    "The new attention is linear in space",
    r"O(n)\text{ space}",
    Outcome.HOLDS,
    "So is exact attention in a fused kernel; the gain is in time.",
)
def linear_space() -> Finding:
    growths = {name: memory_growth(name) for name in ("efficient", "factored")}
    return Finding(
        at_most("exponent of peak memory", max(growth.value for growth in growths.values()), 1 + SLACK),
        example=", ".join(f"{name} {growth}" for name, growth in growths.items()),
    )
