"""Run a module in two precisions to measure its rounding error.

    floor = max |A_dtype(x) - A_64(x)| / max |A_64|,   C = floor / eps(dtype),   threshold = SAFETY * C * eps(float64)

An identity that is true in exact arithmetic is violated by C * eps with about the same C in every precision, since the
same sums are rounded in the same places.  So a difference above `threshold` in the float64 run is not rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.errors import HeadwiseError, InputError, NonFiniteError

SAFETY = 16.0
"""Two computations differ by twice the rounding of one, and sums in another order by somewhat more."""

ASSUMED = 256.0
"""C where it cannot be measured, since the module does not run in a second precision."""

Forward = Callable[[Any, Tensor], Tensor]
"""forward(module, x): how to run a module on one tensor."""


@final
@dataclass(frozen=True, eq=False)
class TwoPrecisions:
    """A(x) for every input, in the given dtype and in float64 (as float64 tensors), and their difference."""

    given: list[Tensor]
    float64: list[Tensor]
    scale: float
    floor: float
    threshold: float
    deterministic: bool
    notes: tuple[str, ...]


def run_in_two_precisions(module: Callable[..., Any], call: Forward | None, inputs: list[Tensor]) -> TwoPrecisions:
    """Run a copy of `module` as it is and in float64 (in float32, if it is float64 itself)."""
    given = _run(module, call, inputs, None)
    dtype = given.outputs[0].dtype
    eps, eps64 = torch.finfo(dtype).eps, torch.finfo(torch.float64).eps
    other = torch.float32 if dtype == torch.float64 else torch.float64
    notes = [] if given.repeats else ["two runs on the same input differ, so no symmetry can hold exactly"]
    try:
        second = _run(module, call, inputs, other)
    except (RuntimeError, TypeError, HeadwiseError) as error:
        reason = str(error).split("\n")[0]
        notes.append(
            f"rounding floor assumed to be {ASSUMED:.0f} eps, since the module does not run in {other} ({reason})"
        )
        exact, constant, finest = given, ASSUMED, eps
    else:
        exact = given if dtype == torch.float64 else second
        gaps = (
            (a.double() - b.double()).abs().amax().item() for a, b in zip(given.outputs, second.outputs, strict=True)
        )
        constant = max(1.0, max(gaps) / (_largest(exact.outputs) or 1.0) / max(eps, torch.finfo(other).eps))
        if not given.repeats:
            constant = ASSUMED  # the runs differ by randomness, not by rounding
        finest = max(exact.eps, eps64)
        if exact.eps > eps64:
            notes.append(f"parts of the module compute with eps {exact.eps:.1g} after conversion to float64")
    return TwoPrecisions(
        given=given.outputs,
        float64=[y.double() for y in exact.outputs],
        scale=_largest(exact.outputs),
        floor=constant * eps,
        threshold=SAFETY * constant * finest,
        deterministic=given.repeats,
        notes=tuple(notes),
    )


def module_name(module: object) -> str:
    return (
        type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", type(module).__name__)
    )


@final
@dataclass(frozen=True, eq=False)
class _Run:
    outputs: list[Tensor]
    repeats: bool
    eps: float  # of the coarsest dtype of any operation


class _CoarsestEps(TorchDispatchMode):
    """The largest eps among the floating dtypes that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point:
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return out


def _run(module: Callable[..., Any], call: Forward | None, inputs: list[Tensor], dtype: torch.dtype | None) -> _Run:
    """Run a copy of the module, converted to `dtype`, on every input; the module and the random state do not change."""
    if isinstance(module, nn.Module):
        module = copy.deepcopy(module)
        module = module if dtype is None else module.to(dtype)
    devices = [inputs[0].device] if inputs[0].is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        ready = [x.to(dtype) if dtype is not None and x.dtype.is_floating_point else x for x in inputs]
        with _CoarsestEps() as watch:
            first = _call(module, call, ready[0])
        outputs = [first, *(_call(module, call, x) for x in ready[1:])]
        repeats = torch.equal(_call(module, call, ready[0]), first)
    return _Run(outputs, repeats, watch.eps)


def _call(module: Callable[..., Any], call: Forward | None, x: Tensor) -> Tensor:
    y = module(x) if call is None else call(module, x)
    if not isinstance(y, Tensor) or not y.dtype.is_floating_point:
        raise InputError(
            f"{module_name(module)} returned {type(y).__name__}, not a floating tensor; "
            "select one, for example call=lambda module, x: module(x, x, x)[0]"
        )
    if not bool(y.isfinite().all()):
        raise NonFiniteError(f"{module_name(module)}: the output has {int((~y.isfinite()).sum())} non-finite entries")
    return y.detach()


def _largest(outputs: list[Tensor]) -> float:
    return max(y.abs().amax().item() for y in outputs)
