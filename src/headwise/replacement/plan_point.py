"""A point of the trade-off between the cost of a plan and its drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from headwise.replacement.kinds import Choice

Sites = Mapping[str, Sequence[Choice]]
"""{name of the module that computes attention: [choice of head 0, choice of head 1, ...]}"""

Drifts = Mapping[str, Mapping[int, float]]
"""{kind of text: {length: drift}}"""


@final
@dataclass(frozen=True, eq=False)
class PlanPoint:
    """One point of the trade-off.

    cost       of attention, relative to the model as it was
    predicted  drift that the sensitivities of the heads predict
    drift      largest measured, by kind of text and length, with the plan of the same cost chosen without that kind
    bound      for one text of a kind that was not tried, at each of the lengths; a tolerance is compared with it
    """

    sites: Sites
    cost: float
    predicted: float = 0.0
    drift: Drifts = field(default_factory=dict)
    bound: float = 0.0

    def __repr__(self) -> str:
        return f"PlanPoint(cost {self.cost:.1%}, drift {self.largest:.2g} measured, bound {self.bound:.2g})"

    @property
    def largest(self) -> float:
        """Largest measured drift over kinds and lengths."""
        return max((value for row in self.drift.values() for value in row.values()), default=0.0)

    def meets(self, tolerance: float) -> bool:
        return self.bound <= tolerance
