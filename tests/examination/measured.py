"""Measurements of one head on made-up texts, to test what is said about many texts."""

from __future__ import annotations

from typing import Any

import torch

from headwise.examination.measure.observe import ExaminedSite, Measurement
from headwise.examination.record import Examination
from headwise.examination.summary import summarise

HEAD = {
    "entropy_share": 0.5,
    "toeplitz_error": 0.9,
    "best_offset": -1.0,
    "best_offset_mass": 0.1,
    "sink_mass": 0.1,
    "sink_position": 0.0,
    "mass_within_16": 0.2,
    "distant_mass": 0.5,
    "distant_chance": 0.56,
    "visible_share": 1.0,
    "row_maximum": 0.4,
}


def text(spectrum: dict[str, float] | None = None, n: int = 512, digest: str = "", **numbers: float) -> Measurement:
    """One head measured on one text of n tokens."""

    def wide(x: dict[str, float]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([value], dtype=torch.float64) for name, value in x.items()}

    return Measurement(
        sites=[ExaminedSite("layer.0", "self", False, 1, 1, 8, 8, None)],
        lengths=[(n, n)],
        numbers=wide({**HEAD, **numbers}),
        profile=torch.zeros(1, 129),
        redundancy=torch.ones(1, 1),
        layers={},
        blocks=[],
        spectral=wide(spectrum or {}),
        leading=torch.ones(1, 4, dtype=torch.float64) if spectrum else None,
        digest=digest,
    )


def examination(*texts: Measurement, **inputs: Any) -> Examination:
    model = {"name": "tiny", "class": "Tiny", "parameters": 1, "dtype": "float32"}
    made = {"seed": 0, "spectra_every": 1, "headwise": "0"}
    return summarise(texts, model=model, inputs={"kind": "text", **inputs}, provenance=made, excerpt={})
