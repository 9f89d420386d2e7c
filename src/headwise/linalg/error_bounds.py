"""How far above its Ritz value a singular value can lie: docs/explanation/spectrum-bounds.md derives all steps.

With P = [[B, C], [0, D]] in the bases of `bidiagonal`, E the newest block of V', and s = sigma([B C]) <= sigma(P),

    sigma_i(P)^2 <= t   if t > delta^2 and lambda_i(B B^T + C C^T + C E^T D^T D E C^T / (t - delta^2)) <= t

whenever ||D|| <= delta: the Schur complement of t - P P^T has (t - D^T D)^-1, and 1 / (t - a) lies below its chord over
[0, delta^2].  No smaller bound holds for every such D with the same E^T D^T D E, one product with D (`newest_gram`).
`remainder_norm` finds delta with a stated probability: for y the leading right singular vector of D, Omega a Gaussian
block of c columns that is drawn after U and V are fixed, and q steps from Q_1 R = (I - V V^T) Omega on D, which give
D^T D Q = Q T + Q' K,

    ||Omega^T y|| / ||R||  <=  ||y^T Q_1||  =  ||y^T Q' K (lambda - T)^-1 E_1||  <=  ||K (lambda - T)^-1 E_1||

at lambda = ||D||^2.  The left side is at least `_least_overlap` but for a probability of FAILURE; the right side falls
fast beyond the largest eigenvalue of T, which excludes every larger lambda.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.linalg.basis import outside
from headwise.linalg.bidiagonal import Bidiagonalisation, Explored, Map

FAILURE = 1e-9
"""Probability, over the random block, that a bound is too small."""

# t / delta^2 - 1 at which the bound is evaluated: near 0 for values close to ||D||, larger for the leading ones
LEVELS = (1e-6, 0.003, 0.01, 0.03, 0.06, 0.1, 0.17, 0.3, 0.5, 0.9, 1.7, 3.2, 6.0, 12.0, 24.0)

TINY = torch.finfo(torch.float64).tiny

FINER = 1.25
"""Ratio of successive distances from the largest Ritz value at which the norm of D is excluded."""


def remainder_norm(
    explored: Explored, forward: Map, backward: Map, fresh: Callable[[int], Tensor], steps: int
) -> Tensor:
    """(*batch,) delta >= ||D|| but for a probability of FAILURE each, by `steps` further products with P and P^T."""
    u, v = explored.left, explored.right[..., : explored.s]
    omega = fresh(v.shape[-2])
    start, r = torch.linalg.qr(outside(outside(omega.expand(*v.shape[:-1], omega.shape[-1]), v), v))
    run = Bidiagonalisation(
        lambda x: outside(forward(outside(x, v)), u),
        lambda x: outside(backward(outside(x, u)), v),
        u.shape[-2],
        start,
        fresh,
        steps,
    )
    for _ in range(steps):
        run.step()
    known = run.explored().known
    b, c = known[..., : known.shape[-2]], known[..., known.shape[-2] :]
    ritz, x = torch.linalg.eigh(b.mT @ b)
    k, first = c.mT @ b @ x, x.mT[..., : run.block]
    least = _least_overlap(run.block) / torch.linalg.matrix_norm(r.double(), 2)
    top = ritz[..., -1].clamp_min(TINY)
    # beyond this distance ||K (lambda - T)^-1 E_1|| is too small whatever T is
    distance = (torch.linalg.matrix_norm(k, 2) / least / top).clamp_min(1.0)
    excluded = torch.ones_like(top, dtype=torch.bool)
    while bool((excluded & (distance > 1e-4)).any()):
        nearer = distance / FINER
        value = top * (1 + nearer)
        overlap = torch.linalg.matrix_norm((k / (value.unsqueeze(-1) - ritz).unsqueeze(-2)) @ first, 2)
        excluded = excluded & (overlap < least)
        distance = torch.where(excluded, nearer, distance)
    return (top * (1 + distance)).sqrt()


def _least_overlap(c: int) -> float:
    """x with P(||g|| <= x) <= FAILURE for g Gaussian in c dimensions: P(||g||^2 <= c z) <= (z e^(1 - z))^(c / 2)."""
    low, high = 0.0, 1.0
    for _ in range(200):
        z = (low + high) / 2
        low, high = (z, high) if math.log(z) + 1 - z <= 2 * math.log(FAILURE) / c else (low, z)
    return math.sqrt(c * low)


def newest_gram(explored: Explored, forward: Map) -> Tensor:
    """E^T D^T D E for the newest block E of V', (*batch, block, block), by a product with P."""
    u, e = explored.left, explored.right[..., explored.s :]
    y = outside(outside(forward(e), u), u).double()
    return y.mT @ y


def ceilings(values: Tensor, c: Tensor, delta: Tensor, gram: Tensor) -> Tensor:
    """(*batch, s) the least t found with sigma_i(P)^2 <= t whenever ||D|| <= delta.

    values  (*batch, s) of [B C] = X diag(values) Y^T
    c       X^T C (*batch, s, block)
    gram    E^T D^T D E, or anything above it, such as delta^2
    """
    square = torch.maximum(delta.square(), torch.linalg.matrix_norm(gram, 2)).clamp_min(TINY)
    diagonal, coupling = torch.diag_embed(values.square()), c @ (gram / square[..., None, None]) @ c.mT
    least, square = torch.full_like(values, torch.inf), square.unsqueeze(-1)
    for level in LEVELS:
        stretched = torch.linalg.eigvalsh(diagonal + coupling / level).flip(-1)
        least = torch.minimum(least, torch.maximum(stretched, (1 + level) * square))
    return least + 16 * torch.finfo(torch.float64).eps * values[..., :1].square()  # rounding of eigvalsh
