"""The result of testing a theorem: measured <= bound, or not, or its premises do not hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

SLACK = 1e-9
"""Relative; a bound that is attained must not fail by rounding."""


@final
@dataclass(frozen=True)
class Verdict:
    """Whether measured <= bound; `holds` is None when a premise fails, since the theorem then does not apply.

    >>> Verdict("|x| <= 1", "an example", measured=0.5, bound=1.0, premises={"x is real": True}).holds
    True
    """

    claim: str
    source: str
    measured: float
    bound: float
    premises: Mapping[str, bool]

    def __post_init__(self) -> None:
        # copied, since the caller's mapping may change; converted, since tensors are not JSON
        object.__setattr__(self, "premises", {name: bool(held) for name, held in self.premises.items()})
        object.__setattr__(self, "measured", float(self.measured))
        object.__setattr__(self, "bound", float(self.bound))

    @property
    def holds(self) -> bool | None:
        if self.failed_premises:
            return None
        slack = SLACK * abs(self.bound) if math.isfinite(self.bound) else 0.0
        return self.measured <= self.bound + slack  # False for NaN

    @property
    def failed_premises(self) -> tuple[str, ...]:
        return tuple(name for name, held in self.premises.items() if not held)

    def to_json(self) -> dict[str, Any]:
        """A dict for `outputs.json_text`."""
        return {**vars(self), "holds": self.holds}

    def __str__(self) -> str:
        if self.holds is None:
            return f"{self.claim}: does not apply, because not: {', '.join(self.failed_premises)}"
        return f"{self.claim}: {'holds' if self.holds else 'FAILS'}, {self.measured:.3g} against {self.bound:.3g}"
