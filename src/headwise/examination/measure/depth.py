"""What depth does: collapse curves and path lengths, added to an examination; runs that a family cannot do say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headwise.examination.measure.ablation import collapse_curves
from headwise.examination.measure.path_lengths import by_length
from headwise.examination.record import Examination


def with_depth(examination: Examination, model: nn.Module, batch: Any) -> Examination:
    """The examination with `ablations` and `paths` measured on the first sequence of `batch`, in float64."""
    if not isinstance(batch, Mapping) or not all(isinstance(x, Tensor) for x in batch.values()):
        batch = {"input": batch} if isinstance(batch, Tensor) else batch
    if not isinstance(batch, Mapping):
        why = {"supported": False, "why": "the batch is not a mapping of named tensors"}
        return replace(examination, ablations=why, paths=why)
    ablations, paths = collapse_curves(model, batch), by_length(model, batch)
    headline = list(examination.headline)
    if ablations["supported"]:
        pure = ablations["curves"]["no attention skip"]
        headline.append(
            f"Without its attention skips the relative residual would fall from {pure[0]:.2g} to {pure[-1]:.0e} in "
            f"{len(pure) - 1} layers: every token the same."
            if pure[-1] < 1e-2
            else f"Even without its attention skips the relative residual stays at {pure[-1]:.2g}."
        )
    return replace(examination, ablations=ablations, paths=paths, headline=headline)
