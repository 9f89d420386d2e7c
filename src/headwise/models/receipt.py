"""What a rewrite did: parameters and cost before and after, and the largest change of the output on a probe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

from headwise.cost import Cost


@final
@dataclass(frozen=True)
class Left:
    """A part that was left as it was, and why."""

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

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.parameters_before} -> {self.parameters_after} parameters, "
            f"{self.cost_before.multiply_adds} -> {self.cost_after.multiply_adds} multiply-adds, "
            f"largest change {self.largest_change:.1e} of {self.scale:.3g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers only."""
        return asdict(self)
