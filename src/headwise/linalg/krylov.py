"""P ~ U diag(sigma) V^T from apply and adjoint alone: block Krylov, batched, P is never formed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.linalg.spectrum import Spectrum

__all__ = ["Spectrum", "singular_values"]


@torch.no_grad()
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
    """sigma_1 >= ... >= sigma_r of P (*batch, m, n)."""
    *batch, m, n = shape
    count = min(m, n)
    if not 1 <= r <= count:
        raise ShapeError(f"singular_values: r must lie in 1..min(m, n) = {count}, but r is {r}, m {m} and n {n}")
    if n > m:
        apply, adjoint, m, n = adjoint, apply, n, m
    steps = max(6, math.ceil(3 * r / block)) if steps is None else steps
    work = torch.float64 if like.dtype == torch.float64 else torch.float32
    eps = torch.finfo(like.dtype).eps

    def run(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return f(x.to(like.dtype)).to(work)

    if n <= block * steps:
        eye = torch.eye(n, dtype=work, device=like.device).expand(*batch, n, n)
        values = torch.linalg.svdvals(run(apply, eye).double())
        total = values.square().sum(-1).sqrt()
        errors = (4 * eps * total).unsqueeze(-1).expand(*batch, r)
        return Spectrum(values[..., :r], errors, True, count, total)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, block, generator=generator, device=generator.device).to(like.device, work)
    v = torch.linalg.qr(start).Q.expand(*batch, n, block)
    right, left = [v], []
    for step in range(steps):
        u = run(apply, right[-1])
        for _ in range(2):
            for basis in left:
                u = u - basis @ (basis.mT @ u)
            u = torch.linalg.qr(u).Q
        left.append(u)
        z = run(adjoint, u)
        if step + 1 < steps:
            for _ in range(2):
                for basis in right:
                    z = z - basis @ (basis.mT @ z)
                z = torch.linalg.qr(z).Q
            right.append(z)
    u = torch.cat(left, -1)
    back = run(adjoint, u)
    x, values, yt = torch.linalg.svd((u.mT @ run(apply, torch.cat(right, -1))).double(), full_matrices=False)
    residual = back.double() @ x[..., :r] - torch.cat(right, -1).double() @ yt.mT[..., :r] * values[..., None, :r]
    errors = residual.norm(dim=-2) + 8 * eps * values[..., :1]
    return Spectrum(values[..., :r], errors, False, count)
