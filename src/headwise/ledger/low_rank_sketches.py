"""Random sketches P R'R of an attention matrix: the low-rank theorem of Linformer, by Xie (S0) and Verma (S2)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from headwise.ledger.entry import Finding, Outcome, at_most, draw, equal, generator, matrix
from headwise.ledger.linear_attention import SOURCE as VERMA
from headwise.ledger.linear_attention import failures
from headwise.ledger.rank_collapse import SOURCE as XIE
from headwise.operators.linear.efficient import efficient
from headwise.operators.softmax import softmax
from headwise.testing.counting import MultiplyAdds
from headwise.theory import concentration
from headwise.theory.collapse import relative_residual
from headwise.theory.complexity import exponent
from headwise.theory.concentration import (
    expected_square,
    first_length,
    measured_square,
    sketch,
    sketch_size,
)


@XIE.claim(
    "S0.low-rank",
    "Theorem 2.3",
    "A random sketch of rank O(log n) reproduces P w within eps ||P w||",
    r"\|PR^\top Rw-Pw\|\le\varepsilon\|Pw\|",
    Outcome.CORRECTED,
    "The error is relative to ||P|| ||w||, not to the output: for zero-mean values the sketch is noise. For rank k, "
    "truncate the spectrum or learn the projection.",
    premise="R is independent of P and w",
    truth="E||PR'Rw - Pw||^2 = (||P||_F^2 ||w||^2 + ||Pw||^2) / k",
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
        at_most(f"lower end of the failure rate's interval, n = {n}, k = {k}", failed.interval[0], 0.05),
        corrected=at_most("second moment, distance in standard errors", abs(mean - expected) / error, 4.0),
        example=f"P = (1/2, 1/2), w = (1, -1)': P w = 0, so the claim allows no error, but a sketch of 8 rows has "
        f"error {off:+.3f}; at n = {n}, w of zero mean fails in {failed.failures} of {failed.draws} draws, w nearly "
        f"constant in {easy.failures}; of ||P||_F = {size:.3g} the sketch loses {random:.3g} and the best matrix of "
        f"that rank {best:.2g}",
    )


@XIE.claim(
    "S0.exponential",
    "2.3, proof",
    "softmax(A / sqrt(d)) = exp(sqrt(d) A) D^-1",
    r"\mathrm{softmax}(A/\sqrt d)=\exp(\sqrt d A)D_A^{-1}",
    Outcome.CORRECTED,
    "A misprint with consequences for whoever implements it: scores d times too large.",
    premise="D holds the row sums and stands on the left",
    truth="D^-1 exp(A / sqrt(d))",
)
def exponential_form() -> Finding:
    a, d = draw(5, 5), 16

    def scaled(factor: float, by_rows: bool) -> Tensor:
        e = (factor * a).exp()
        return e / e.sum(-1, keepdim=True) if by_rows else e / e.sum(-2, keepdim=True)

    p = torch.softmax(a / math.sqrt(d), -1)
    rows = scaled(math.sqrt(d), False).sum(-1)
    return Finding(
        equal("exp(sqrt(d) A) D^-1 against softmax(A / sqrt(d)), d = 16", scaled(math.sqrt(d), False), p),
        corrected=equal("D^-1 exp(A / sqrt(d)) against it", scaled(1 / math.sqrt(d), True), p),
        example=f"as printed, D^-1 on the right divides columns: the first row sums to {rows[0].item():.3f}, not to 1",
    )


@XIE.claim(
    "S0.svd",
    "2.3, proof",
    "The SVD of P~ achieves linear complexity",
    r"\tilde P\simeq\sum_{i=1}^k\sigma_iu_iv_i^\top",
    Outcome.REFUTED,
    "To sketch or decompose P one needs P, or products with it: n^2 operations. Linformer learns its projections, "
    "which replaces the decomposition.",
)
def svd_needs_p() -> Finding:
    """Operations before the first product with the k singular vectors, as n grows: the exponent of forming P R'."""
    lengths = (256, 512, 1024, 2048)
    counts = []
    for n in lengths:
        q, key, r = draw(n, 8), draw(n, 8, seed=1), sketch(16, n, generator(2))
        with MultiplyAdds() as count:
            _ = torch.softmax(q @ key.mT, -1) @ r.mT
        counts.append(count.products)
    fitted = exponent(lengths, counts)
    return Finding(
        at_most("exponent of the operations that the decomposition needs", fitted.value, 1.05),
        example=f"forming P R' for a sketch of 16 rows takes {counts[0]:,} multiply-adds at n = 256 and "
        f"{counts[-1]:,} at n = 2048: {fitted}; only the products with k vectors afterwards are linear",
    )


