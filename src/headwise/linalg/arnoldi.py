"""P y ~ lambda y from apply alone: batched block Arnoldi for the complex eigenvalues of largest modulus.

With orthonormal blocks V = [V_1 ... V_k], each new one from P times the last,

    P V = V H + V_(k+1) R E_k^T,      eigenvalues theta, z of H,      ||P V z - theta V z|| = ||R z_k||

Saad, Numerical Methods for Large Eigenvalue Problems, ch. 6.
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
from headwise.linalg.spectrum import rounding
from headwise.shapes import whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """The r eigenvalues of largest modulus, and ||P y - values_i y|| for their unit vectors y.

    A residual is a backward error: values_i is an eigenvalue of some P + E with ||E|| <= residuals_i.  P is not normal,
    so the distance to an eigenvalue of P may be larger, by the eigenvalue's condition number.
    """

    values: Tensor  # (*batch, r) complex128, descending in modulus
    residuals: Tensor  # (*batch, r) float64
    exact: bool  # True: from a dense decomposition, residuals are rounding only


@torch.no_grad()
def eigenvalues(
    apply: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    r: int,
    *,
    like: Tensor,
    generator: torch.Generator | None = None,
    block: int = 16,
    steps: int | None = None,
) -> Eigenvalues:
    """lambda_1, ..., lambda_r of a square P (*batch, n, n), |lambda_1| >= ... >= |lambda_r|, from `apply` alone.

    Row-stochastic P has lambda_1 = 1; the next modulus is the rate at which repeated attention forgets.  Eigenvalues
    that fill a disc, as those of a softmax of random scores do, converge slowly: check `residuals`.  A complex pair may
    be split at r.  Exact up to n = 2 block steps; the default of `steps` is max(16, 4 r / block).

    >>> p = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    >>> eigenvalues(lambda v: p @ v, p.shape, 2, like=p).values.imag.abs().tolist()
    [1.0, 1.0]
    """
    *batch, m, n = shape = checked_shape("eigenvalues", shape)
    whole_numbers("eigenvalues", least=0, r=r, block=block, steps=1 if steps is None else steps)
    if m != n:
        raise ShapeError(f"eigenvalues: P must be square, but is {m} x {n}; use singular_values")
    if not 1 <= r <= n:
        raise ShapeError(f"eigenvalues: r must lie in 1..{n} for P of {m} x {n}, but r is {r}")
    if block < 1 or (steps is not None and steps * block < min(r, n)):
        raise ShapeError(f"eigenvalues: {steps} steps of block {block} span fewer directions than r = {r}")
    steps = max(16, math.ceil(4 * r / block)) if steps is None else steps
    forward = checked_map("eigenvalues", apply, like, (*batch, n))
    if n <= 2 * block * steps:
        p = forward(torch.eye(n, dtype=work_dtype(like.dtype), device=like.device).expand(*batch, n, n)).double()
        values = _leading(torch.linalg.eigvals(p), r)[0]
        floor = rounding(like.dtype, shape, size(p))
        return Eigenvalues(values, floor.unsqueeze(-1).expand(*batch, r), exact=True)

    fresh = gaussian_blocks(block, like, generator)
    s = block * steps
    basis = torch.zeros(*batch, n, s, dtype=work_dtype(like.dtype), device=like.device)
    y = basis[..., :block] = torch.linalg.qr(fresh(n)).Q
    h = torch.zeros(*batch, s, s, dtype=torch.float64, device=like.device)
    scale = torch.zeros(batch, dtype=torch.float64, device=like.device)
    for start in range(0, s, block):
        stop = start + block
        y = forward(basis[..., start:stop])
        scale = torch.maximum(scale, size(y))
        if stop < s:
            basis[..., stop : stop + block] = extend(basis[..., :stop], y, scale, fresh)
        # rows one block further than the span of y before it was extended: the subdiagonal of H
        known = basis[..., : stop + block] if stop < s else basis
        h[..., : known.shape[-1], start:stop] = (known.mT @ y).double()
    left_over = torch.linalg.qr(outside(outside(y, basis), basis)).R.double()
    ritz, vectors = torch.linalg.eig(h)
    values, order = _leading(ritz, r)
    z = torch.take_along_dim(vectors, order.unsqueeze(-2), dim=-1)
    residuals = torch.linalg.vector_norm(left_over.to(z.dtype) @ z[..., s - block :, :], dim=-2)
    floor = rounding(like.dtype, shape, torch.linalg.matrix_norm(h, 2))
    return Eigenvalues(values, residuals + floor.unsqueeze(-1), exact=False)


def _leading(values: Tensor, r: int) -> tuple[Tensor, Tensor]:
    order = values.abs().argsort(dim=-1, descending=True, stable=True)[..., :r]
    return torch.take_along_dim(values, order, dim=-1), order
