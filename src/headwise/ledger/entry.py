"""One claim of a source, how it is tested, and what came of it.

    printed     the claim as it stands, measured <= bound
    without     the same without the premise that the source leaves out: failing shows that the premise is needed
    corrected   what is true instead

The outcome follows from these; nothing is written down as true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headwise.theory.verdict import Verdict


class Outcome(Enum):
    HOLDS = "HOLDS"
    HOLDS_WITH_PREMISE = "HOLDS WITH PREMISE"
    REFUTED = "REFUTED"
    CORRECTED = "CORRECTED"


@dataclass(frozen=True)
class Finding:
    """What a check found, with an example in words where there is one to show."""

    printed: Verdict
    without: Verdict | None = None
    corrected: Verdict | None = None
    example: str = ""

    @property
    def outcome(self) -> Outcome:
        if self.printed.holds:
            needed = self.without is not None and self.without.holds is False
            return Outcome.HOLDS_WITH_PREMISE if needed else Outcome.HOLDS
        return Outcome.CORRECTED if self.corrected is not None and self.corrected.holds else Outcome.REFUTED

    def to_json(self) -> dict[str, Any]:
        parts = {"printed": self.printed, "without": self.without, "corrected": self.corrected}
        found = {name: None if part is None else part.to_json() for name, part in parts.items()}
        return {"outcome": self.outcome.value, **found, "example": self.example}


@dataclass(frozen=True)
class Entry:
    """A claim: where it stands, what it says, what it means for someone who builds a model, and its check."""

    id: str
    place: str
    statement: str
    latex: str
    expected: Outcome
    meaning: str
    check: Callable[[], Finding]
    premise: str = ""
    truth: str = ""  # the corrected statement
    timed: Callable[[], str] | None = None  # seconds, which no verdict rests on and which differ from run to run

    @property
    def source(self) -> str:
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Result:
    """An entry with what its check found here."""

    entry: Entry
    finding: Finding
    timed: str = ""

    @property
    def as_recorded(self) -> bool:
        return self.finding.outcome is self.entry.expected

    def to_json(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "id": entry.id,
            "source": entry.source,
            "place": entry.place,
            "statement": entry.statement,
            "latex": entry.latex,
            "expected": entry.expected.value,
            "premise": entry.premise,
            "truth": entry.truth,
            "meaning": entry.meaning,
            **self.finding.to_json(),
            "timed": self.timed,
        }


def examine(entry: Entry, *, clock: bool = True) -> Result:
    """Run the check; with `clock` also what is timed."""
    return Result(entry, entry.check(), entry.timed() if clock and entry.timed is not None else "")


def rounding(claim: str, error: float, bound: float = 1e-12) -> Verdict:
    """An identity: both sides agree up to rounding."""
    return Verdict(claim, "", error, bound, {})