@XIE.claim(
    "S0.rank",
    "2.3",
    "The rank is Theta(log n * log n)",
    r"\mathrm{rank}\,\tilde P=\Theta(\log n\cdot\log n)",
    Outcome.CORRECTED,
    "The theorem itself states Theta(log n). The logarithm is the price of all rows at once; the sum over rows needs "
    "none (S2.independent-of-n).",
    premise="every row of P w within eps ||p_i|| ||w||, for one w that does not depend on R",
    truth="rank = Theta(log n)",
)
def rank_of_the_sketch() -> Finding:
    """The rank that keeps every row of P w within eps ||p_i|| ||w||, measured: k eps^2 where half of the draws do."""
    lengths = (2**6, 2**12)
    needed = [concentration.rank_for_all_rows(n, draws=200, generator=generator(n)) for n in lengths]
    ratio, logs = needed[1] / needed[0], math.log(lengths[1]) / math.log(lengths[0])
    return Finding(
        at_most("distance of k(4096) / k(64) from 4, the value for log n * log n", abs(ratio - logs**2), 0.4),
        corrected=at_most("distance from 2, the value for log n", abs(ratio - logs), 0.4),
        example=f"P = I, whose rows are as different as rows of P can be, 200 draws: half of them keep all rows within "
        f"eps with k = {needed[0]:.1f} / eps^2 at n = 64 and {needed[1]:.1f} / eps^2 at n = 4096: {ratio:.2f} times "
        f"as many, where log n has doubled",
    )


def _sizes(p: Tensor, rows: int, constant: float, epsilon: float = 0.5) -> Finding:
    """||PR'Rw - Pw|| <= eps ||Pw|| for an ordinary w, with k from the product and from the quotient; and row by row.

    The corrected statement bounds every one of the first `rows` rows by eps ||p_i|| ||w||, which Lemma 2 (corrected)
    and a union bound allow to fail with probability 2 rows e^(-(eps^2 - eps^3) k / 4).
    """
    n = p.shape[-1]
    size = rows // 2 if rows < n else n  # log d, for 2 d rows, or log n
    small = max(1, round(constant * math.log(size) * (epsilon**2 - epsilon**3)))
    right = sketch_size(size, epsilon, constant)
    allowed = 2 * rows * math.exp(-(epsilon**2 - epsilon**3) * right / 4)

    def errors(g: torch.Generator, k: int) -> tuple[Tensor, Tensor]:
        w = torch.randn(n, dtype=torch.float64, generator=g)
        r = sketch(k, n, g)
        return p[:rows] @ (r.mT @ (r @ w)) - p[:rows] @ w, w

    def whole(g: torch.Generator, k: int) -> bool:
        error, w = errors(g, k)
        return bool(error.norm() > epsilon * (p[:rows] @ w).norm())

    def row_by_row(g: torch.Generator) -> bool:
        error, w = errors(g, right)
        return bool((error.abs() > epsilon * p[:rows].norm(dim=-1) * w.norm()).any())

    product, quotient = (failures(partial(whole, k=k), 60) for k in (small, right))
    fixed = failures(row_by_row, 60 if allowed > 0.2 else 320)  # enough for the interval to fall below `allowed`
    lengths = ", ".join(f"n = {first_length(e):,} at eps = {e:g}" for e in (0.5, 0.2, 0.1, 0.05))
    saves = f"It is below n, so that a sketch saves anything, only from {lengths}" if size == n else "It is free of n"
    return Finding(
        at_most(f"lower end of the failure rate's interval, k = {small}", product.interval[0], 0.05),
        corrected=at_most(f"upper end row by row, k = {right}, allowed {allowed:.2g}", fixed.interval[1], allowed),
        example=f"n = {n}, eps = 1/2, ordinary w: the product gives k = {small}, which fails in {product.failures} of "
        f"{product.draws} draws, the quotient k = {right}, which fails in {quotient.failures}; row by row, relative "
        f"to ||p_i|| ||w||, it fails in {fixed.failures} of {fixed.draws}. {saves}",
    )


