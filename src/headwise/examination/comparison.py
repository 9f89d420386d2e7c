"""Two examinations side by side: two checkpoints, or before and after a change.

    z = |mean_A - mean_B| / sqrt(std_A^2 + std_B^2 + (1 % of the larger mean)^2)

is how far a measure of a head moved, in units of its spread over texts; the floor of 1 % keeps a measure that does not
vary over texts from giving an infinite z.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.examination.record import SCHEMA
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

_MEASURED = nullable(number())  # null where there was nothing to measure
_STATISTIC = fields(
    {"mean": _MEASURED, "std": _MEASURED}, {"min": _MEASURED, "max": _MEASURED, "texts": whole(0)}, more=True
)
_RECORD = fields(
    {"site": whole(0), "layer": string(), "head": whole(0), "kind": string(), "measures": map_of(_STATISTIC)}, more=True
)
REPORT_FILE = fields(
    {
        "schema": version(SCHEMA, "examine the model again"),
        "model": fields({"name": string(), "class": string(), "parameters": whole(0)}, more=True),
        "inputs": fields({"texts": whole(0)}, more=True),
        "measures": list_of(fields({"name": string(), "compared": boolean}, more=True)),
        "sites": list_of(fields({"name": string()}, more=True)),
        "records": list_of(_RECORD, empty=False),
        "layers": fields({}, {"relative_residual": list_of(_MEASURED)}, more=True),
        "redundancy": list_of(list_of(_MEASURED)),
        "headline": list_of(string()),
        "provenance": map_of(anything),
    },
    dict.fromkeys(("ablations", "paths", "excerpt"), map_of(anything)),
    more=True,
)
"""report.json, as far as it is read; docs/reference/report-json.md describes all of it."""


@dataclass(frozen=True)
class HeadDifference:
    """One head in both examinations: its kinds, the measure that moved farthest, and the values of that measure."""

    layer: str
    head: int
    kind_a: str
    kind_b: str
    measure: str
    a: float
    b: float
    z: float


@dataclass(frozen=True)
class ExaminationComparison:
    """Every head of A against the same head of B, largest z first."""

    a: str
    b: str
    heads: list[HeadDifference]
    kinds_changed: int
    residual_a: list[float]
    residual_b: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_report(path: Path) -> dict[str, Any]:
    """report.json of a directory, or the file itself."""
    file = path / "report.json" if path.is_dir() else path
    return read_json(file, REPORT_FILE, "a report.json that `headwise examine` wrote, or its directory")


def compare_examinations(a: dict[str, Any], b: dict[str, Any]) -> ExaminationComparison:
    """The heads that are in both examinations (as `read_report` returns them), paired by layer and head."""
    heads_a, heads_b = ({(r["layer"], r["head"]): r for r in facts["records"]} for facts in (a, b))
    shared = [key for key in heads_a if key in heads_b]
    if not shared:
        raise InputError(
            f"{a['model']['name']} and {b['model']['name']} share no head: their layers have different names "
            f"({next(iter(heads_a))[0]} and {next(iter(heads_b))[0]})"
        )
    names = [measure["name"] for measure in a["measures"] if measure["compared"]]
    heads = sorted((_difference(heads_a[key], heads_b[key], names) for key in shared), key=lambda head: -head.z)
    return ExaminationComparison(
        a["model"]["name"],
        b["model"]["name"],
        heads,
        sum(head.kind_a != head.kind_b for head in heads),
        a["layers"].get("relative_residual", []),
        b["layers"].get("relative_residual", []),
    )


def _difference(a: dict[str, Any], b: dict[str, Any], names: list[str]) -> HeadDifference:
    moves = []
    for name in names:
        x, y = a["measures"].get(name), b["measures"].get(name)
        if x and y and x["mean"] is not None and y["mean"] is not None:
            floor = 0.01 * max(abs(x["mean"]), abs(y["mean"])) or 1e-12
            spread = math.sqrt((x["std"] or 0) ** 2 + (y["std"] or 0) ** 2 + floor**2)
            moves.append((abs(x["mean"] - y["mean"]) / spread, name, x["mean"], y["mean"]))
    z, name, mean_a, mean_b = max(moves, default=(0.0, "", 0.0, 0.0))
    return HeadDifference(a["layer"], a["head"], a["kind"], b["kind"], name, mean_a, mean_b, z)
