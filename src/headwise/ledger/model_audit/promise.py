"""What an audit finds about one promise, and about all promises of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, final


class Standing(Enum):
    """What is known about a promise."""

    KEPT = "kept"
    VIOLATED = "VIOLATED"
    MEASURED = "measured"
    """Information: nothing was promised."""
    NOT_TRIED = "not tried"
    NOT_APPLICABLE = "does not apply"


@final
@dataclass(frozen=True)
class Promise:
    """One verdict: a number, what rounding alone would give, the worst place, and a sentence.

    measured  relative to the largest output, unless the sentence says otherwise; None if nothing was measured
    floor     what rounding alone would give; None where no rounding is involved
    """

    name: str
    standing: Standing
    sentence: str
    measured: float | None = None
    floor: float | None = None
    where: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "standing": self.standing.value.lower()}


@final
@dataclass(frozen=True, repr=False)
class ModelAudit:
    """The verdicts on one model; `print(audit)` lists them."""

    model: str
    kind: str
    dtype: str
    inputs: str
    seed: int
    promises: tuple[Promise, ...]

    @property
    def violated(self) -> tuple[str, ...]:
        """The names of the promises that the model breaks."""
        return tuple(promise.name for promise in self.promises if promise.standing is Standing.VIOLATED)

    def __getitem__(self, name: str) -> Promise:
        """The verdict on one promise, by its name."""
        found = next((promise for promise in self.promises if promise.name == name), None)
        if found is None:
            raise KeyError(f"{name!r}; the promises are {', '.join(promise.name for promise in self.promises)}")
        return found

    @property
    def summary(self) -> str:
        """The number of promises of each standing, such as '9 kept, 2 not tried'."""
        counts = Counter(promise.standing for promise in self.promises)
        return ", ".join(f"{counts[standing]} {standing.value}" for standing in Standing if counts[standing])

    def to_json(self) -> dict[str, Any]:
        """A dict for `outputs.json_text`."""
        facts = {name: getattr(self, name) for name in ("model", "kind", "dtype", "inputs", "seed")}
        verdicts = [promise.to_json() for promise in self.promises]
        return {"schema": 1, **facts, "promises": verdicts, "violated": list(self.violated)}

    def __str__(self) -> str:
        width = max(len(promise.name) for promise in self.promises)
        lines = [
            f"{promise.name:<{width}}  {promise.standing.value:<14}  {promise.sentence}" for promise in self.promises
        ]
        return "\n".join([f"{self.model}: {self.kind}, {self.dtype}, {self.inputs}", *lines, self.summary])

    def __repr__(self) -> str:
        return f"ModelAudit({self.model}: {self.summary})"
