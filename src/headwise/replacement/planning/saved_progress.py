"""Fits and measurements of an unfinished search, written as they are made, so that an interrupted run can resume."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.models.gate import load_tensors
from headwise.outputs import append_line, atomic, partial_results, read_lines
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

    `key` identifies the model, texts and settings: a directory with the results of another search is refused.
    """

    def __init__(self, directory: Path | None, key: str) -> None:
        self.directory = None if directory is None else partial_results(directory, key)
        self._drifts = {} if self.directory is None else read_lines(self.directory / "drifts.jsonl")

    def fits(self, key: str, compute: Callable[[], SiteFits]) -> SiteFits:
        """The stored fits, or those of `compute()`, which are stored."""
        if self.directory is None:
            return compute()
        file = self.directory / f"fit-{_digest(key)}.pt"
        if file.exists():
            rows = load_tensors(file)
            return {Choice.from_dict(row["choice"]): (row["tensors"], row["errors"]) for row in rows}
        fits = compute()
        with atomic(file) as temporary:
            rows = [{"choice": c.to_dict(), "tensors": x, "errors": errors} for c, (x, errors) in fits.items()]
            torch.save(rows, temporary)
        return fits

    def drift(self, key: str, compute: Callable[[], DriftEstimate]) -> DriftEstimate:
        """The stored estimate, or that of `compute()`, which is stored."""
        key = _digest(key)
        if key in self._drifts:
            mean, standard_error, packed, shape = self._drifts[key]
            if packed is None:
                return DriftEstimate(mean, standard_error)
            values = torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.float32)
            return DriftEstimate(mean, standard_error, values.view(shape))
        estimate = compute()
        row = [estimate.mean, estimate.standard_error, None, None]
        if estimate.direction is not None:
            values = estimate.direction.float().contiguous()
            row[2:] = [base64.b64encode(values.numpy().tobytes()).decode(), list(values.shape)]
        self._drifts[key] = row
        if self.directory is not None:
            append_line(self.directory / "drifts.jsonl", key, row)
        return estimate


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]
