"""Examine every head of a model: `headwise.examine(model, batches)` returns an `Examination`.

A measure of your own is one function, see `register_measure`.
"""

from __future__ import annotations

from headwise.examination.advice import with_advice
from headwise.examination.comparison import ExaminationComparison, HeadDifference, compare_examinations, read_report
from headwise.examination.examiner import examine
from headwise.examination.lengths import with_lengths
from headwise.examination.measure.depth import with_depth
from headwise.examination.measure.head_measures import HeadProjection, Measure, register_measure
from headwise.examination.measure.importance import with_importance
from headwise.examination.measure.spectra import HeadSpectrum
from headwise.examination.measure.streaming import HeadSums
from headwise.examination.record import Examination, Mode, Record, Statistic
from headwise.examination.report.page import add_plan, report_page, write_report
from headwise.examination.summary import unusual_heads

__all__ = [
    "Examination",
    "ExaminationComparison",
    "HeadDifference",
    "HeadProjection",
    "HeadSpectrum",
    "HeadSums",
    "Measure",
    "Mode",
    "Record",
    "Statistic",
    "add_plan",
    "compare_examinations",
    "examine",
    "read_report",
    "register_measure",
    "report_page",
    "unusual_heads",
    "with_advice",
    "with_depth",
    "with_importance",
    "with_lengths",
    "write_report",
]
