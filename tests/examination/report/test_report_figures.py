"""Figures of examinations in which some measure is zero everywhere."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwise.examination import examine
from headwise.examination.report.report_figures import draw
from tests.models.tiny_models import ALL


def test_a_first_text_of_one_token_has_no_collapse_curves() -> None:
    """It differs from no other token: its residual is zero in every layer."""
    torch.manual_seed(0)
    model, batch = ALL["bert"]()
    examination = examine(model, [{"input_ids": batch["input_ids"][:, :1]}, batch], ablations=True)
    assert "has only one" in examination.ablations["why"]
    assert not any("skips" in sentence for sentence in examination.headline)
    assert "collapse.svg" not in draw(examination)  # warnings are errors here


def test_curves_that_are_zero_are_drawn_without_a_warning() -> None:
    """As saved reports may have them: zero has no logarithm."""
    torch.manual_seed(0)
    model, batch = ALL["bert"]()
    examination = examine(model, [batch], ablations=True)
    curves = {name: [0.0] * len(curve) for name, curve in examination.ablations["curves"].items()}
    ablations = {**examination.ablations, "curves": curves}
    assert "collapse.svg" in draw(replace(examination, ablations=ablations))
