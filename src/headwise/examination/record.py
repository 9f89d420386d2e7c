"""The result of an examination as a value: one Record per head, and its JSON with a schema version.

Everything printed, drawn or written elsewhere is made from this.  docs/report-schema.md describes every field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Statistic:
    """One measure of one head over texts."""

    mean: float
    std: float
    min: float
    max: float
    texts: int


@dataclass(frozen=True)
class Record:
    """One head: where it is, what it measured over all texts, and what that makes it."""

    site: int
    layer: str
    head: int
    kind: str
    words: str
    because: Mapping[str, float]
    stability: float  # share of texts on which the kind is the same
    kinds: Mapping[str, int]  # how many texts gave each kind
    measures: Mapping[str, Statistic]
    profile: list[float]  # mean mass at offsets -64 ... 64
    spectrum: list[float]  # leading singular values, mean over texts; empty when not measured


@dataclass(frozen=True)
class Examination:
    """What every head of a model does."""

    model: Mapping[str, Any]  # name, class, parameters
    data: Mapping[str, Any]  # texts, lengths, source
    sites: list[Mapping[str, Any]]
    records: list[Record]
    layers: Mapping[str, Any]  # names, relative_residual, mean_cosine, norm: mean over texts
    redundancy: list[list[float | None]]  # cosine between heads, in the order of records
    headline: list[str]
    made: Mapping[str, Any]  # versions, seed, command
    paths: Mapping[str, Any] = field(default_factory=dict)
    ablations: Mapping[str, Any] = field(default_factory=dict)
    excerpt: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))

    def to_json(self) -> str:
        """JSON without NaN or infinity: what was not measured is null."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))


def _plain(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    return x
