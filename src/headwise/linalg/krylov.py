"""P ~ U diag(sigma) V^T from apply and adjoint alone: batched block Golub-Kahan, P is never formed.

From a Gaussian block V_1 the two bases grow alternately, U_j from P V_j and V_(j+1) from P^T U_j, each new block
orthogonal to all previous ones.  In the bases [U, U'] and [V, V'], primes for the unexplored complement,

    P = [ B  C ]      B, C known, C = U^T P V' of `block` columns;      D = U'^T P V' unknown.
        [ 0  D ]

    values_i = sigma_i([B C]) <= sigma_i(P)                                  always (interlacing), up to rounding
    sigma_i(P)^2 <= t   if t > delta^2 and sigma_i([B, C sqrt(t / (t - delta^2))])^2 <= t     whenever ||D|| <= delta

The second line (Schur complement of t - P P^T) is the quadratic residual bound ||r||^2 / gap for all values at once,
with their indices: `errors` is its distance from `values`.  Only delta is estimated, by ||P^T U_k|| on the newest block
times a margin; a start orthogonal to a leading direction (probability zero) would make it too small.
`residuals` needs no such assumption and is weaker: for unit u, v some singular value of P lies within
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

from headwise.errors import ShapeError
from headwise.linalg.basis import checked_map, checked_shape, extend, gaussian_blocks, outside, size, work_dtype
from headwise.linalg.spectrum import Spectrum, exact_spectrum, rounding
from headwise.shapes import whole_numbers

__all__ = ["Spectrum", "Triplets", "singular_values", "singular_vectors"]

MARGIN = 1.5
"""Factor on the estimate of ||D|| from the newest block; with 1 it is too small for a few random heads."""

# t / delta^2 at which the bound is evaluated: near 1 for values close to ||D||, larger for the leading ones
LEVELS = (1 + 1e-6, 1.03, 1.1, 1.2, 1.35, 1.6, 2.2, 6.0)
TINY = torch.finfo(torch.float64).tiny


@final
@dataclass(frozen=True, eq=False)
class Triplets:
    """P v_i ~ sigma_i u_i: orthonormal columns `left` (*batch, m, r) and `right` (*batch, n, r) with their spectrum."""

    left: Tensor
    spectrum: Spectrum
    right: Tensor
    known: Tensor | None = None  # U^T P [V, V'], float64; None if P was decomposed in full
    block: int = 0  # columns of the start block


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
) -> Spectrum:
    """sigma_1 >= ... >= sigma_r of P (*batch, m, n), with an error estimate for each (see the module docstring).

    `apply` maps (*batch, n, c) to (*batch, m, c) and `adjoint` back, in the dtype of `like`; a half-precision operator
    is called in half precision, the bases are float32 and the small matrices float64.  Up to min(m, n) = 2 block steps,
    where P is no larger than the bases, the result is exact; beyond that, memory is O((m + n) block steps).  The
    default of `steps` is max(6, 3 r / block).  Without a generator the start is fixed, so that the same P gives the
    same spectrum every time.

    >>> p = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> singular_values(lambda v: p @ v, lambda u: p.mT @ u, p.shape, 2, like=p).values
    tensor([3., 2.], dtype=torch.float64)
    """
    shape = checked_shape("singular_values", shape)
    if shape[-1] > shape[-2]:
        # the transpose is tall, so that neither basis has more columns than rows
        apply, adjoint, shape = adjoint, apply, (*shape[:-2], shape[-1], shape[-2])
    steps = _steps(shape, r, block, steps)
    if shape[-1] <= 2 * block * steps:
        return exact_spectrum(torch.linalg.svdvals(_whole(apply, shape, like)), like.dtype, shape, r)
    parts = _bidiagonalise(apply, adjoint, shape, like, gaussian_blocks(block, like, generator), steps)
    return _bounded(parts, torch.linalg.svd(parts.known, full_matrices=False), r, shape, like)


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
) -> Triplets:
    """`singular_values` with their vectors: left diag(values) right^T is close to the best rank-r approximation of P.

    >>> p = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> t = singular_vectors(lambda v: p @ v, lambda u: p.mT @ u, p.shape, 1, like=p)
    >>> (t.left * t.spectrum.values @ t.right.mT).round().abs()[0, 0].item()
    3.0
    """
    shape = checked_shape("singular_vectors", shape)
    if shape[-1] > shape[-2]:
        flipped = (*shape[:-2], shape[-1], shape[-2])
        t = singular_vectors(adjoint, apply, flipped, r, like=like, generator=generator, block=block, steps=steps)
        return Triplets(t.right, t.spectrum, t.left, t.known, t.block)
    steps = _steps(shape, r, block, steps)
    if shape[-1] <= 2 * block * steps:
        x, s, yt = torch.linalg.svd(_whole(apply, shape, like), full_matrices=False)
        return Triplets(x[..., :r], exact_spectrum(s, like.dtype, shape, r), yt.mT[..., :r])
    parts = _bidiagonalise(apply, adjoint, shape, like, gaussian_blocks(block, like, generator), steps)
    x, s, yt = torch.linalg.svd(parts.known, full_matrices=False)
    left, right = (
        (basis @ y[..., :r].to(basis.dtype)).double() for basis, y in ((parts.left, x), (parts.right, yt.mT))
    )
    spectrum = _bounded(parts, (x, s, yt), r, shape, like)
    return Triplets(left, spectrum, right, parts.known, parts.known.shape[-1] - parts.known.shape[-2])


def _steps(shape: Sequence[int], r: int, block: int, steps: int | None) -> int:
    """The number of block steps, after checking r, block and steps."""
    whole_numbers("singular_values", least=0, r=r, block=block, steps=1 if steps is None else steps)
    m, n = shape[-2], shape[-1]
    if min(m, n) < 1:
        raise ShapeError(f"singular_values: P is {m} x {n}: an empty axis has no spectrum")
    if not 1 <= r <= min(m, n):
        raise ShapeError(f"singular_values: r must lie in 1..{min(m, n)} for P of {m} x {n}, but r is {r}")
    if block < 1 or (steps is not None and steps < 1):
        raise ShapeError(f"singular_values: block and steps must be positive, but block is {block} and steps {steps}")
    if steps is None:
        return max(6, math.ceil(3 * r / block))
    if block * steps < min(r, n):
        raise ShapeError(
            f"singular_values: {steps} steps of block {block} span {block * steps} directions, fewer than r = {r}; "
            f"take at least {math.ceil(r / block)} steps"
        )
    return steps


@torch.no_grad()
def _whole(apply: Callable[[Tensor], Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
    """P itself, in float64."""
    *batch, m, n = shape
    forward = checked_map("singular_values", apply, like, (*batch, m))
    return forward(torch.eye(n, dtype=work_dtype(like.dtype), device=like.device).expand(*batch, n, n)).double()


@final
@dataclass(frozen=True, eq=False)
class _Parts:
    """P = left known right^T + D on the rest, known = [B C]."""

    left: Tensor  # U (*batch, m, s)
    known: Tensor  # (*batch, s, s + block), float64
    right: Tensor  # [V, newest block of V'] (*batch, n, s + block)
    unseen: Tensor  # (*batch,) estimate of ||D||


@torch.no_grad()
def _bidiagonalise(
    apply: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    like: Tensor,
    fresh: Callable[[int], Tensor],
    steps: int,
) -> _Parts:
    *batch, m, n = shape
    forward = checked_map("singular_values", apply, like, (*batch, m))
    backward = checked_map("singular_values", adjoint, like, (*batch, n))
    v = torch.linalg.qr(fresh(n)).Q
    b, s = v.shape[-1], v.shape[-1] * steps
    left, right = v.new_zeros(*batch, m, s), v.new_zeros(*batch, n, s + b)
    known = torch.zeros(*batch, s, s + b, dtype=torch.float64, device=like.device)
    z = right[..., :b] = v
    scale = torch.zeros(batch, dtype=torch.float64, device=like.device)
    for start in range(0, s, b):
        stop = start + b
        y = forward(right[..., start:stop])
        scale = torch.maximum(scale, size(y))
        left[..., start:stop] = extend(left[..., :start], y, scale, fresh)
        # all of U^T P V, not only its two nonzero blocks, so that `known` includes the rounding
        known[..., :stop, start:stop] = (left[..., :stop].mT @ y).double()
        z = backward(left[..., start:stop])
        if stop < s:
            right[..., stop : stop + b] = extend(right[..., :stop], z, scale, fresh)
    z = outside(outside(z, right[..., :s]), right[..., :s])
    right[..., s:], t = torch.linalg.qr(z)
    known[..., s - b :, s:] = t.mT.double()
    unseen = torch.linalg.matrix_norm(known[..., s - b :, :], 2)
    return _Parts(left, known, right, unseen)


def _bounded(parts: _Parts, svd: tuple[Tensor, Tensor, Tensor], r: int, shape: Sequence[int], like: Tensor) -> Spectrum:
    """Values with the two bounds of the module docstring."""
    x, values, yt = svd
    s = parts.known.shape[-2]
    b, c = parts.known[..., :s], parts.known[..., s:]
    # [B, C w] has the left vectors of [B C] to start from: its Gram matrix is diag(values^2) + (w^2 - 1) F F^T
    f = x.mT @ c
    diagonal, coupling = torch.diag_embed(values.square()), f @ f.mT
    delta = (MARGIN * parts.unseen).square().unsqueeze(-1)
    ceiling = torch.full_like(values, torch.inf)
    for level in LEVELS:
        stretched = torch.linalg.eigvalsh(diagonal + coupling / (level - 1)).flip(-1)
        ceiling = torch.minimum(ceiling, torch.maximum(stretched, level * delta))
    x, values, yt, ceiling = x[..., :r], values[..., :r], yt[..., :r, :], ceiling[..., :r]
    ceiling = ceiling + 16 * torch.finfo(torch.float64).eps * values[..., :1].square()  # rounding of eigvalsh
    excess = (ceiling - values.square()).clamp_min(0)
    floor = rounding(like.dtype, shape, values[..., :1])
    errors = excess / (ceiling.sqrt() + values).clamp_min(TINY) + floor

    # the triplet (x, s, y) with y restricted to V, on which P is known
    inside = torch.linalg.vector_norm(yt[..., :s], dim=-1).clamp_min(TINY)
    leak = torch.linalg.vector_norm(yt[..., s:], dim=-1)
    forward = b @ (yt[..., :s] / inside.unsqueeze(-1)).mT - x * values.unsqueeze(-2)
    backward = values.square() * 2 * leak.square() / (1 + inside)
    residuals = ((forward.square().sum(-2) + backward) / 2).sqrt() + floor
    return Spectrum(values, errors, residuals, exact=False, count=min(shape[-2:]))
