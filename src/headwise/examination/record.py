"""The result of an examination as a value: one Record per head, and its JSON with a schema version.

Everything that is printed, drawn or written is made from this.  docs/reference/report-json.md describes every field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 2


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
    """One head: where it is, its measures over all texts, and its kind."""

    site: int
    layer: str
    head: int
    kind: str
    description: str  # the kind in one sentence
    evidence: Mapping[str, float]  # the measures that decided the kind
    stability: float  # share of texts on which the kind is the same
    kind_counts: Mapping[str, int]  # number of texts on which the head has each kind
    measures: Mapping[str, Statistic]
    profile: list[float]  # mean weight at offsets -64 ... 64
    spectrum: list[float]  # leading singular values, mean over texts; empty if not measured


@dataclass(frozen=True)
class Examination:
    """Measures and kinds of every head of a model."""

    model: Mapping[str, Any]  # name, class, parameters, dtype
    inputs: Mapping[str, Any]  # kind, source, texts, lengths
    measures: list[Mapping[str, Any]]  # definition of each measure, as registered
    sites: list[Mapping[str, Any]]
    records: list[Record]
    layers: Mapping[str, Any]  # names, relative_residual, difference, mean_cosine, norm: mean over texts
    redundancy: list[list[float | None]]  # cosine between heads, in the order of records
    headline: list[str]
    provenance: Mapping[str, Any]  # versions, seed, command
    paths: Mapping[str, Any] = field(default_factory=dict)
    ablations: Mapping[str, Any] = field(default_factory=dict)
    excerpt: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain values: numbers with seven significant digits, None for what was not measured."""
        return _plain(asdict(self))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))


def _plain(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    return x
