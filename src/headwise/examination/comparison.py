"""Two examinations side by side: two checkpoints, or before and after a change.

For a measure of a head with means a and b, each over at least two texts,

    t = |a - b| / sqrt(e^2 + (1 % of the larger mean)^2)

where e is the standard error of a - b: that of the differences text by text if both examinations have the same texts,
else Welch's, e^2 = s_a^2 / n_a + s_b^2 / n_b.  z is the deviate of a normal distribution that is as improbable as t, so
that measures on few and on many texts can be ranked together.  The floor of 1 % keeps a measure that hardly varies
from ranking high for a change that does not matter.  Means of one text have no standard error and no z.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.examination.record import Examination
from headwise.examination.report_file import read_report


@dataclass(frozen=True)
class HeadDifference:
    """One head in both examinations: its kinds, the measure that moved farthest, and the means of that measure."""

    layer: str
    head: int
    kind_a: str
    kind_b: str
    same_length: bool  # both kinds were judged on texts of the same lengths
    measure: str
    a: float
    b: float
    texts_a: int
    texts_b: int
    relative: float  # |a - b| / max(|a|, |b|)
    z: float | None  # None if a or b is of one text


@dataclass(frozen=True)
class ExaminationComparison:
    """Every head of A against the same head of B, the farthest moved first."""

    a: str
    b: str
    differs: list[str]  # what else is different: inputs, lengths, masks, settings
    paired: bool  # the same texts on both sides
    ranked_by: str  # z, or relative if no measure has a z
    unranked: list[str]  # measures without z, because they were measured on one text
    heads: list[HeadDifference]
    kinds_changed: int
    residual_a: list[float]
    residual_b: list[float]

    def __repr__(self) -> str:
        """One line; `heads` has the rest."""
        changed = f"{self.kinds_changed} of {len(self.heads)} heads changed kind"
        head = self.heads[0]
        most = f"{head.measure} of {head.layer}, head {head.head}: {head.a:.3g} to {head.b:.3g}"
        return f"ExaminationComparison({self.a} against {self.b}: {changed}; farthest moved: {most})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: Examination | str | Path, b: Examination | str | Path) -> ExaminationComparison:
    """Every head of A against the same head of B, the farthest moved first; each is an examination or its directory.

    Examine both on the same texts: then measures are compared text by text, which shows smaller changes.
    """
    return compare_examinations(_facts(a), _facts(b))


def measure_changes(a: dict[str, Any], b: dict[str, Any]) -> list[HeadDifference]:
    """Every compared measure of every head that is in both examinations, in the order of A."""
    heads_a, heads_b = ({(r["layer"], r["head"]): r for r in facts["records"]} for facts in (a, b))
    shared = [key for key in heads_a if key in heads_b]
    if not shared:
        raise InputError(
            f"{a['model']['name']} and {b['model']['name']} share no head: their layers have different names "
            f"({next(iter(heads_a))[0]} and {next(iter(heads_b))[0]})"
        )
    paired = _same_texts(a, b)
    names = _compared(a)
    lengths_a, lengths_b = ({s["name"]: (s["shortest"], s["longest"]) for s in facts["sites"]} for facts in (a, b))
    moves: list[HeadDifference] = []
    for key in shared:
        x, y = heads_a[key], heads_b[key]
        same_length = lengths_a.get(key[0]) == lengths_b.get(key[0])
        moves += [move for name in names if (move := _move(x, y, name, paired=paired, same_length=same_length))]
    if not moves:
        raise InputError(
            f"{a['model']['name']} and {b['model']['name']} have no measure in common that can be compared; "
            "examine both with this version"
        )
    return moves


def compare_examinations(a: dict[str, Any], b: dict[str, Any]) -> ExaminationComparison:
    """The heads that are in both examinations (as `read_report` returns them), paired by layer and head."""
    moves = measure_changes(a, b)
    has_z = any(move.z is not None for move in moves)
    heads: dict[tuple[str, int], HeadDifference] = {}
    for move in sorted(moves, key=_rank, reverse=True):
        heads.setdefault((move.layer, move.head), move)
    return ExaminationComparison(
        a["model"]["name"],
        b["model"]["name"],
        _what_differs(a, b),
        _same_texts(a, b),
        "z" if has_z else "relative",
        [name for name in _compared(a) if has_z and any(m.z is None and m.measure == name for m in moves)],
        list(heads.values()),
        _kinds_changed(a, b),
        a["layers"].get("relative_residual", []),
        b["layers"].get("relative_residual", []),
    )


def _facts(given: Examination | str | Path) -> dict[str, Any]:
    if isinstance(given, Examination):
        return given.to_dict()
    if not isinstance(given, str | Path):
        raise InputError(
            f"compare takes examinations or their directories, but was given a {type(given).__name__}; examine the "
            "model first"
        )
    return read_report(Path(given))


def normal_deviate(t: float, degrees: float) -> float:
    """z with about the tail probability of Student's t (Wallace 1959): within 0.06 up to t = 5 from two degrees on."""
    return (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))


