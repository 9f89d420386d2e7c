"""Two examinations side by side as files: comparison.html (one file, no network) and comparison.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.examination.comparison import (
    ExaminationComparison,
    HeadDifference,
    compare_examinations,
    measure_changes,
)
from headwise.examination.record import Examination
from headwise.examination.report.page import assembled_page, basis, page_data, page_words
from headwise.examination.report.site_labels import head_address, site_labels
from headwise.output_directory import OutputDirectory, directory_for

COMPARISON_FILES = ("comparison.html", "comparison.json")
SHOWN_CHANGES = 8


def write_comparison(
    a: Examination | Mapping[str, Any],
    b: Examination | Mapping[str, Any],
    directory: str | Path | OutputDirectory,
    *,
    force: bool = False,
) -> list[Path]:
    """Write comparison.html and comparison.json in `directory`; a and b are examinations, or come from `read_report`.

    An earlier comparison there is replaced with `force`; files that headwise did not write are never replaced.
    """
    facts = [_facts(x) for x in (a, b)]
    found = compare_examinations(*facts)
    with directory_for(directory, command="compare", names=list(COMPARISON_FILES), force=force) as out:
        out.write_text("comparison.json", json.dumps(found.to_dict(), allow_nan=False))
        out.write_text("comparison.html", comparison_page(*facts))
        return [out.path / name for name in COMPARISON_FILES]


def comparison_page(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The whole page as one string, from two reports as `read_report` returns them."""
    facts = [dict(a), dict(b)]
    found, changes = compare_examinations(*facts), measure_changes(*facts)
    labels = dict(zip(names := [site["name"] for site in a["sites"]], site_labels(names), strict=True))
    pairs, places = _pairs(*facts)
    sides = [_side(x) for x in facts]
    data = {
        "a": sides[0],
        "b": sides[1],
        "words": page_words(a),
        "model": {"name": f"{found.a} and {found.b}"},
        "kinds": sides[0].pop("kinds"),
        "measures": [x for x in sides[0].pop("measures") if x.get("compared")],
        "pairs": pairs,
        "changes": _by_measure(changes, places),
        "largest": _largest(found, places),
        "ranked_by": found.ranked_by,
        "residuals": [found.residual_a, found.residual_b],
    }
    return assembled_page(
        "comparison.html",
        ("basics.js", "pictures.js", "table.js", "attention.js", "comparison.js"),
        data,
        a=found.a,
        b=found.b,
        basis_a=basis(a),
        basis_b=basis(b),
        differs=found.differs,
        sentences=_sentences(found, changes),
        heads=[
            {
                "label": f"{labels[x.layer]} · {x.head}",
                "address": head_address(labels[x.layer], x.head),
                "text": f"{x.measure.replace('_', ' ')} {x.a:.3g} → {x.b:.3g}"
                + ("" if x.z is None else f", z = {x.z:.1f}"),
            }
            for x in found.heads[:SHOWN_CHANGES]
        ],
        version=b["provenance"].get("headwise", ""),
    )


def _facts(x: Examination | Mapping[str, Any]) -> dict[str, Any]:
    return x.to_dict() if isinstance(x, Examination) else dict(x)


def _side(facts: Mapping[str, Any]) -> dict[str, Any]:
    """One examination for the page; of its excerpt the maps, without the links of single tokens."""
    data = page_data(facts)
    excerpt = data["excerpt"]
    if isinstance(excerpt.get("sites"), list):
        sites = [
            {name: x for name, x in site.items() if name != "links"}
            for site in excerpt["sites"]
            if isinstance(site, dict)
        ]
        excerpt = {"tokens": excerpt.get("tokens", []), "own": excerpt.get("own", False), "sites": sites}
    kept = ("model", "inputs", "sites", "records", "kinds", "measures")
    return {**{name: data[name] for name in kept}, "excerpt": excerpt}


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[tuple[int, int]], dict[tuple[str, int], int]]:
    """Places of the shared heads in the records of both, and the number of the pair of each (layer, head)."""
    where = {(record["layer"], record["head"]): i for i, record in enumerate(b["records"])}
    shared = [(key, i) for i, record in enumerate(a["records"]) if (key := (record["layer"], record["head"])) in where]
    return [(i, where[key]) for key, i in shared], {key: number for number, (key, _) in enumerate(shared)}


def _by_measure(changes: list[HeadDifference], places: dict[tuple[str, int], int]) -> dict[str, list]:
    """measure -> for each pair [relative change, z] or None."""
    found: dict[str, list] = {}
    for x in changes:
        row = found.setdefault(x.measure, [None] * len(places))
        row[places[x.layer, x.head]] = [float(f"{x.relative:.4g}"), None if x.z is None else float(f"{x.z:.4g}")]
    return found


def _largest(found: ExaminationComparison, places: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """For each pair the measure that moved farthest."""
    rows: list[dict[str, Any]] = [{} for _ in places]
    for rank, x in enumerate(found.heads):
        rows[places[x.layer, x.head]] = {"measure": x.measure, "rank": rank, "same_length": x.same_length}
    return rows


def _sentences(found: ExaminationComparison, changes: list[HeadDifference]) -> list[str]:
    lines = [f"{len(found.heads)} heads are in both, {found.kinds_changed} changed kind."]
    ends = [residuals[-1] for residuals in (found.residual_a, found.residual_b) if residuals]
    if len(ends) == 2 and None not in ends:
        lines.append(f"Relative residual after the last layer: {ends[0]:.3g} and {ends[1]:.3g}.")
    zs = [x.z for x in changes if x.z is not None]
    if zs:
        way = "text by text" if found.paired else "by Welch's t-test"
        lines.append(
            "z is the change of a mean in standard errors, "
            f"{way}, allowing for the number of texts. {sum(z > 3 for z in zs)} of {len(zs)} changes have a z above 3; "
            f"chance alone would make about {0.0027 * len(zs):.1f} so large."
        )
    else:
        lines.append("One text on a side shows no spread, so there is no z: heads are sorted by relative change.")
    if found.unranked:
        names = ", ".join(name.replace("_", " ") for name in found.unranked)
        lines.append(
            f"Without z, as measured on one text only: {names}. Examine with --spectra-every 1 to include them."
        )
    return lines
