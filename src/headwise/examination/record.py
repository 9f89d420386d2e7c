"""The result of an examination as a value: one Record per head, and its JSON with a schema version.

Everything that is printed, drawn or written is made from this.  docs/reference/report-json.md describes every field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headwise.outputs import valid_text

SCHEMA = 3


@dataclass(frozen=True)
class Statistic:
    """One measure of one head over texts."""

    mean: float
    std: float  # sample standard deviation (divided by texts - 1); nan for one text
    min: float
    max: float
    texts: int  # on which it was measured


@dataclass(frozen=True)
class Mode:
    """The most frequent value over texts of a measure that cannot be averaged, such as a position."""

    value: float
    count: int  # texts that have it
    texts: int  # on which it was measured


@dataclass(frozen=True)
class Record:
    """One head: where it is, its measures over all texts, and its kind."""

    site: int
    layer: str
    head: int
    kind: str
    description: str  # the kind in one sentence
    evidence: Mapping[str, float]  # the measures that decided the kind, mean or mode over evidence_texts
    evidence_texts: int  # texts that the description is about: those that this rule gave this kind
    judged: int  # texts on which the measures that decide the kind exist
    kind_counts: Mapping[str, int]  # number of judged texts on which the head has each kind
    stability: float  # share of texts with this kind, see `summary`; nan if judged on one
    measures: Mapping[str, Statistic]
    modes: Mapping[str, Mode]  # discrete measures
    by_text: Mapping[str, list[float]]  # compared measures on each text where they were measured
    profile: list[float]  # mean weight at offsets -64 ... 64
    spectrum: list[float]  # leading singular values, mean over texts with spectra; empty if not measured
    traits: list[str] = field(default_factory=list)  # what else holds of the head beside its kind, such as "induction"


@dataclass(frozen=True)
class Examination:
    """Measures and kinds of every head of a model."""

    model: Mapping[str, Any]  # name, class, parameters, dtype
    inputs: Mapping[str, Any]  # kind, source, number of texts, of texts with spectra, lengths
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
    advice: list[Mapping[str, Any]] = field(default_factory=list)  # what to do: topic, text, heads, command
    unseen: list[Mapping[str, Any]] = field(default_factory=list)  # attention that was not measured: name, class, why
    by_length: Mapping[str, Any] = field(default_factory=dict)  # lengths, and the kinds of all records at each
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain values: numbers with seven significant digits, None for what is not known."""
        return _plain(asdict(self))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))


def statistic(values: Sequence[float]) -> Statistic:
    """Mean, sample standard deviation and range of the values that are not NaN."""
    x = [value for value in values if not math.isnan(value)]
    if not x:
        return Statistic(math.nan, math.nan, math.nan, math.nan, 0)
    mean = sum(x) / len(x)
    std = math.sqrt(sum((value - mean) ** 2 for value in x) / (len(x) - 1)) if len(x) > 1 else math.nan
    return Statistic(mean, std, min(x), max(x), len(x))


def _plain(x: Any) -> Any:
    if isinstance(x, str):
        return valid_text(x)
    if isinstance(x, Mapping):
        return {valid_text(str(key)): _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    return x
