"""Letters for axes, used everywhere and never redefined, and the checks that name them.

    m  queries (rows of P)        d  value width            h  heads
    n  keys (columns of P)        k  query/key width        r  rank
    g  side of a grid             b  batch

A shape reads (*batch, m, n); heads are a batch axis.  Batch axes broadcast as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import DtypeError, NonFiniteError, ShapeError


def same_axis(owner: str, axis: str, **sizes: int) -> int:
    """The common size of `axis`, or a ShapeError that names every size."""
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ShapeError(f"{owner}: axis {axis!r} must agree, but {given}")
    return next(iter(sizes.values()))


def no_empty_axis(owner: str, **tensors: Tensor) -> None:
    """Every tensor is at least 2-D and no axis has size zero."""
    for name, x in tensors.items():
        if x.dim() < 2:
            raise ShapeError(f"{owner}: {name} must be (*batch, rows, width), but has shape {tuple(x.shape)}")
        if 0 in x.shape:
            raise ShapeError(f"{owner}: {name} has shape {tuple(x.shape)}: an empty axis has no attention")


def same_kind(owner: str, **tensors: Tensor) -> None:
    """One floating dtype and one device for all."""
    for name, x in tensors.items():
        if not x.dtype.is_floating_point:
            raise DtypeError(f"{owner}: {name} must be floating point, but is {x.dtype}; convert it with .float()")
    if len({x.dtype for x in tensors.values()}) > 1:
        given = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise DtypeError(f"{owner}: dtypes must agree, but {given}; convert one with .to(dtype)")
    if len({x.device for x in tensors.values()}) > 1:
        given = ", ".join(f"{name} is on {x.device}" for name, x in tensors.items())
        raise DtypeError(f"{owner}: devices must agree, but {given}; move one with .to(device)")


def all_finite(owner: str, **tensors: Tensor) -> None:
    """No NaN or infinity.  Not checked while tracing or under vmap, where values cannot be read."""
    if torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        x = x.detach()
        try:
            # one reduction in the common case; an overflowing sum of finite numbers is checked again
            if math.isfinite(x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).item()):
                continue
            bad = int((~x.isfinite()).sum().item())
        except RuntimeError:  # vmap and functorch wrappers refuse .item()
            return
        if bad:
            raise NonFiniteError(f"{owner}: {name} has {bad} non-finite of {x.numel()} entries; P would be NaN")


def broadcast_batch(owner: str, **batches: Sequence[int]) -> torch.Size:
    """The common batch shape, or a ShapeError that names every shape."""
    try:
        return torch.broadcast_shapes(*(tuple(shape) for shape in batches.values()))
    except RuntimeError as error:
        given = ", ".join(f"{name} has {tuple(shape)}" for name, shape in batches.items())
        raise ShapeError(f"{owner}: batch axes must broadcast, but {given}") from error


def broadcasts_to(owner: str, name: str, x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` unchanged if it broadcasts to `shape`, else a ShapeError with both shapes."""
    try:
        if torch.broadcast_shapes(x.shape, tuple(shape)) == torch.Size(shape):
            return x
    except RuntimeError:
        pass
    raise ShapeError(f"{owner}: {name} has shape {tuple(x.shape)}, which does not broadcast to {tuple(shape)}")


def filled(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """F.pad(x, pads), but x itself if all pads are zero, where F.pad would copy."""
    return torch.nn.functional.pad(x, list(pads), value=value) if any(pads) else x
