"""Every operator of headwise keeps the contract, in every variant listed in `cases`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import headwise.operators
from headwise.operators.base import AttentionOperator
from headwise.testing import CHECKS, Case
from headwise.testing.contract import check_compile
from tests.operators.cases import CASES


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case, check: str) -> None:
    if check in case.skip:
        pytest.skip(case.skip[check])
    CHECKS[check](case)


def test_every_final_operator_has_a_case() -> None:
    missing = sorted(final_operators() - {type(case.operator()) for case in CASES}, key=lambda cls: cls.__name__)
    assert not missing, f"add a line to tests/operators/cases.py for {', '.join(cls.__name__ for cls in missing)}"


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inductor(case: Case) -> None:
    check_compile(case, backend="inductor")


def final_operators() -> set[type[AttentionOperator]]:
    """Every class in headwise.operators that is marked @final and is an operator."""
    for module in pkgutil.walk_packages(headwise.operators.__path__, "headwise.operators."):
        importlib.import_module(module.name)
    found, queue = set(), [AttentionOperator]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if cls.__module__.startswith("headwise.") and getattr(cls, "__final__", False):
            found.add(cls)
    return found
