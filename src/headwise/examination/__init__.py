"""Examine every head of a model: `headwise.examine(model, batches)` returns an `Examination`."""

from __future__ import annotations

from headwise.examination.examine import examine
from headwise.examination.record import Examination, Record, Statistic

__all__ = ["Examination", "Record", "Statistic", "examine"]
