"""What came of testing a theorem: measured <= bound, or not, or the theorem does not speak of this case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

SLACK = 1e-9
"""Relative; a bound that is attained must not fail by the rounding of the two sides."""


@final
@dataclass(frozen=True)
class Verdict:
    """`holds` is None when a premise fails: the theorem then says nothing, which is not the same as being false.

    >>> Verdict("|x| <= 1", "an example", measured=0.5, bound=1.0, premises={"x is real": True}).holds
    True
    """

    claim: str
    source: str
    measured: float
    bound: float
    premises: Mapping[str, bool]

    def __post_init__(self) -> None:
        # the caller's mapping may change afterwards, and a zero-dimensional tensor is not a value
        object.__setattr__(self, "premises", {name: bool(held) for name, held in self.premises.items()})
        object.__setattr__(self, "measured", float(self.measured))
        object.__setattr__(self, "bound", float(self.bound))

    @property
    def holds(self) -> bool | None:
        if self.failed_premises:
            return None
        slack = SLACK * abs(self.bound) if math.isfinite(self.bound) else 0.0
        return self.measured <= self.bound + slack  # NaN compares false: what could not be measured does not hold

    @property
    def failed_premises(self) -> tuple[str, ...]:
        return tuple(name for name, held in self.premises.items() if not held)

    def to_json(self) -> dict[str, Any]:
        """A dict of strings, numbers, booleans and None; infinity and NaN, which JSON lacks, as strings."""
        return {
            "claim": self.claim,
            "source": self.source,
            "measured": json_number(self.measured),
            "bound": json_number(self.bound),
            "premises": dict(self.premises),
            "holds": self.holds,
        }

    def __str__(self) -> str:
        if self.holds is None:
            return f"{self.claim}: silent, because not: {', '.join(self.failed_premises)}"
        return f"{self.claim}: {'holds' if self.holds else 'FAILS'}, {self.measured:.3g} against {self.bound:.3g}"


def json_number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
