"""Sensitivities, fits and measured plans of an unfinished run, written as they are made, so that it can resume."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headwise.models.partial_files import load_partial, save_partial
from headwise.outputs import partial_results

T = TypeVar("T")


class PlanProgress:
    """Results of a run by key: tensors, plain values, and lists and dicts of them.  Without a directory none is stored.

    `run` identifies the model, texts and settings: a directory with the results of another run is refused.  Damaged
    results are computed again.
    """

    def __init__(self, directory: Path | None, run: str) -> None:
        self.run = run
        self.directory = None if directory is None else partial_results(directory, run)

    def stored(self, key: str, compute: Callable[[], T]) -> T:
        """The stored result, or that of `compute()`, which is stored."""
        if self.directory is None:
            return compute()
        file = self.directory / f"part-{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"
        value = load_partial(file, f"{self.run} {key}")
        if value is None:
            value = compute()
            save_partial(file, f"{self.run} {key}", value)
        return value