@VERMA.claim(
    "S2.low-rank",
    "3.1",
    "A sketch of rank 5 log(n) / (eps^2 - eps^3) reproduces P c within eps ||P c||",
    r"\Pr(\|\tilde Pc-Pc\|\le\varepsilon\|Pc\|)>1-o(1)",
    Outcome.CORRECTED,
    "As for softmax attention (S0.low-rank): the error is relative to ||P|| ||c||.",
    premise="R is independent of P and c",
    truth="E||PR'Rc - Pc||^2 = (||P||_F^2 ||c||^2 + ||Pc||^2) / k",
)
def low_rank_of_two_softmaxes() -> Finding:
    """The theorem of Wang et al. 2020, for the product of two softmaxes."""
    return sketched(efficient(draw(512, 16), draw(512, 16, seed=1)).dense())


@VERMA.claim(
    "S2.delta",
    "3.2",
    "E = delta R, F = e^-delta R, delta = 2^-n is close to the unprojected attention",
    r"E=\delta R,\ F=e^{-\delta}R,\ \delta=2^{-n}",
    Outcome.REFUTED,
    "Do not use it: E K vanishes and every token gets the same output. Learn E and F, or pool.",
)
def delta_construction() -> Finding:
    """E = delta R, F = e^-delta R with delta = 2^-n: the distance from attention without projection."""
    n, d, k = 64, 8, 16
    q, key, v = (draw(n, d, seed=i) for i in range(3))
    r = sketch(k, n, generator(3))
    h = torch.softmax(q / math.sqrt(d), -1)
    whole = h @ (torch.softmax(key.mT / math.sqrt(d), -1) @ v)

    def projected(delta: float) -> Tensor:
        low = torch.softmax((delta * r @ key).mT / math.sqrt(d), -1)
        return h @ (low @ (math.exp(-delta) * r @ v))

    tiny, one = projected(2.0**-n), projected(1.0)
    exact = relative_residual(softmax(q, key)(v)).item()
    spread = relative_residual(tiny).item()
    return Finding(
        at_most("error relative to the unprojected attention", ((tiny - whole).norm() / whole.norm()).item(), 0.5),
        example=f"n = 64, delta = 2^-64: all entries of E K are below {(2.0**-n * r @ key).abs().max():.0e}, so every "
        f"row of L is uniform, 1/{k} for each slot, and every token gets the same output: relative residual "
        f"{spread:.0e}, at delta = 1 {relative_residual(one).item():.2g}, without projection "
        f"{relative_residual(whole).item():.2g}, for softmax attention {exact:.2g}",
    )


@VERMA.claim(
    "S2.lipschitz",
    "3.2, step (b)",
    "||exp(delta x R) - exp(delta x) R|| = o(||exp x||) for delta = o(1/n)",
    r"\|\exp(\delta xR)-\exp(\delta x)R\|=o(\|\exp x\|)",
    Outcome.REFUTED,
    "As delta -> 0 the first term tends to ones and the second to the column sums of R, which do not come closer: the "
    "proof that a projection may be put inside the exponential breaks here.",
)
def exponential_and_projection() -> Finding:
    """The ratio of the two sides at delta = 2^-n, k = 5 ln n / (eps^2 - eps^3), eps = 1/2, as n grows."""
    lengths, ratios = (64, 256, 1024, 4096), []
    for n in lengths:
        x, delta, k = draw(n), 2.0**-n, sketch_size(n, 0.5)
        r = sketch(k, n, generator(n)).mT  # n x k, as the text multiplies from the right
        ratios.append((((delta * x) @ r).exp() - (delta * x).exp() @ r).norm().item() / x.exp().norm().item())
    fitted = exponent(lengths, ratios)
    return Finding(
        at_most("the ratio at n = 4096, which should vanish", ratios[-1], 0.1),
        example="delta = 2^-n: "
        + ", ".join(f"{ratio:.2f} at n = {n}" for n, ratio in zip(lengths, ratios, strict=True))
        + f", {fitted}: it does not vanish. exp(delta x R) tends to a vector of k ones, exp(delta x) R to the column "
        "sums of R, which are normal of variance n / k",
    )


