"""Measures as a page shows them: in groups, and some of them as the first columns of a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

GROUPS = {
    "Effect": ("importance", "contribution", "output_norm", "value_norm"),
    "Spread": ("entropy", "distance_to_uniform", "row_maximum", "frobenius", "largest_score", "visible_share"),
    "Rank": ("effective_rank", "stable_rank", "numeric_rank", "sigma", "energy", "output_error"),
    "Position": (
        "mass_within",
        "diagonal",
        "previous_mass",
        "next_mass",
        "offset",
        "best_offset",
        "toeplitz",
        "distant",
    ),
    "Single tokens": ("sink", "first_mass", "delimiter", "punctuation"),
    "Repetition": ("induction", "duplicate", "previous_of_duplicate", "retrieval"),
}
"""group -> how the names of its measures begin"""

COLUMNS = ("importance", "entropy", "effective_rank", "output_error_64", "sink_mass", "mass_within_16")
"""Measures that the table of heads shows at first, as far as they were measured."""


HEADINGS = {
    "effective_rank": "effective rank",
    **{f"output_error_{rank}": f"rank-{rank} error" for rank in (8, 16, 32, 64, 128, 256)},
    "sink_mass": "sink mass",
    "mass_within_16": "within ±16",
    "mass_within_64": "within ±64",
    "entropy_share": "entropy share",
    "toeplitz_error": "Toeplitz error",
    "best_offset_mass": "best offset mass",
    "contribution": "contribution",
}
"""Shorter labels for the head of a column."""


def group_of(name: str) -> str:
    """The group of a measure; "Other" for one that was registered elsewhere."""
    return next((group for group, starts in GROUPS.items() if name.startswith(starts)), "Other")


def grouped(measures: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The measures with their groups, in the order of the groups, the often looked at first."""
    order = [*GROUPS, "Other"]
    found = [
        {
            **measure,
            "group": group_of(name := measure["name"]),
            "heading": HEADINGS.get(name, measure.get("label", name)),
        }
        for measure in measures
    ]
    return sorted(found, key=lambda x: (order.index(x["group"]), not x.get("shown", False)))


def first_columns(measured: Collection[str]) -> list[str]:
    """Some measures for a table; the output error at the largest rank below 64 for a short text that lacks rank 64."""
    ranks = [int(name.removeprefix("output_error_")) for name in measured if name.startswith("output_error_")]
    error = f"output_error_{max((rank for rank in ranks if rank <= 64), default=64)}"
    return [name for name in (error if name == "output_error_64" else name for name in COLUMNS) if name in measured]
