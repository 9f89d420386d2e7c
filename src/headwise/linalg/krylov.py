"""P ~ U diag(sigma) V^T from apply and adjoint alone: batched block Golub-Kahan, P is never formed.

From a Gaussian block V_1 the bases of `bidiagonal` grow by a block a step.  In them P = [[B, C], [0, D]], and

    values_i = sigma_i([B C]) <= sigma_i(P)                                  always (interlacing), up to rounding
    sigma_i(P) <= values_i + errors_i         but for a probability of 1e-9 over the random blocks (`error_bounds`)

The second line costs `certificate` further steps, which bound ||D||, and a product of D with the newest block; the
bound is then the quadratic residual bound ||r||^2 / gap for all values at once, with their indices, and the least that
holds for every such D.
`residuals` is weaker and needs no further product: for unit u, v some singular value of P lies within
sqrt((||P v - s u||^2 + ||P^T u - s v||^2) / 2) of s (Weyl, on [[0, P], [P^T, 0]]).

Golub & Kahan 1965; wide block and few steps: Musco & Musco 2015.

Measured on softmax heads (benchmarks/spectrum.py): block 64 x 6 steps gives the first 32 values to 1e-4 and all 128 to
5e-2 at n = 4096, scores with standard deviations of 2 to 16, and the first 32 to 2e-4 at n = 16384; 5 steps leave 2e-3
there.  The time of the fused kernel grows with the block beyond the head width, so a wider block is not faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError
from headwise.linalg.basis import checked_map, checked_shape, gaussian_blocks, work_dtype
from headwise.linalg.bidiagonal import Bidiagonalisation, Explored
from headwise.linalg.error_bounds import TINY, ceilings, newest_gram, remainder_norm
from headwise.linalg.spectrum import Spectrum, exact_spectrum, rounding
from headwise.shapes import shown, whole_numbers

__all__ = ["Spectrum", "Triplets", "singular_values", "singular_vectors"]

CERTIFICATE = 3
"""Steps that bound ||D||: two leave the bound 25 % above it on softmax heads, three 8 %, four 3 %."""

GUESS = 1.2
"""Factor on the norm of the newest block, below which ||D|| is expected before anything is spent on bounding it."""


@final
@dataclass(frozen=True, eq=False)
class Triplets:
    """P v_i ~ sigma_i u_i: orthonormal columns `left` (*batch, m, r) and `right` (*batch, n, r) with their spectrum."""

    left: Tensor
    spectrum: Spectrum
    right: Tensor
    known: Tensor | None = None  # U^T P [V, V'], float64; None if P was decomposed in full
    block: int = 0  # columns of the start block
    remainder: Tensor | None = None  # (*batch,), above ||D|| as `errors` are above the errors; None if there is no D


def singular_values(
    apply: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    r: int,
    *,
    like: Tensor,
    generator: torch.Generator | None = None,
    block: int = 64,
    steps: int | None = None,
    accuracy: float = 0.0,
    certificate: int = CERTIFICATE,
) -> Spectrum:
    """sigma_1 >= ... >= sigma_r of P (*batch, m, n), with a bound of the error of each (see the module docstring).

    `apply` maps (*batch, n, c) to (*batch, m, c) and `adjoint` back, in the dtype of `like`; a half-precision operator
    is called in half precision, the bases are float32 and the small matrices float64.  Up to min(m, n) = 2 block steps,
    where P is no larger than the bases, the result is exact; beyond that, memory is O((m + n) block steps).  The
    default of `steps` is max(6, 3 r / block).  Without a generator the start is fixed, so that the same P gives the
    same spectrum every time.

    accuracy     stop before `steps` once every error is at most accuracy sigma_1
    certificate  steps spent on the error bounds; with 0 there are none, and `errors` is infinite

    >>> p = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> singular_values(lambda v: p @ v, lambda u: p.mT @ u, p.shape, 2, like=p).values
    tensor([3., 2.], dtype=torch.float64)
    """
    shape = checked_shape("singular_values", shape)
    if shape[-1] > shape[-2]:
        # the transpose is tall, so that neither basis has more columns than rows
        apply, adjoint, shape = adjoint, apply, (*shape[:-2], shape[-1], shape[-2])
    limits = _limits(shape, r, block, steps, accuracy, certificate)
    if shape[-1] <= 2 * block * limits.steps:
        return exact_spectrum(torch.linalg.svdvals(_whole(apply, shape, like)), like.dtype, shape, r)
    return _run(apply, adjoint, shape, r, like, gaussian_blocks(block, like, generator), limits)[2]


def singular_vectors(
    apply: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    r: int,
    *,
    like: Tensor,
    generator: torch.Generator | None = None,
    block: int = 64,
    steps: int | None = None,
    accuracy: float = 0.0,
    certificate: int = CERTIFICATE,
) -> Triplets:
    """`singular_values` with their vectors: left diag(values) right^T is close to the best rank-r approximation of P.

    >>> p = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> t = singular_vectors(lambda v: p @ v, lambda u: p.mT @ u, p.shape, 1, like=p)
    >>> (t.left * t.spectrum.values @ t.right.mT).round().abs()[0, 0].item()
    3.0
    """
    shape = checked_shape("singular_vectors", shape)
    flipped = shape[-1] > shape[-2]
    if flipped:
        apply, adjoint, shape = adjoint, apply, (*shape[:-2], shape[-1], shape[-2])
    limits = _limits(shape, r, block, steps, accuracy, certificate)
    if shape[-1] <= 2 * block * limits.steps:
        x, values, yt = torch.linalg.svd(_whole(apply, shape, like), full_matrices=False)
        spectrum, known, block, delta = exact_spectrum(values, like.dtype, shape, r), None, 0, None
        left, right = x[..., :r], yt.mT[..., :r]
    else:
        fresh = gaussian_blocks(block, like, generator)
        explored, (x, _, yt), spectrum, delta = _run(apply, adjoint, shape, r, like, fresh, limits)
        left, right = (
            (basis @ y[..., :r].to(basis.dtype)).double() for basis, y in ((explored.left, x), (explored.right, yt.mT))
        )
        known = explored.known
    left, right = (right, left) if flipped else (left, right)
    return Triplets(left, spectrum, right, known, block, delta)


@final
@dataclass(frozen=True)
class _Limits:
    steps: int  # at most
    accuracy: float
    certificate: int


def _limits(shape: Sequence[int], r: int, block: int, steps: int | None, accuracy: float, certificate: int) -> _Limits:
    """When the iteration ends, after checking all numbers."""
    whole_numbers(
        "singular_values", least=0, r=r, block=block, steps=1 if steps is None else steps, certificate=certificate
    )
    m, n = shape[-2], shape[-1]
    if min(m, n) < 1:
        raise ShapeError(f"singular_values: P is {m} x {n}: an empty axis has no spectrum")
    if not 1 <= r <= min(m, n):
        raise ShapeError(f"singular_values: r must lie in 1..{min(m, n)} for P of {m} x {n}, but r is {r}")
    if block < 1 or (steps is not None and steps < 1):
        raise ShapeError(f"singular_values: block and steps must be positive, but block is {block} and steps {steps}")
    if isinstance(accuracy, bool) or not isinstance(accuracy, (int, float)) or not 0 <= accuracy < 1:
        raise InputError(
            f"singular_values: accuracy is relative to sigma_1 and must lie in [0, 1), but is {shown(accuracy)}"
        )
    if accuracy and not certificate:
        raise InputError(
            f"singular_values: an accuracy of {accuracy} needs error bounds, but certificate is 0; leave it at its "
            f"default of {CERTIFICATE}"
        )
    if steps is None:
        steps = max(6, math.ceil(3 * r / block))
    elif block * steps < min(r, n):
        raise ShapeError(
            f"singular_values: {steps} steps of block {block} span {block * steps} directions, fewer than r = {r}; "
            f"take at least {math.ceil(r / block)} steps"
        )
    return _Limits(steps, accuracy, certificate)


@torch.no_grad()
def _whole(apply: Callable[[Tensor], Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
    """P itself, in float64."""
    *batch, m, n = shape
    forward = checked_map("singular_values", apply, like, (*batch, m))
    return forward(torch.eye(n, dtype=work_dtype(like.dtype), device=like.device).expand(*batch, n, n)).double()


@torch.no_grad()
def _run(
    apply: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    r: int,
    like: Tensor,
    fresh: Callable[[int], Tensor],
    limits: _Limits,
) -> tuple[Explored, tuple[Tensor, Tensor, Tensor], Spectrum, Tensor]:
    """The explored part of P, its singular value decomposition, the first r values with their bounds, and delta."""
    *batch, m, n = shape
    forward = checked_map("singular_values", apply, like, (*batch, m))
    backward = checked_map("singular_values", adjoint, like, (*batch, n))
    start = torch.linalg.qr(fresh(n)).Q
    run = Bidiagonalisation(forward, backward, m, start.expand(*batch, *start.shape), fresh, limits.steps)
    delta = torch.full(batch, torch.inf, dtype=torch.float64, device=like.device)  # above ||D||
    factor = torch.full_like(delta, GUESS)

    def spectrum(delta: Tensor, gram: Tensor | None = None) -> Spectrum:
        return _bounded(explored, svd, r, shape, like.dtype, delta, gram)

    def accurate(spectrum: Spectrum) -> bool:
        return bool((spectrum.errors <= limits.accuracy * spectrum.values[..., :1]).all())

    for count in range(1, limits.steps + 1):
        run.step()
        last = count == limits.steps
        if not last and (not limits.accuracy or run.block * count < r):
            continue
        explored = run.explored()
        svd = torch.linalg.svd(explored.known, full_matrices=False)
        newest = torch.linalg.matrix_norm(explored.known[..., -run.block :, :], 2)
        if not last and not accurate(spectrum(torch.minimum(delta, factor * newest))):
            continue  # a bound of ||D|| would not be enough
        gram = None
        if limits.certificate and (last or not accurate(spectrum(delta))):
            gram = newest_gram(explored, forward)
            delta = torch.minimum(delta, remainder_norm(explored, forward, backward, fresh, limits.certificate))
            factor = torch.maximum(factor, delta / newest.clamp_min(TINY))
        found = spectrum(delta, gram)
        if last or accurate(found):
            return explored, svd, found, delta
    raise AssertionError("the last step returns")


def _bounded(
    explored: Explored,
    svd: tuple[Tensor, Tensor, Tensor],
    r: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    delta: Tensor,
    gram: Tensor | None,
) -> Spectrum:
    """The first r values with their bounds, where ||D|| <= delta; `gram` is that of D on the newest block, if known.

    Rounding is taken for a perturbation of P of at most `floor`: all of the above holds for the perturbed P, whose
    singular values are within `floor` of those of P (Weyl).
    """
    x, values, yt = svd
    s = explored.s
    b, f = explored.known[..., :s], x.mT @ explored.known[..., s:]
    floor = rounding(dtype, shape, values[..., :1])
    if bool(delta.isfinite().all()):
        if gram is None:
            gram = delta.square()[..., None, None] * torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        ceiling = ceilings(values, f, delta, gram)[..., :r]
        excess = (ceiling - values[..., :r].square()).clamp_min(0)
        errors = excess / (ceiling.sqrt() + values[..., :r]).clamp_min(TINY) + floor
    else:
        errors = torch.full_like(values[..., :r], torch.inf)

    # the triplet (x, s, y) with y restricted to V, on which P is known
    x, values, yt = x[..., :r], values[..., :r], yt[..., :r, :]
    inside = torch.linalg.vector_norm(yt[..., :s], dim=-1).clamp_min(TINY)
    leak = torch.linalg.vector_norm(yt[..., s:], dim=-1)
    gap = b @ (yt[..., :s] / inside.unsqueeze(-1)).mT - x * values.unsqueeze(-2)
    backward = values.square() * 2 * leak.square() / (1 + inside)
    residuals = ((gap.square().sum(-2) + backward) / 2).sqrt() + floor
    return Spectrum(values, errors, residuals, exact=False, count=min(shape[-2:]))
