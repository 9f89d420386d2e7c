"""Theorems about attention as functions that measure both sides and return a value that tells whether they hold."""

from headwise.theory.groups import flips, permutations, quarter_turns, translations
from headwise.theory.symmetry import Symmetry, SymmetryReport, check_equivariance, check_invariance
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
