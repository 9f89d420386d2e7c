"""[Q, Q'] with Q'^T Q' = I and Q^T Q' = 0: orthonormal bases that grow by a block at a time, batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.errors import DtypeError, InputError, NonFiniteError, ShapeError
from headwise.shapes import are_tensors, is_generator, shown, whole_tuple


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the bases of an operator in `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def checked_map(
    owner: str, call: Callable[[Tensor], Tensor], like: Tensor, rows: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """`call` with inputs and outputs in working precision, and its output checked: shape (*rows, c), finite."""
    if not callable(call):
        raise InputError(f"{owner}: P is given by callables that map tensors to tensors, but one is {shown(call)}")
    are_tensors(owner, like=like)
    if not like.dtype.is_floating_point:
        raise DtypeError(f"{owner}: like must be floating point, but is {like.dtype}; convert it with .float()")
    if like.is_meta:
        raise InputError(f"{owner}: like is on the meta device, which holds no values to decompose; use another device")
    work = work_dtype(like.dtype)

    def run(x: Tensor) -> Tensor:
        y = call(x.to(like.dtype))
        are_tensors(owner, **{"the result of the operator": y})
        if y.shape != (*rows, x.shape[-1]):
            raise ShapeError(
                f"{owner}: {tuple(x.shape)} was mapped to {tuple(y.shape)}, but {(*rows, x.shape[-1])} was expected"
            )
        y = y.to(work)
        if not y.isfinite().all():
            bad = int((~y.isfinite()).sum())
            raise NonFiniteError(f"{owner}: the operator returned {bad} non-finite of {y.numel()} entries")
        return y

    return run


def checked_shape(owner: str, shape: object) -> tuple[int, ...]:
    """(*batch, m, n)"""
    sizes = whole_tuple(owner, "shape", shape, least=0)
    if len(sizes) < 2:
        raise ShapeError(f"{owner}: shape must be (*batch, m, n), but is {sizes}")
    return sizes


def gaussian_blocks(block: int, like: Tensor, generator: torch.Generator | None) -> Callable[[int], Tensor]:
    """rows -> a new Gaussian block, the same for the whole batch: a head's result does not depend on the other heads.

    Without a generator the blocks are the same in every call, and the global random state does not change.
    """
    is_generator("gaussian_blocks", generator)
    source = torch.Generator().manual_seed(0) if generator is None else generator
    work = work_dtype(like.dtype)
    return lambda rows: torch.randn(rows, block, generator=source, device=source.device, dtype=work).to(like.device)


def size(y: Tensor) -> Tensor:
    """||y||_F in float64: squares of float32 numbers above 1e19 overflow."""
    return torch.linalg.vector_norm(y, dim=(-2, -1), dtype=torch.float64)


def outside(y: Tensor, basis: Tensor) -> Tensor:
    """(I - Q Q^T) y."""
    return y - basis @ (basis.mT @ y)


def extend(basis: Tensor, y: Tensor, scale: Tensor, fresh: Callable[[int], Tensor]) -> Tensor:
    """Orthonormal columns (*batch, m, b) that span what y (*batch, m, b) adds to the basis (*batch, m, s).

    Where y adds nothing (P is rank deficient, or the basis spans an invariant subspace) random columns replace it, so
    that the iteration continues and a singular value of high multiplicity is found as often as it occurs.  A column
    adds nothing if it is below rounding relative to `scale` (*batch,), the size of P.
    """
    q, t = torch.linalg.qr(outside(y, basis))
    spent = t.diagonal(dim1=-2, dim2=-1).abs() <= 16 * torch.finfo(y.dtype).eps * scale.unsqueeze(-1)
    if spent.any():
        q = outside(torch.where(spent.unsqueeze(-2), fresh(y.shape[-2]), q), basis)
        q = torch.linalg.qr(q).Q
    return torch.linalg.qr(outside(q, basis)).Q  # twice is enough (Kahan and Parlett)
