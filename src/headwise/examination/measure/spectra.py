"""The spectrum of P per head, and what the best rank-r P~ does to the head's output.

    P = U diag(sigma) V^T      P~_r keeps the r largest sigma (Eckart & Young 1936)
    ||(P - P~_r) X||_F^2 = sum_(i > r) ||u_i^T P X||^2        the u_i are orthonormal, so the parts add up

The second line, with X the head's values, is the error that the model sees; the share of energy in sigma alone misleads
where an attention sink carries most of P and almost none of the output.  Up to EXACT tokens one head at a time is
decomposed in float64 and everything is exact; beyond, the leading values come from block Krylov and the effective rank
is an upper estimate, said as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.examination.measure.threads import side_by_side
from headwise.linalg.krylov import singular_vectors
from headwise.linalg.ranks import effective_rank_bounds, energy, stable_rank
from headwise.linalg.spectrum import Spectrum
from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax

EXACT = 1024
"""Longest side of P decomposed whole: 8 MB in float64."""

RANKS = (8, 16, 32, 64, 128, 256)

LEADING = 64
"""Singular values kept for the report."""


@dataclass(frozen=True, eq=False)
class Spectral:
    """Per head: named numbers (h,), the leading singular values (h, <= LEADING), and whether they are exact."""

    numbers: dict[str, Tensor]
    leading: Tensor
    exact: bool


def spectra(scores: Scores, output: Tensor, *, generator: torch.Generator | None = None) -> Spectral:
    """Ranks, energies and rank-r errors of every head: q (h, m, k), k (h, n, k), output P V (h, m, d)."""
    h, m, n = scores.shape
    exact = min(m, n) <= EXACT

    def decompose(head: int) -> tuple[Tensor, Tensor, float]:
        one = _head(scores, head)
        values, shares = _whole(one, output[head]) if exact else _leading(one, output[head], generator)
        return values, shares, _frobenius(one, values, exact)

    # long ones are fused calls that feed all threads
    rows = side_by_side(decompose, h) if exact else [decompose(head) for head in range(h)]
    leading = torch.stack([values[:LEADING] for values, _, _ in rows])
    numbers: dict[str, list[float]] = {}
    for values, shares, frobenius in rows:
        for name, x in _numbers(values, shares, frobenius, min(m, n), exact).items():
            numbers.setdefault(name, []).append(x)
    return Spectral({name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}, leading, exact)


def _head(scores: Scores, head: int) -> Scores:
    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[head] if x.dim() == 3 and x.shape[0] > 1 else x.reshape(x.shape[-2:])

    mask = replace(
        scores.mask, key_mask=None, pair_mask=pick(scores.mask.visible), attn_bias=pick(scores.mask.attn_bias)
    )
    return Scores(scores.q[head], scores.k[head], scores.scale, mask)


def _whole(scores: Scores, output: Tensor) -> tuple[Tensor, Tensor]:
    """All singular values, and the share of ||P V||^2 that each left vector carries, from the smaller Gram matrix."""
    p, output = Softmax(scores.to(torch.float64)).dense(), output.double()
    if p.shape[0] <= p.shape[1]:
        squares, left = torch.linalg.eigh(p @ p.mT)
        carried = (left.mT @ output).square().sum(-1)
    else:
        squares, right = torch.linalg.eigh(p.mT @ p)
        # sigma_i u_i = P v_i; a direction with sigma = 0 carries nothing of P V
        images = p @ right
        lengths = torch.linalg.vector_norm(images, dim=0).clamp(min=1e-300)
        carried = ((images.mT @ output) / lengths.unsqueeze(-1)).square().sum(-1)
    order = squares.argsort(descending=True)
    return squares[order].clamp(min=0).sqrt(), carried[order] / output.square().sum().clamp(min=1e-300)


def _leading(scores: Scores, output: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    operator = Softmax(scores.to(torch.float32))
    triplets = singular_vectors(
        operator.apply, operator.adjoint, operator.shape, max(RANKS), like=operator.like, generator=generator
    )
    carried = (triplets.left.mT @ output.double()).square().sum(-1)
    return triplets.spectrum.values, carried / output.double().square().sum().clamp(min=1e-300)


def _frobenius(scores: Scores, values: Tensor, exact: bool) -> float:
    return values.square().sum().item() if exact else Softmax(scores).frobenius().item() ** 2


def _numbers(values: Tensor, shares: Tensor, frobenius: float, full: int, exact: bool) -> dict[str, float]:
    """Ranks and errors of one head from its singular values (descending) and what each carries of the output."""
    unknown = torch.full_like(values, math.nan)
    norm = values.new_tensor(math.sqrt(frobenius))
    spectrum = Spectrum(values, unknown, unknown, exact=exact, count=full, frobenius=norm)
    first = values[0].item()
    numbers = {
        "effective_rank": effective_rank_bounds(spectrum)[1].item(),  # of a truncated spectrum, an upper bound
        "stable_rank": stable_rank(spectrum).item(),
        "numeric_rank": float((values > 1e-3 * first).sum().item()),
        "sigma_1": first,
        "sigma_ratio": (values[1].item() / first) if len(values) > 1 else 0.0,
    }
    energies = energy(spectrum)
    carried = shares.cumsum(0)
    remaining = shares.flip(0).cumsum(0).flip(0)  # from the small end: no cancellation where the error is small
    for r in RANKS:
        if r >= full:
            numbers[f"energy_{r}"], numbers[f"output_error_{r}"] = 1.0, 0.0
            continue
        numbers[f"energy_{r}"] = energies[r - 1].item()
        left = remaining[r].item() if exact else max(0.0, 1 - carried[r - 1].item())
        numbers[f"output_error_{r}"] = math.sqrt(left)
    return numbers