def _compared(facts: dict[str, Any]) -> list[str]:
    return [measure["name"] for measure in facts["measures"] if measure["compared"]]


def _kinds_changed(a: dict[str, Any], b: dict[str, Any]) -> int:
    kinds_a, kinds_b = ({(r["layer"], r["head"]): r["kind"] for r in facts["records"]} for facts in (a, b))
    return sum(kinds_b.get(key, kind) != kind for key, kind in kinds_a.items())


def _rank(move: HeadDifference) -> tuple[bool, float]:
    return (False, move.relative) if move.z is None else (True, move.z)


def _move(a: dict[str, Any], b: dict[str, Any], name: str, *, paired: bool, same_length: bool) -> HeadDifference | None:
    """One measure of one head in both examinations; None if one of them lacks it."""
    x, y = a["measures"].get(name), b["measures"].get(name)
    if not x or not y or x["mean"] is None or y["mean"] is None:
        return None
    larger = max(abs(x["mean"]), abs(y["mean"]))
    values = (a["by_text"].get(name), b["by_text"].get(name)) if paired else (None, None)
    return HeadDifference(
        a["layer"],
        a["head"],
        a["kind"],
        b["kind"],
        same_length,
        name,
        x["mean"],
        y["mean"],
        x["texts"],
        y["texts"],
        abs(x["mean"] - y["mean"]) / larger if larger else 0.0,
        _z(x, y, values, floor=0.01 * larger),
    )


def _z(x: Mapping[str, Any], y: Mapping[str, Any], values: Sequence[list | None], *, floor: float) -> float | None:
    if x["std"] is None or y["std"] is None or min(x["texts"], y["texts"]) < 2:
        return None
    v, w = values
    if v and w and len(v) == len(w) > 1 and None not in (*v, *w):
        differences = [p - q for p, q in zip(v, w, strict=True)]
        degrees, mean = len(v) - 1, sum(differences) / len(v)
        squared_error = sum((d - mean) * (d - mean) for d in differences) / degrees / len(v)
        distance = abs(mean)
    else:
        parts = [(side["std"] * side["std"] / side["texts"], side["texts"] - 1) for side in (x, y)]
        squared_error, distance = sum(part for part, _ in parts), abs(x["mean"] - y["mean"])
        scale = sum((part / squared_error) ** 2 / n for part, n in parts) if squared_error else 0
        degrees = 1 / scale if scale else min(n for _, n in parts)
    return normal_deviate(distance / max(math.hypot(math.sqrt(squared_error), floor), 1e-300), degrees)


def _same_texts(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The same batches, and spectra of the same ones among them."""
    digests = [facts["inputs"].get("digest") for facts in (a, b)]
    every = [facts["provenance"].get("spectra_every") for facts in (a, b)]
    return digests[0] is not None and digests[0] == digests[1] and every[0] == every[1]


def _what_differs(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What differs beside the weights and can change a measure, as far as both say it: "length: 512 and 256 tokens"."""
    x, y = _description(a), _description(b)
    labels = [label for label in x if None not in (x[label], y[label]) and x[label] != y[label]]
    if {"length", "kind of inputs", "source", "texts"} & set(labels):
        labels = [label for label in labels if label != "contents of the inputs"]
    units = {"length": " tokens", "spectra every": " batches"}
    found = [f"{label}: {x[label]} and {y[label]}{units.get(label, '')}" for label in labels]
    causal_a, causal_b = ({site["name"]: site["causal"] for site in facts["sites"]} for facts in (a, b))
    masks = [name for name in causal_a if name in causal_b and causal_a[name] != causal_b[name]]
    if masks:
        found.append(f"causal masks: at {', '.join(masks)} in one of them only")
    return found


def _description(facts: dict[str, Any]) -> dict[str, Any]:
    model, inputs, made = facts["model"], facts["inputs"], facts["provenance"]
    low, high = inputs["shortest"], inputs["longest"]
    exact, source = {True: "exact", False: "approximate"}.get(inputs["spectra_exact"]), inputs.get("source") or None
    return {
        "length": str(high) if low == high else f"{low} to {high}",
        "kind of inputs": inputs.get("kind"),
        "source": ", ".join(map(str, source)) if isinstance(source, list) else source,
        "texts": inputs["texts"],
        "contents of the inputs": inputs.get("digest"),
        "texts with spectra": inputs["spectra_texts"],
        "spectra": exact,
        "seed": made.get("seed"),
        "spectra every": made.get("spectra_every"),
        "class": model["class"],
        "dtype": model["dtype"],
        "headwise": made.get("headwise"),
    }
