"""What is claimed about attention, as functions that measure it: every result is a value that says whether it held."""

from headwise.theory.groups import flips, permutations, quarter_turns, translations
from headwise.theory.symmetry import check_equivariance, check_invariance
from headwise.theory.symmetry_report import Symmetry, SymmetryReport
from headwise.theory.verdict import Verdict

__all__ = [
    "Symmetry",
    "SymmetryReport",
    "Verdict",
    "check_equivariance",
    "check_invariance",
    "flips",
    "permutations",
    "quarter_turns",
    "translations",
]
