"""Examine every head of a model: `headwise.examine(model, batches)` returns an `Examination`.

A measure of your own is one function, see `register_measure`.
"""

from __future__ import annotations

from headwise.examination.advice import with_advice
from headwise.examination.comparison import ExaminationComparison, HeadDifference, compare, compare_examinations
from headwise.examination.examiner import examine
from headwise.examination.lengths import with_lengths
from headwise.examination.measure.depth import with_depth
from headwise.examination.measure.head_measures import HeadProjection, Measure, register_measure
from headwise.examination.measure.importance import with_importance
from headwise.examination.measure.spectra import HeadSpectrum
from headwise.examination.measure.streaming import HeadSums
from headwise.examination.monitor import Alarm, AlarmRules, History
from headwise.examination.record import Examination, Mode, Record, Statistic
from headwise.examination.report.comparison_page import comparison_page, write_comparison
from headwise.examination.report.notebook import notebook_html
from headwise.examination.report.page import add_plan, report_page, write_report
from headwise.examination.report_file import read_report
from headwise.examination.summary import unusual_heads

__all__ = [
    "Alarm",
    "AlarmRules",
    "Examination",
    "ExaminationComparison",
    "HeadDifference",
    "HeadProjection",
    "HeadSpectrum",
    "HeadSums",
    "History",
    "Measure",
    "Mode",
    "Record",
    "Statistic",
    "add_plan",
    "compare",
    "compare_examinations",
    "comparison_page",
    "examine",
    "notebook_html",
    "read_report",
    "register_measure",
    "report_page",
    "unusual_heads",
    "with_advice",
    "with_depth",
    "with_importance",
    "with_lengths",
    "write_comparison",
    "write_report",
]