@VERMA.claim(
    "S2.gamma",
    "3.2, after (4)",
    "Every row of P is a combination Gamma_i of a few rows, with ||Gamma_i|| = O(d)",
    r"P=\Gamma P^s,\ \|\Gamma_i\|=\Theta(d)",
    Outcome.HOLDS_WITH_PREMISE,
    "The rest of that proof rests on eq. (4), which is false; its conclusion holds for a simpler reason "
    "(S2.independent-of-n).",
    premise="the rows of P^s are those of largest volume; the text takes any that have the rank of P",
)
def gamma_construction() -> Finding:
    """max_i ||Gamma_i|| / d for d rows of largest volume, and for rows of queries that are nearly equal."""
    n, d = 256, 8
    q = draw(n, d)
    q[:d] = q[0] + 1e-6 * draw(d, d, seed=2)
    p = torch.softmax(q, -1) @ torch.softmax(draw(d, n, seed=1), -1)
    basis = torch.linalg.qr(torch.softmax(q, -1))[0]
    chosen = _rows_of_largest_volume(basis)

    def largest(rows: Tensor) -> float:
        gamma = basis @ torch.linalg.inv(basis[rows])
        assert (gamma @ p[rows] - p).abs().max() < 1e-3  # P = Gamma P^s, both choices
        return gamma.norm(dim=-1).max().item() / d

    best, near = largest(chosen), largest(torch.arange(d))
    return Finding(
        at_most("largest ||Gamma_i|| / d, rows of largest volume", best, 1.0),
        without=at_most("the same for rows of nearly equal queries", near, 1.0),
        example=f"n = {n}, d = {d}: {best:.2f} for rows of largest volume, {near:.1e} for {d} rows that have the rank "
        "of P but belong to nearly equal queries. As printed, Gamma also stacks its blocks over one another and "
        "inverts a matrix that is not square",
    )


def _rows_of_largest_volume(basis: Tensor) -> Tensor:
    """d rows of an (n, d) basis such that no exchange increases their determinant: entries of Gamma are at most one."""
    rows = torch.linalg.lu(basis)[0].argmax(0)[: basis.shape[1]]  # where the pivots are
    while True:
        gamma = basis @ torch.linalg.inv(basis[rows])
        place = int(gamma.abs().argmax())
        if gamma.flatten()[place].abs() <= 1 + 1e-9:
            return rows
        rows[place % basis.shape[1]] = place // basis.shape[1]


@VERMA.claim(
    "S2.product-norm",
    "3.2",
    "||ab|| = ||a|| ||b|| for two vectors",
    r"\|ab\|=\|a\|\|b\|",
    Outcome.CORRECTED,
    "Only for outer products; for inner products it is an inequality.",
    premise="none",
    truth="|ab| <= ||a|| ||b||",
)
def norm_of_a_product() -> Finding:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    pairs = [(draw(4, seed=s), draw(4, seed=s + 500)) for s in range(100)]
    excess = max((x @ y).abs().item() - (x.norm() * y.norm()).item() for x, y in pairs)
    return Finding(
        at_most("| |ab| - ||a|| ||b|| | for a = (1, 0), b = (0, 1)'", abs(abs((a @ b).item()) - 1.0), 1e-9),
        corrected=at_most("|ab| <= ||a|| ||b||, largest excess over 100 draws", excess, 0.0),
        example="orthogonal vectors: the product is 0, the product of the lengths is 1",
    )


