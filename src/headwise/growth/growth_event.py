"""What a growth did: values to print, to log, to take back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, final


@final
@dataclass(frozen=True)
class HeadScore:
    """How much one head wants to be wider: ||R||^2, its cross-validated form, its share of the whole wish."""

    layer: str
    head: int
    width: int
    bottleneck: float
    validated: float
    share: float


@final
@dataclass(frozen=True)
class HeadChange:
    """One head, from width `before` to width `after`, and ||R||^2 on the same data before and after."""

    layer: str
    head: int
    before: int
    after: int
    bottleneck_before: float
    bottleneck_after: float


@final
@dataclass(eq=False)
class GrowthEvent:
    """changes            one entry a head; empty when nothing was worth changing, and `reason` says why
    solution           which of the solutions the line search chose
    score_step         how far a row of scores moved (root mean square over queries), in nats
    predicted          change of the loss to first order
    measured           change of the held-out loss, None when no `loss` was given
    loss_before/after  the held-out loss
    tried              (solution, score step, held-out loss) of every point of the line search
    """

    changes: tuple[HeadChange, ...]
    reason: str
    solution: str = ""
    score_step: float = 0.0
    predicted: float = 0.0
    loss_before: float | None = None
    loss_after: float | None = None
    parameters_added: int = 0
    tried: tuple[tuple[str, float, float], ...] = ()
    _undo: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def measured(self) -> float | None:
        if self.loss_before is None or self.loss_after is None:
            return None
        return self.loss_after - self.loss_before

    def undo(self) -> None:
        """Queries, keys, widths and their optimizer state as they were before; once, and nothing else is touched."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "changes": [asdict(c) for c in self.changes],
            "reason": self.reason,
            "solution": self.solution,
            "score_step": self.score_step,
            "predicted": self.predicted,
            "measured": self.measured,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "parameters_added": self.parameters_added,
        }

    def __str__(self) -> str:
        if not self.changes:
            return f"nothing changed: {self.reason}"
        heads = ", ".join(f"{c.layer}:{c.head} {c.before} -> {c.after}" for c in self.changes)
        measured = "not measured" if self.measured is None else f"measured {self.measured:+.4f}"
        return f"{heads} by {self.solution}; loss predicted {self.predicted:+.4f}, {measured}"
