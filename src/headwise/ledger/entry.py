"""One published claim, how it is tested, and the outcome; and the draws and verdicts that checks are made of.

    printed     the claim as it stands: measured <= bound
    without     the claim without a premise that the text leaves out; if it fails, the premise is needed
    corrected   the true statement, where the claim is false

The outcome follows from these three verdicts; none is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from headwise.random_state import seeded
from headwise.theory.verdict import Verdict


class Outcome(Enum):
    HOLDS = "HOLDS"
    HOLDS_WITH_PREMISE = "HOLDS WITH PREMISE"
    REFUTED = "REFUTED"
    CORRECTED = "CORRECTED"


@dataclass(frozen=True)
class Finding:
    """What a check measured, with an example in words."""

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
        verdicts = {"printed": self.printed, "without": self.without, "corrected": self.corrected}
        parts = {name: verdict and verdict.to_json() for name, verdict in verdicts.items()}
        return {"outcome": self.outcome.value, **parts, "example": self.example}


@dataclass(frozen=True)
class LedgerEntry:
    """A claim: its place in the text, what it says, what it means for someone who builds a model, and its check."""

    id: str
    place: str
    statement: str
    latex: str
    expected: Outcome
    meaning: str
    check: Callable[[], Finding]
    premise: str = ""
    truth: str = ""  # the corrected statement
    timing: Callable[[], str] | None = None  # seconds, which differ from run to run; no verdict depends on them

    @property
    def source(self) -> str:
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Source:
    """A text and its claims.  Each file of a source makes one, and registers checks with `@SOURCE.claim(...)`."""

    id: str
    authors: str
    title: str
    topic: str
    entries: list[LedgerEntry] = field(default_factory=list)

    def claim(
        self,
        id: str,
        place: str,
        statement: str,
        latex: str,
        expected: Outcome,
        meaning: str,
        *,
        premise: str = "",
        truth: str = "",
        timing: Callable[[], str] | None = None,
    ) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
        """Register the decorated check, which runs from a fixed seed; the arguments are the fields of `LedgerEntry`."""

        def register(check: Callable[[], Finding]) -> Callable[[], Finding]:
            # layers draw their weights from the global random state
            run, timed = seeded(0)(check), None if timing is None else seeded(0)(timing)
            entry = LedgerEntry(id, place, statement, latex, expected, meaning, run, premise, truth, timed)
            self.entries.append(entry)
            return run

        return register


@dataclass(frozen=True)
class ClaimResult:
    """An entry and what its check measured."""

    entry: LedgerEntry
    finding: Finding
    timed: str = ""

    @property
    def as_recorded(self) -> bool:
        return self.finding.outcome is self.entry.expected

    def to_json(self) -> dict[str, Any]:
        texts = ("id", "source", "place", "statement", "latex", "premise", "truth", "meaning")
        return {
            **{name: getattr(self.entry, name) for name in texts},
            "expected": self.entry.expected.value,
            **self.finding.to_json(),
            "timed": self.timed,
        }


def check_claim(entry: LedgerEntry, *, timing: bool = True) -> ClaimResult:
    """Run the check, and with `timing` the measurement of time where the entry has one."""
    return ClaimResult(entry, entry.check(), entry.timing() if timing and entry.timing is not None else "")


def at_most(claim: str, measured: float, bound: float) -> Verdict:
    """measured <= bound."""
    return Verdict(claim, "", measured, bound, {})


def rounding(claim: str, error: float, bound: float = 1e-12) -> Verdict:
    """An identity: both sides agree up to rounding."""
    return at_most(claim, error, bound)


def equal(claim: str, left: Tensor, right: Tensor | float, bound: float = 1e-12) -> Verdict:
    """`rounding` of the largest difference between the entries of two tensors."""
    return rounding(claim, (left - right).abs().max().item(), bound)


def generator(seed: int = 0) -> torch.Generator:
    """Fixed seeds, so that verdicts do not change from run to run."""
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def shown(x: Tensor, digits: int = 3) -> str:
    """A tensor as text, such as [[1, 0.5], [0, 1]]."""
    if x.dim():
        return "[" + ", ".join(shown(row, digits) for row in x) + "]"
    return f"{round(x.item(), digits) + 0.0:g}"  # + 0.0 turns -0 into 0
