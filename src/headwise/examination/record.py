"""The result of an examination as a value: one Record per head, and its JSON with a schema version.

Everything that is printed, drawn or written is made from this.  docs/reference/report-json.md describes every field.

    result.rows()         one dict for each head, also `to_pandas()` and `to_polars()`
    result.save("run")    and `Examination.load("run")`
    result.show()         the page, in a browser or in the notebook
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headwise.errors import InputError, needs_extra
from headwise.models.inputs import TEXT_WORDS
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

    def __repr__(self) -> str:
        return f"Statistic(mean={self.mean:.4g}, std={self.std:.2g}, texts={self.texts})"


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

    def __repr__(self) -> str:
        counted = f" on {self.kind_counts[self.kind]} of {self.judged}" if self.kind in self.kind_counts else ""
        traits = f" ({', '.join(self.traits)})" if self.traits else ""
        return f"Record({self.layer}, head {self.head}: {self.kind}{counted}{traits}, {len(self.measures)} measures)"


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

    def __repr__(self) -> str:
        kinds = Counter(record.kind for record in self.records)
        mix = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return f"Examination({self.model['name']}: {len(self.records)} heads, {mix}; {self.inputs_in_words()})"

    def _repr_html_(self) -> str:
        from headwise.examination.report.notebook import notebook_html

        return notebook_html(self)

    @property
    def words(self) -> Mapping[str, str]:
        """What one input and one position are called: item, items, unit, units."""
        return self.inputs.get("words") or TEXT_WORDS

    def inputs_in_words(self) -> str:
        """Such as "16 texts of 512 tokens"; images and recordings are called so."""
        words, count = self.words, self.inputs["texts"]
        low, high = self.inputs["shortest"], self.inputs["longest"]
        sizes = f"{high}" if low == high else f"{low} to {high}"
        item, unit = words["item" if count == 1 else "items"], words["unit" if high == 1 else "units"]
        return f"{count} {item} of {sizes} {unit}"

    def rows(self, *, spread: bool = False) -> list[dict[str, Any]]:
        """One dict for each head: where it is, its kind, and the mean of each measure; None for what is not known.

        Discrete measures, such as positions, have their most frequent value.  `spread` adds, for each averaged measure,
        its sample standard deviation over texts (`entropy_std`) and the number of texts (`entropy_texts`).
        """
        rows = []
        for index, record in enumerate(self.records):
            row: dict[str, Any] = {
                "layer": record.layer,
                "head": record.head,
                "kind": record.kind,
                "traits": ", ".join(record.traits),
                "stability": record.stability,
                **{f"kind_at_{length}": kinds[index] for length, kinds in self.by_length.get("kinds", {}).items()},
            }
            for name in (measure["name"] for measure in self.measures):
                if name in record.modes:
                    row[name] = record.modes[name].value
                elif name in record.measures:
                    statistic = record.measures[name]
                    row[name] = statistic.mean
                    row |= {f"{name}_std": statistic.std, f"{name}_texts": statistic.texts} if spread else {}
                else:
                    row[name] = None
            rows.append({name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()})
        return rows

    def to_pandas(self, *, spread: bool = False) -> Any:
        """`rows` as a pandas DataFrame, one row a head; what is not known is NaN."""
        with needs_extra("notebook", "to_pandas"):
            import pandas
        frame = pandas.DataFrame(self.rows(spread=spread))
        return frame.astype(dict.fromkeys(self._number_columns(frame.columns), "float64"))

    def to_polars(self, *, spread: bool = False) -> Any:
        """`rows` as a polars DataFrame, one row a head; what is not known is null."""
        try:
            import polars  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise InputError("to_polars needs polars, which is not installed; pip install polars") from error
        rows = self.rows(spread=spread)
        types = dict.fromkeys(self._number_columns(rows[0]), polars.Float64)
        return polars.DataFrame(rows, schema_overrides=types, infer_schema_length=None)

    def _number_columns(self, names: Iterable[str]) -> list[str]:
        """Columns of `rows` that hold numbers, also if none of them is known."""
        measures = {measure["name"] for measure in self.measures}
        averaged = {"stability", *measures, *(f"{name}_std" for name in measures)}
        return [name for name in names if name in averaged]

    def save(self, directory: str | Path, *, force: bool = False) -> Path:
        """Write report.json in `directory`, at once or not at all; numbers keep seven significant digits.

        An earlier report there is replaced with `force`; files that headwise did not write are never replaced.  To
        write the page and the figures as well, call `headwise.examination.write_report`.
        """
        from headwise.examination.report_file import save_examination

        return save_examination(self, directory, force=force)

    @classmethod
    def load(cls, directory: str | Path) -> Examination:
        """What `save`, `write_report` or `headwise examine` wrote: a directory, or its report.json."""
        from headwise.examination.report_file import load_examination

        return load_examination(Path(directory))

    def show(self, directory: str | Path | None = None, *, force: bool = False) -> Any:
        """Open the page in a browser, and return its path; in a notebook, return it as an object that is displayed.

        The page is written to a new temporary directory, or with all other files to `directory`.
        """
        from headwise.examination.viewer import show

        return show(self, directory, force=force)

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
