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

from headwise.errors import DtypeError, InputError, NonFiniteError, ShapeError

MOST = 2**31 - 1
"""The largest size of anything: products of two of them still fit torch's counters."""


def same_axis(owner: str, axis: str, **sizes: int) -> int:
    """The common size of `axis`, or a ShapeError that names every size."""
    first, *others = sizes.values()
    if any(size != first for size in others):  # sizes may be symbols, which have no hash
        given = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ShapeError(f"{owner}: axis {axis!r} must agree, but {given}")
    return first


def whole_numbers(owner: str, *, least: int = 1, most: int = MOST, **sizes: object) -> None:
    """Every size is a whole number (not a bool) between `least` and `most`."""
    for name, size in sizes.items():
        if isinstance(size, (bool, Tensor)) or not hasattr(type(size), "__index__"):
            raise InputError(f"{owner}: {name} must be a whole number, but is {shown(size)}")
        if size < least:  # type: ignore[operator]
            raise ShapeError(f"{owner}: {name} must be at least {least}, but is {shown(size)}")
        if size > most:  # type: ignore[operator]
            raise ShapeError(f"{owner}: {name} must be at most {most}, but is {shown(size)}")


def whole_tuple(owner: str, name: str, sizes: object, *, least: int = 1) -> tuple[int, ...]:
    """A sequence of whole numbers, one for each axis, as a tuple."""
    if isinstance(sizes, (str, bytes, Tensor)) or not isinstance(sizes, Sequence):
        raise InputError(f"{owner}: {name} must be a sequence of whole numbers, but is {shown(sizes)}")
    whole_numbers(owner, least=least, **{f"{name}[{i}]": size for i, size in enumerate(sizes)})
    return tuple(sizes)


def is_generator(owner: str, generator: object) -> None:
    """A torch.Generator, or None for torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"{owner}: generator must be a torch.Generator, but is {shown(generator)}")


def whole_pairs(owner: str, name: str, pairs: object, *, least: int = 0) -> tuple[tuple[int, int], ...]:
    """A sequence of (before, after), one pair of whole numbers for each axis, as a tuple."""
    if isinstance(pairs, (str, bytes, Tensor)) or not isinstance(pairs, Sequence):
        raise InputError(f"{owner}: {name} must be a sequence of (before, after), but is {shown(pairs)}")
    found = tuple(whole_tuple(owner, f"{name}[{axis}]", pair, least=least) for axis, pair in enumerate(pairs))
    for axis, pair in enumerate(found):
        if len(pair) != 2:
            raise ShapeError(f"{owner}: {name}[{axis}] must be (before, after), but has {len(pair)} entries")
    return found  # type: ignore[return-value]


def truth_values(owner: str, **flags: object) -> None:
    """Every flag is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{owner}: {name} must be True or False, but is {shown(flag)}")


def are_tensors(owner: str, **tensors: object) -> None:
    """Every argument is a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{owner}: {name} must be a tensor, but is {shown(x)}")


def shown(x: object) -> str:
    """A short form of any value, for messages.

    >>> shown("wide"), shown(None), shown([1] * 99)
    ("'wide'", 'None', 'a list')
    """
    if isinstance(x, int) and x.bit_length() > 64:
        return f"an integer of {x.bit_length()} bits"
    text = repr(x) if isinstance(x, (str, int, float, bool, type(None))) else ""
    return text if 0 < len(text) <= 40 else f"a {type(x).__name__}"


def no_empty_axis(owner: str, **tensors: Tensor) -> None:
    """Every argument is a tensor, at least 2-D, and no axis has size zero."""
    are_tensors(owner, **tensors)
    for name, x in tensors.items():
        if x.dim() < 2:
            raise ShapeError(f"{owner}: {name} must be (*batch, rows, width), but has shape {tuple(x.shape)}")
        if 0 in x.shape:
            raise ShapeError(f"{owner}: {name} has shape {tuple(x.shape)}: an empty axis has no attention")


def same_kind(owner: str, **tensors: Tensor) -> None:
    """One floating dtype and one device for all."""
    are_tensors(owner, **tensors)
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
    """No NaN or infinity.  Not checked where values cannot be read."""
    for name, x in tensors.items():
        # one reduction in the common case; an overflowing sum of finite numbers is checked again
        total = _total(x)
        if total is not None and not math.isfinite(total):
            _refuse(owner, name, "non-finite", ~x.isfinite())


def finite_or_minus_infinity(owner: str, **tensors: Tensor) -> None:
    """No NaN or +inf, as in an additive mask.  Not checked where values cannot be read."""
    for name, x in tensors.items():
        total = _total(x)
        if total is not None and not math.isfinite(total) and total != -math.inf:
            _refuse(owner, name, "NaN or +inf", ~x.isfinite() & (x != -math.inf))


def _total(x: Tensor) -> float | None:
    return read(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)))


def _refuse(owner: str, name: str, what: str, bad: Tensor) -> None:
    if count := read(bad.sum()):
        raise NonFiniteError(f"{owner}: {name} has {int(count)} {what} of {bad.numel()} entries; P would be NaN")


def products_fit(owner: str, scale: float, most: float, **pair: Tensor) -> None:
    """Both tensors are finite and no product of two of their rows exceeds `most`, scaled or not.

    Where values cannot be read (while tracing, under vmap, on meta) nothing is checked.
    """
    (first, a), (second, b) = pair.items()
    if a.is_meta or b.is_meta:
        return
    # |a_i . b_j| <= ||a||_F ||b||_F: two reductions in the common case
    compute = torch.promote_types(a.dtype, torch.float32)
    norms = [read(torch.linalg.vector_norm(x.detach(), dtype=compute)) for x in (a, b)]
    if None in norms or _largest_product(norms, scale) < most:
        return
    all_finite(owner, **pair)
    rows = [read(torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float64).amax()) for x in (a, b)]
    if (largest := _largest_product(rows, scale)) >= most:
        raise NonFiniteError(
            f"{owner}: products of {first} and {second} may reach {largest:.1e} (rows have norms up to {rows[0]:.1e} "
            f"and {rows[1]:.1e}, scale is {scale:.1e}), but only those below {most:.1e} are computed in {compute}; "
            f"divide {first} or {second} by a constant"
        )


def _largest_product(norms: Sequence[float | None], scale: float) -> float:
    a, b = (0.0 if norm is None else norm for norm in norms)
    return max(a * b, a, b) * max(1.0, abs(scale))


def read(x: Tensor) -> float | None:
    """The number in a tensor of one element; None while tracing, under vmap and on meta, where it cannot be read."""
    if torch.compiler.is_compiling() or x.is_meta:
        return None
    try:
        return x.item()
    except RuntimeError:  # vmap and functorch wrappers refuse .item()
        return None


def symbolic(*sizes: object) -> bool:
    """Whether one of the sizes is a symbol: torch.export traces a program for all lengths, so none may be branched on.

    torch.compile has symbols too, but guards what was branched on, and compiles again for other lengths.
    """
    return not torch.compiler.is_dynamo_compiling() and any(isinstance(size, torch.SymInt) for size in sizes)


def autocasting(device: torch.device) -> bool:
    """Whether autocast is enabled on this device; meta has none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


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
