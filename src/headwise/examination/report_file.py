"""report.json: checked against its schema when it is read, and as an `Examination` again.

Numbers have seven significant digits there and NaN is null, so an examination that was saved and loaded is equal to the
first up to the eighth digit, and saving it again writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.examination.record import SCHEMA, Examination, Mode, Record, Statistic
from headwise.output_directory import directory_for
from headwise.reading import (
    anything,
    boolean,
    fields,
    list_of,
    map_of,
    nullable,
    number,
    read_json,
    string,
    version,
    whole,
)

_VALUE = number(-1e40, 1e40)  # larger than any float32, and its fourth power is a float
_MEASURED = nullable(_VALUE)
_MAYBE = nullable(string())
_STATISTIC = fields({**dict.fromkeys(("mean", "std", "min", "max"), _MEASURED), "texts": whole(0)}, more=True)
_MODE = fields({"value": _MEASURED, "count": whole(0), "texts": whole(0)}, more=True)
_SITE = fields(
    {"name": string(), "causal": boolean, "heads": whole(1), "shortest": whole(0), "longest": whole(0)}, more=True
)
_RECORD = fields(
    {
        "site": whole(0),
        "layer": string(),
        "head": whole(0),
        "kind": string(),
        "description": string(),
        "evidence": map_of(_MEASURED),
        "evidence_texts": whole(0),
        "judged": whole(0),
        "kind_counts": map_of(whole(0)),
        "stability": _MEASURED,
        "measures": map_of(_STATISTIC),
        "modes": map_of(_MODE),
        "by_text": map_of(list_of(_MEASURED)),
        "profile": list_of(_MEASURED),
        "spectrum": list_of(_MEASURED),
    },
    {"traits": list_of(string())},
    more=True,
)
_LAYERS = {
    "names": list_of(string()),
    **dict.fromkeys(("relative_residual", "difference", "mean_cosine", "norm"), list_of(_MEASURED)),
}
_ADVICE = fields(
    {"topic": string(), "text": string(), "heads": list_of(list_of(whole(0)))}, {"command": _MAYBE}, more=True
)
_UNSEEN = fields({"name": string()}, {"class": _MAYBE, "why": _MAYBE}, more=True)
REPORT_FILE = fields(
    {
        "schema": version(SCHEMA, "examine the model again"),
        "model": fields({"name": string(), "class": string(), "dtype": string(), "parameters": whole(0)}, more=True),
        "inputs": fields(
            {
                "texts": whole(0),
                "spectra_texts": whole(0),
                "shortest": whole(0),
                "longest": whole(0),
                "spectra_exact": nullable(boolean),
            },
            {"kind": _MAYBE, "source": nullable(list_of(string())), "digest": _MAYBE},
            more=True,
        ),
        "measures": list_of(fields({"name": string(), "compared": boolean}, more=True)),
        "sites": list_of(_SITE),
        "records": list_of(_RECORD, empty=False),
        "layers": fields({}, _LAYERS, more=True),
        "redundancy": list_of(list_of(_MEASURED)),
        "headline": list_of(string()),
        "provenance": map_of(anything),
    },
    {
        **dict.fromkeys(("ablations", "paths", "excerpt", "by_length"), map_of(anything)),
        "advice": list_of(_ADVICE),
        "unseen": list_of(_UNSEEN),
    },
    more=True,
)
"""docs/reference/report-json.md describes all of it."""


def read_report(path: Path) -> dict[str, Any]:
    """report.json of a directory, or the file itself, as plain values."""
    path = path.expanduser()
    file = path / "report.json" if path.is_dir() else path
    facts = read_json(file, REPORT_FILE, "a report.json that `headwise examine` wrote, or its directory")
    for index, record in enumerate(facts["records"]):
        if record["site"] >= len(facts["sites"]):
            raise InputError(
                f"{file}: records/{index}/site is {record['site']}, but there are {len(facts['sites'])} sites"
            )
    return facts


def load_examination(path: Path) -> Examination:
    """The Examination in a directory or a report.json."""
    facts = read_report(path)
    records = [
        Record(
            **{
                **_known(Record, record),
                "measures": {
                    name: Statistic(**_numbers(_known(Statistic, x))) for name, x in _items(record, "measures")
                },
                "modes": {name: Mode(**_numbers(_known(Mode, x))) for name, x in _items(record, "modes")},
                "evidence": _numbers(record["evidence"]),
                "by_text": {name: _number_list(values) for name, values in _items(record, "by_text")},
                "stability": _number(record["stability"]),
                "profile": _number_list(record["profile"]),
                "spectrum": _number_list(record["spectrum"]),
            }
        )
        for record in facts["records"]
    ]
    layers = {
        name: x if name == "names" or name not in _LAYERS else _number_list(x) for name, x in _items(facts, "layers")
    }
    redundancy = [_number_list(row) for row in facts["redundancy"]]
    return Examination(**{**_known(Examination, facts), "records": records, "layers": layers, "redundancy": redundancy})


def save_examination(examination: Examination, directory: str | Path, *, force: bool) -> Path:
    """Write report.json alone; the page and the figures of an earlier report there, which it replaces, are removed."""
    from headwise.examination.report.page import report_names  # which reads reports, and so imports this

    with directory_for(directory, command="examine", names=report_names(), force=force) as out:
        out.key = str(examination.provenance.get("run", ""))
        return out.write_text("report.json", examination.to_json())


def _known(of: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows: newer ones may have more."""
    names = {field.name for field in fields_of(of)}
    return {name: value for name, value in values.items() if name in names}


def _items(record: Mapping[str, Any], field: str) -> Any:
    return record[field].items()


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in values.items()}


def _number_list(values: list[float | None]) -> list[float]:
    return [_number(value) for value in values]
