"""What a symmetry check found, as values: for each element of the group, for each region, in two precisions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from headwise.theory.verdict import Verdict, json_number

REGIONS = ("whole", "interior", "border")


class Symmetry(Enum):
    EXACT = "EXACT"
    """Bit for bit in the dtype given."""
    ROUNDING = "ROUNDING"
    """True in exact arithmetic: the error shrinks with eps."""
    BORDER_ONLY = "BORDER ONLY"
    """True away from the edges."""
    APPROXIMATE = "APPROXIMATE"
    """False, but the relative error is within the tolerance."""
    BROKEN = "BROKEN"


@final
@dataclass(frozen=True)
class Error:
    """||e|| / ||g A(x)|| and max |e| over the places of a region."""

    relative: float
    maximal: float


Regions = dict[str, Error | None]
"""By the names in REGIONS; None where there is no such place (permutations know no border)."""


@final
@dataclass(frozen=True)
class ElementReport:
    """What one g did, in the dtype given and in float64."""

    name: str
    given: Regions
    float64: Regions

    @property
    def relative(self) -> float:
        """||A(g x) - g A(x)|| / ||A(x)|| in float64."""
        return _whole(self.float64).relative

    @property
    def maximal(self) -> float:
        """max |A(g x) - g A(x)| in float64."""
        return _whole(self.float64).maximal

    @property
    def maximal_as_given(self) -> float:
        """The same in the dtype given."""
        return _whole(self.given).maximal


@final
@dataclass(frozen=True)
class SymmetryReport:
    """The verdict and all it rests on.

    `scale`         max |A(x)|, in float64
    `floor`         largest difference between the two precisions, over the scale: how well the dtype can tell
    `threshold`     in float64, an error above threshold * scale is real and not rounding
    `border_width`  0 when no error is real, w when the real ones lie within w steps of an edge, None when they do not
    """

    relation: str
    module: str
    group: str
    dtype: str
    verdict: Symmetry
    elements: tuple[ElementReport, ...]
    scale: float
    floor: float
    threshold: float
    border_width: int | None
    tolerance: float
    training: bool
    deterministic: bool
    moved: bool
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.verdict in (Symmetry.EXACT, Symmetry.ROUNDING)

    @property
    def worst(self) -> ElementReport:
        return max(self.elements, key=lambda element: element.relative)

    def to_verdict(self) -> Verdict:
        """As a theorem: no error above the threshold.  Silent where the run could not have told."""
        return Verdict(
            claim=f"{self.module}: {self.relation} under {self.group}",
            source="S3, invariance and equivariance",
            measured=max(element.maximal for element in self.elements) / (self.scale or 1.0),
            bound=self.threshold,
            premises={
                "the module is in eval mode": not self.training,
                "two runs on one input agree": self.deterministic,
                "every element moves the input": self.moved,
            },
        )

    def to_json(self) -> dict[str, Any]:
        plain = ("relation", "module", "group", "dtype", "scale", "floor", "threshold", "border_width", "tolerance")
        flags = ("training", "deterministic", "moved")
        return {
            **{name: getattr(self, name) for name in (*plain, *flags)},
            "verdict": self.verdict.value,
            "worst": self.worst.name,
            "notes": list(self.notes),
            "elements": [
                {"name": e.name, "given": _regions_to_json(e.given), "float64": _regions_to_json(e.float64)}
                for e in self.elements
            ],
        }

    def __str__(self) -> str:
        border = f", border {self.border_width} wide" if self.verdict is Symmetry.BORDER_ONLY else ""
        line = (
            f"{self.module}: {self.relation} under {self.group}: {self.verdict.value}{border}; "
            f"worst {self.worst.name}, relative error {self.worst.relative:.2g} in float64; "
            f"rounding floor of {self.dtype} {self.floor:.2g}"
        )
        return "\n".join((line, *(f"  note: {note}" for note in self.notes)))


def _whole(regions: Regions) -> Error:
    whole = regions["whole"]
    assert whole is not None  # there is always at least one place
    return whole


def _regions_to_json(regions: Regions) -> dict[str, Any]:
    return {
        name: error and {"relative": json_number(error.relative), "maximal": json_number(error.maximal)}
        for name, error in regions.items()
    }