@VERMA.claim(
    "S2.sketch-size",
    "3.2",
    "k = 5 log(n) (eps^2 - eps^3) reproduces P w within eps ||P w||",
    r"k=5\log n\,(\varepsilon^2-\varepsilon^3)",
    Outcome.CORRECTED,
    "The quotient is meant, but it does not give the inequality either. At eps = 0.1 it exceeds n up to 4,698 tokens.",
    premise="R is independent of P and w; with probability 1 - 2 n^(-1/4), which is weak at ordinary lengths",
    truth="k = 5 log(n) / (eps^2 - eps^3) gives |p_i R'Rw - p_i w| <= eps ||p_i|| ||w|| for all n rows",
)
def size_of_the_sketch() -> Finding:
    """k = 5 log(n) (eps^2 - eps^3), a product, against the quotient, on the inequality that the text is about."""
    p = efficient(draw(512, 16), draw(512, 16, seed=1)).dense()
    return _sizes(p, 512, 5.0)


@VERMA.claim(
    "S2.sketch-size-d",
    "3.2, eq. (4)",
    "k = 9 log(d) (eps^2 - eps^3) reproduces 2d rows of P w within eps ||P w||",
    r"k=9\log d\,(\varepsilon^2-\varepsilon^3)",
    Outcome.CORRECTED,
    "The same as S2.sketch-size, for a number of rows that does not grow with n.",
    premise="R is independent of P and w; with probability 1 - 4 d^(-5/4)",
    truth="k = 9 log(d) / (eps^2 - eps^3) gives |p_i R'Rw - p_i w| <= eps ||p_i|| ||w|| for 2d rows",
)
def size_free_of_n() -> Finding:
    """k = 9 log(d) (eps^2 - eps^3), again a product; d = 64, 128 rows of a matrix of rank 64."""
    p = efficient(draw(256, 64), draw(256, 64, seed=1)).dense()
    return _sizes(p, 128, 9.0)


@VERMA.claim(
    "S2.independent-of-n",
    "3.2, eq. (4)",
    "Because P has rank d, a k that does not depend on n reproduces P w within eps ||P w||",
    r"k=\Theta(\log d),\ \|\tilde Pw-Pw\|\le\varepsilon\|Pw\|",
    Outcome.CORRECTED,
    "A fixed number of slots suffices for any length if the error may be relative to the norms of P and w.",
    premise="in the mean square over R, which is independent of P and w",
    truth="||PR'Rw - Pw|| <= eps ||P||_F ||w|| for a k that depends on neither n nor d",
)
def independent_of_n() -> Finding:
    """k = 9 ln d / (eps^2 - eps^3), the same for every n: the error relative to ||P w||, and to ||P||_F ||w||."""
    d, epsilon = 8, 0.5
    k = sketch_size(d, epsilon, 9.0)
    to_output, to_lengths = [], []
    for n in (64, 256, 1024):
        p, w = efficient(draw(n, d), draw(n, d, seed=1)).dense(), draw(n, 1, seed=2)
        w = w - w.mean()
        root = math.sqrt(expected_square(p, w, k))
        measured = math.sqrt(measured_square(p, w, k, 20, generator=generator(3))[0])
        to_output.append(measured / (p @ w).norm().item())
        to_lengths.append(max(measured, root) / (p.norm() * w.norm()).item())
    return Finding(
        at_most(f"error relative to ||Pw||, k = {k}, largest over n = 64 … 1024", max(to_output), epsilon),
        corrected=at_most("error relative to ||P||_F ||w||", max(to_lengths), epsilon),
        example=f"w of zero mean, k = {k}, n = 64, 256, 1024: relative to ||Pw|| the error is "
        f"{', '.join(f'{x:.1f}' for x in to_output)}; relative to ||P||_F ||w|| "
        f"{', '.join(f'{x:.2f}' for x in to_lengths)}, and this does not need P to be of low rank",
    )
