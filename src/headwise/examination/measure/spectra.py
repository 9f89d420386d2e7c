"""The spectrum of P per head, and what the best P_r of rank r does to the head's output.

    P = U diag(sigma) W^T      P_r keeps the r largest sigma (Eckart & Young 1936)
    ||(P - P_r) V||_F^2 = sum_(i > r) ||u_i^T P V||^2 = sum_(i > r) sigma_i^2 ||w_i^T V||^2

The second line, with V the values of the head, is the error that the model sees: the u_i are orthonormal, so the parts
add up.  Its last form divides by no sigma, so that a direction with sigma = 0 carries nothing.  The energy of sigma
alone misleads where an attention sink carries most of P and almost none of the output.

If sigma_r = sigma_(r+1) there are many best P_r, which differ in what they do to V; what tied directions carry together
is then divided equally between them, which gives the root mean square of the error over all best P_r.

Up to EXACT tokens each head is decomposed in float64; beyond, the leading values come from block Krylov iteration, and
sums over all of them from the quadrature of `linalg.quadrature` on the same iteration, each with its error.  That takes
24 products of P or P^T with 64 columns for each head, about 24 forward passes of its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.linalg import ranks
from headwise.linalg.krylov import singular_vectors
from headwise.linalg.quadrature import Estimate, SpectralSums
from headwise.linalg.spectrum import Spectrum
from headwise.operators._kernels.native.eigenvalue_shares import eigenvalue_shares
from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax

EXACT = 1536
"""Longest shorter side of P that is decomposed in full, 19 MB in float64: beyond, P is larger than the bases below."""

LARGEST_RANK = 256
"""Singular values computed beyond EXACT tokens, and so the largest rank r that a measure may use."""

STEPS = 12
"""Steps of block Krylov iteration, each with a block of 64 columns."""

NUMERIC_RANK = 1e-3
"""Singular values above this multiple of the first one count for the numeric rank."""


@dataclass(frozen=True, eq=False)
class HeadSpectrum:
    """Singular values of P of one head on one text; the input of spectral measures."""

    spectrum: Spectrum  # every singular value if exact, else the LARGEST_RANK leading ones and ||P||_F
    output_shares: Tensor  # ||u_i^T P V||^2 / ||P V||_F^2 for each of them, equal for equal singular values
    effective_rank: Estimate  # exact if the spectrum is
    numeric_rank: Estimate

    @property
    def values(self) -> Tensor:
        return self.spectrum.values


def spectra(scores: Scores, v: Tensor, *, generator: torch.Generator | None = None) -> list[HeadSpectrum]:
    """One HeadSpectrum a head: q (h, m, k), k (h, n, k), v (h, n, d)."""
    h, m, n = scores.shape
    exact = min(m, n) <= EXACT

    def decompose(head: int) -> HeadSpectrum:
        one = Scores(scores.q[head], scores.k[head], scores.scale, scores.mask.index(head))
        return _all_values(one, v[head]) if exact else _leading_values(one, v[head], generator)

    # beyond EXACT a head is a sequence of fused calls that use all threads themselves
    return _one_thread_each(decompose, h) if exact else [decompose(head) for head in range(h)]


def _one_thread_each(work: Callable[[int], HeadSpectrum], count: int) -> list[HeadSpectrum]:
    """[work(0), ..., work(count - 1)] in a thread pool, one torch thread each: a small matrix does not occupy two."""
    threads = torch.get_num_threads()
    if threads == 1 or count == 1:
        return [work(i) for i in range(count)]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, range(count)))
    finally:
        torch.set_num_threads(threads)


def _all_values(scores: Scores, v: Tensor) -> HeadSpectrum:
    """All singular values, and the share of ||P V||^2 that each direction carries, from the smaller Gram matrix."""
    p, v = Softmax(scores.to(torch.float64)).dense(), v.double()
    if p.shape[0] <= p.shape[1]:
        squares, carried = eigenvalue_shares(p @ p.mT, p @ v)
    else:
        squares, carried = eigenvalue_shares(p.mT @ p, v)
        carried = squares.clamp(min=0) * carried
    squares = squares.clamp(min=0)
    carried = _shared_between_ties(squares, carried)
    values, unknown = squares.sqrt(), torch.full_like(squares, torch.nan)
    spectrum = Spectrum(values, unknown, unknown, True, len(values), squares.sum().sqrt())
    return HeadSpectrum(
        spectrum,
        carried / carried.sum().clamp(min=1e-300),
        Estimate(ranks.effective_rank(spectrum).item()),
        Estimate(float(ranks.numeric_rank(spectrum, NUMERIC_RANK))),
    )


def _shared_between_ties(squares: Tensor, carried: Tensor) -> Tensor:
    """The mean of `carried` over each run of equal `squares`: equal to rounding, n eps sigma_1^2."""
    rounding = len(squares) * torch.finfo(torch.float64).eps * squares[0]
    run = torch.nn.functional.pad((squares[:-1] - squares[1:] > rounding).long(), (1, 0)).cumsum(0)
    sums = carried.new_zeros(len(squares)).index_add_(0, run, carried)
    return (sums / run.bincount(minlength=len(squares)).clamp(min=1))[run]


def _leading_values(scores: Scores, v: Tensor, generator: torch.Generator | None) -> HeadSpectrum:
    """The LARGEST_RANK leading singular values, what they carry, and estimates of sums over all of them."""
    operator = Softmax(scores.to(torch.float32))
    triplets = singular_vectors(
        operator.apply,
        operator.adjoint_map(),
        operator.shape,
        LARGEST_RANK,
        like=operator.like,
        generator=generator,
        steps=STEPS,
        certificate=0,
    )
    output = operator.apply(v.float()).double()
    carried = (triplets.left.mT @ output).square().sum(-1)
    values, sums = triplets.spectrum.values, SpectralSums.of(triplets)
    least = NUMERIC_RANK * values[0].item()
    above = int((values > least).sum())
    return HeadSpectrum(
        replace(triplets.spectrum, frobenius=operator.frobenius().double()),
        carried / output.square().sum().clamp(min=1e-300),
        sums.effective_rank(),
        Estimate(float(above)) if above < len(values) else sums.count_above(least),
    )
