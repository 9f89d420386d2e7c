"""Fits and measurements of an unfinished search, written as they are made, so that an interrupted run can resume."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.models.partial_files import load_partial, log_damaged, save_partial
from headwise.outputs import append_line, partial_results, read_lines
from headwise.replacement.kinds import Choice, Tensors

SiteFits = dict[Choice, tuple[Tensors, Tensor]]
"""Learned tensors of all heads of a site, stacked, and the error of each head: by choice."""


class DriftEstimate(NamedTuple):
    """Mean drift over texts, its standard error, and the direction in which the output moved, (texts, width)."""

    mean: float
    standard_error: float
    direction: Tensor | None = None


class PlanProgress:
    """Results of a search by key; without a directory nothing is stored.

    `run` identifies the model, texts and settings: a directory with the results of another search is refused.  Damaged
    results are computed again.
    """

    def __init__(self, directory: Path | None, run: str) -> None:
        self.run = run
        self.directory = None if directory is None else partial_results(directory, run)
        self._drifts = {} if self.directory is None else read_lines(self.directory / "drifts.jsonl")

    def fits(self, key: str, compute: Callable[[], SiteFits]) -> SiteFits:
        """The stored fits, or those of `compute()`, which are stored."""
        if self.directory is None:
            return compute()
        file = self.directory / f"fit-{_digest(key)}.pt"
        stored = load_partial(file, f"{self.run} {key}")
        if stored is not None:
            try:
                return {Choice.from_dict(row["choice"]): (row["tensors"], row["errors"]) for row in stored}
            except (TypeError, KeyError, InputError) as error:
                log_damaged(file, str(error))
        fits = compute()
        rows = [{"choice": c.to_dict(), "tensors": x, "errors": errors} for c, (x, errors) in fits.items()]
        save_partial(file, f"{self.run} {key}", rows)
        return fits

    def drift(self, key: str, compute: Callable[[], DriftEstimate]) -> DriftEstimate:
        """The stored estimate, or that of `compute()`, which is stored."""
        key = _digest(f"{self.run} {key}")
        if key in self._drifts and (stored := _unpacked(self._drifts[key])) is not None:
            return stored
        estimate = compute()
        self._drifts[key] = _packed(estimate)
        if self.directory is not None:
            append_line(self.directory / "drifts.jsonl", key, self._drifts[key])
        return estimate


def _packed(estimate: DriftEstimate) -> list[Any]:
    if estimate.direction is None:
        return [estimate.mean, estimate.standard_error, None, None]
    values = estimate.direction.float().contiguous()
    packed = base64.b64encode(values.cpu().numpy().tobytes()).decode()
    return [estimate.mean, estimate.standard_error, packed, list(values.shape)]


def _unpacked(row: Any) -> DriftEstimate | None:
    """The inverse of `_packed`; None for anything else."""
    try:
        mean, standard_error, packed, shape = row
        if packed is None:
            return DriftEstimate(float(mean), float(standard_error))
        values = torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.float32)
        return DriftEstimate(float(mean), float(standard_error), values.view(shape))
    except (TypeError, ValueError, RuntimeError):
        return None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]
