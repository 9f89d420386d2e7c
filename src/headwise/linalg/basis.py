"""[Q, Q'] with Q'^T Q' = I and Q^T Q' = 0: orthonormal bases that grow by a block at a time, batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.errors import DtypeError, NonFiniteError, ShapeError


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What bases of an operator in `dtype` are kept in: float64 for itself, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def checked_map(
    owner: str, call: Callable[[Tensor], Tensor], like: Tensor, rows: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """`call` made to take and give working precision, with its answer's shape (*rows, c) and finiteness checked."""
    if not like.dtype.is_floating_point:
        raise DtypeError(f"{owner}: like must be floating point, but is {like.dtype}; convert it with .float()")
    work = work_dtype(like.dtype)

    def run(x: Tensor) -> Tensor:
        y = call(x.to(like.dtype))
        if y.shape != (*rows, x.shape[-1]):
            raise ShapeError(
                f"{owner}: {tuple(x.shape)} was mapped to {tuple(y.shape)}, but {(*rows, x.shape[-1])} was promised"
            )
        y = y.to(work)
        if not y.isfinite().all():
            bad = int((~y.isfinite()).sum())
            raise NonFiniteError(f"{owner}: the operator gave {bad} non-finite of {y.numel()} entries")
        return y

    return run


def gaussian_blocks(block: int, like: Tensor, generator: torch.Generator | None) -> Callable[[int], Tensor]:
    """rows -> a new Gaussian block: one for the whole batch, so that a head's answer does not depend on its neighbours.

    Without a generator the blocks are always the same ones, and the global random state is left alone.
    """
    source = torch.Generator().manual_seed(0) if generator is None else generator
    work = work_dtype(like.dtype)
    return lambda rows: torch.randn(rows, block, generator=source, device=source.device, dtype=work).to(like.device)


def size(y: Tensor) -> Tensor:
    """||y||_F in float64: squares of float32 numbers overflow from 1e19 on."""
    return torch.linalg.vector_norm(y, dim=(-2, -1), dtype=torch.float64)


def outside(y: Tensor, basis: Tensor) -> Tensor:
    """(I - Q Q^T) y."""
    return y - basis @ (basis.mT @ y)


def extend(basis: Tensor, y: Tensor, scale: Tensor, fresh: Callable[[int], Tensor]) -> Tensor:
    """Orthonormal columns (*batch, m, b) that span what y (*batch, m, b) adds to the basis (*batch, m, s).

    Where y adds nothing (a rank-deficient P, or an invariant subspace found) fresh columns take its place: the search
    goes on, and a singular value of high multiplicity is found as often as it occurs.  `scale` (*batch,) is the size
    of P, against which nothing is judged.
    """
    q, t = torch.linalg.qr(outside(y, basis))
    spent = t.diagonal(dim1=-2, dim2=-1).abs() <= 16 * torch.finfo(y.dtype).eps * scale.unsqueeze(-1)
    if spent.any():
        q = outside(torch.where(spent.unsqueeze(-2), fresh(y.shape[-2]), q), basis)
        q = torch.linalg.qr(q).Q
    return torch.linalg.qr(outside(q, basis)).Q  # twice is enough (Kahan and Parlett)
