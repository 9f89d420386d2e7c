"""The results of growth: how narrow each head is, and what one growth step changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, final


@final
@dataclass(frozen=True)
class HeadScore:
    """How much a head is limited by its query/key width.

    bottleneck  ||R||^2, noise included (bottleneck.py)
    validated   <R_a, R_b> over two halves of the data: the same without the noise; may be negative
    share       validated, relative to <M_a, M_b> in the same metric: the part that the present width cannot reach
    """

    layer: str
    head: int
    width: int
    bottleneck: float
    validated: float
    share: float


@final
@dataclass(frozen=True)
class HeadGrowth:
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
    """changes            one entry per head; empty when nothing was changed, and `reason` says why
    solution           the solution that the line search chose
    score_step         root mean square change of a row of scores, in nats
    predicted          change of the loss to first order
    measured           change of the held-out loss, None when no `loss` was given
    loss_before/after  the held-out loss
    tried              (solution, score step, held-out loss) of every point of the line search
    """

    changes: tuple[HeadGrowth, ...]
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
        """Restore queries, keys, widths and their optimizer state; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = [f.name for f in fields(self) if f.name not in ("changes", "tried", "_undo")]
        values = {name: getattr(self, name) for name in names}
        return {"changes": [asdict(c) for c in self.changes], **values, "measured": self.measured}

    def __str__(self) -> str:
        if not self.changes:
            return f"nothing changed: {self.reason}"
        heads = ", ".join(f"{c.layer}:{c.head} {c.before} -> {c.after}" for c in self.changes)
        measured = "not measured" if self.measured is None else f"measured {self.measured:+.4f}"
        return f"{heads} by {self.solution}; loss predicted {self.predicted:+.4f}, {measured}"
