"""What a conversion or rewrite changed: parameters, cost, largest change of the output; and how these are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.cost import Cost
from headwise.errors import InputError
from headwise.models.run import as_it_was
from headwise.testing.counting import count_multiply_adds


@final
@dataclass(frozen=True)
class Left:
    """A part that was not changed, and why."""

    what: str
    why: str


@final
@dataclass(frozen=True)
class Receipt:
    """Costs are those of the probe; `largest_change` is max |new(probe) - old(probe)|, `scale` is max |old(probe)|.

    >>> print(Receipt("conv", 10, 10, Cost(100), Cost(100), 1e-7, 2.0))
    conv: 10 -> 10 parameters, 100 -> 100 multiply-adds, largest change 1.0e-07 of 2
    """

    what: str
    parameters_before: int
    parameters_after: int
    cost_before: Cost
    cost_after: Cost
    largest_change: float
    scale: float
    parts: tuple[Receipt, ...] = ()
    left: tuple[Left, ...] = ()
    notes: tuple[str, ...] = ()
    weights: str = ""  # dtype and layout of the weights, which a conversion keeps
    trials: tuple[dict[str, Any], ...] = ()  # what was measured on texts, see headwise.replacement.trials

    def __str__(self) -> str:
        change = (
            f"{self.what}: {self.parameters_before} -> {self.parameters_after} parameters, "
            f"{self.cost_before.multiply_adds} -> {self.cost_after.multiply_adds} multiply-adds, "
            f"largest change {self.largest_change:.1e} of {self.scale:.3g}"
        )
        return "\n".join([change, *(f"left {each.what}: {each.why}" for each in self.left), *self.notes])

    def __repr__(self) -> str:
        first, *more = str(self).splitlines()
        return f"Receipt({first}{f'; {len(more)} more lines in str()' if more else ''})"

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers only."""
        return asdict(self)


def evaluate(module: nn.Module, probe: Tensor) -> object:
    """module(probe) in evaluation mode without gradients; training flags are restored afterwards."""
    try:
        with torch.no_grad(), as_it_was(module):
            return module(probe)
    except RuntimeError as error:
        raise InputError(
            f"{type(module).__name__} does not run on a probe of shape {tuple(probe.shape)}: {error}"
        ) from error


def largest_change(old: Callable[[], object], new: Callable[[], object]) -> tuple[float, float]:
    """(max |new() - old()|, max |old()|) over every tensor of the outputs."""
    with torch.no_grad():
        before, after = _tensors(old()), _tensors(new())
    change = max(((a - b).abs().max().item() for a, b in zip(after, before, strict=True)), default=0.0)
    return change, max((x.abs().max().item() for x in before), default=0.0)


def counted_cost(call: Callable[[], object]) -> Cost:
    """The multiply-adds that torch performs in one call, counted."""
    return Cost(count_multiply_adds(call).products)


def parameter_count(module: nn.Module) -> int:
    """Number of parameters; those of lazy layers that have not run yet count as none."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.detach()] if output.numel() else []
    if isinstance(output, (dict, tuple, list)):
        return [x for value in (output.values() if isinstance(output, dict) else output) for x in _tensors(value)]
    return []
