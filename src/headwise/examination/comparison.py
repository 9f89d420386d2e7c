"""Two examinations side by side: two checkpoints, or before and after a change.

    z = |mean_A - mean_B| / sqrt(std_A^2 + std_B^2 + (1 % of the larger mean)^2)

says by how many of its own spreads over texts a measure of a head moved; the small floor keeps a measure that never
varies from counting as infinitely far.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.examination.record import SCHEMA

MEASURES = (
    "effective_rank",
    "entropy",
    "output_error_64",
    "sink_mass",
    "mass_within_16",
    "toeplitz_error",
    "contribution",
)


@dataclass(frozen=True)
class HeadChange:
    """One head in both: its kinds, its largest move, and the values of that measure."""

    layer: str
    head: int
    before: str
    after: str
    measure: str
    a: float
    b: float
    z: float


@dataclass(frozen=True)
class Comparison:
    """Every head of A against the same head of B, largest change first."""

    a: str
    b: str
    heads: list[HeadChange]
    kinds_changed: int
    residual_a: list[float]
    residual_b: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> dict[str, Any]:
    """report.json of a directory, or the file itself."""
    file = path / "report.json" if path.is_dir() else path
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}; give a directory made by examine") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); give a report.json made by examine") from error
    if not isinstance(facts, dict) or "records" not in facts:
        raise InputError(f"{file} is not an examination: it has no records")
    if facts.get("schema") != SCHEMA:
        raise InputError(
            f"{file} has schema {facts.get('schema')}, this version reads {SCHEMA}; examine the model again"
        )
    return facts


def compare(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """The same heads in two examinations, paired by layer and head."""
    first, second = ({(r["layer"], r["head"]): r for r in facts["records"]} for facts in (a, b))
    shared = [key for key in first if key in second]
    if not shared:
        raise InputError(
            f"{a['model']['name']} and {b['model']['name']} share no head: their layers are called differently "
            f"({next(iter(first))[0]} and {next(iter(second))[0]})"
        )
    heads = sorted((_change(first[key], second[key]) for key in shared), key=lambda change: -change.z)
    return Comparison(
        a["model"]["name"],
        b["model"]["name"],
        heads,
        sum(change.before != change.after for change in heads),
        a["layers"].get("relative_residual", []),
        b["layers"].get("relative_residual", []),
    )


def _change(a: dict[str, Any], b: dict[str, Any]) -> HeadChange:
    moves = []
    for name in MEASURES:
        x, y = a["measures"].get(name), b["measures"].get(name)
        if x and y and x["mean"] is not None and y["mean"] is not None:
            floor = 0.01 * max(abs(x["mean"]), abs(y["mean"])) or 1e-12
            spread = math.sqrt((x["std"] or 0) ** 2 + (y["std"] or 0) ** 2 + floor**2)
            moves.append((abs(x["mean"] - y["mean"]) / spread, name, x["mean"], y["mean"]))
    z, name, before, after = max(moves, default=(0.0, "", 0.0, 0.0))
    return HeadChange(a["layer"], a["head"], a["kind"], b["kind"], name, before, after, z)
