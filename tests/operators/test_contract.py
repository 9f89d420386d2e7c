"""Every operator of headwise keeps the contract, in every variant listed in `cases`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import headwise.operators
from headwise.operators.base import AttentionOperator
from headwise.operators.concatenation import Concatenation
from headwise.operators.dot_product import DotProduct
from headwise.operators.scores import Scores
from headwise.operators.softmax import Softmax
from headwise.operators.toeplitz import Toeplitz
from headwise.operators.toeplitz_softmax import ToeplitzSoftmax
from headwise.testing import CHECKS, Case
from headwise.testing.contract import check_compile
from tests.operators.cases import CASES, EXACT

# compiling takes most of the time, so the fast tier compiles the last variant of each operator, and the slow tier all
LAST = {type(case.operator()): case.name for case in CASES}
COMPILED = ("compile", "trace")
PAIRS = [(case, check) for case in CASES for check in CHECKS]
FAST = [(case, check) for case, check in PAIRS if check not in COMPILED or case.name in LAST.values()]
SLOW = [pair for pair in PAIRS if pair not in FAST]


def label(value: Case | str) -> str:
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize("case, check", FAST, ids=label)
def test_contract(case: Case, check: str) -> None:
    if check in case.skip:
        pytest.skip(case.skip[check])
    case.check(check)


SMALL_BLOCKS = [
    ("scores", "CHUNK", 14),
    ("scores", "WIDEST", 3),
    ("softmax", "WIDEST", 3),
    ("row_blocks", "ENTRIES", 14),
    ("dot_product", "SHORTEST_BLOCK", 2),
    ("concatenation", "LEAF", 2),
    ("toeplitz", "SHORT", 0),
]
# a causal softmax states its cost in full, while small blocks leave out keys that none of their rows sees
IN_BLOCKS = [
    (case, check)
    for case in EXACT
    for check in ("values", "gradients", "broadcast", "strides", "cost")
    if type(case.operator()) in (Softmax, DotProduct, Concatenation, Toeplitz, ToeplitzSoftmax)
    and not (check == "cost" and type(case.operator()) is Softmax)
]


@pytest.mark.parametrize("case, check", IN_BLOCKS, ids=label)
def test_contract_in_blocks(case: Case, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with blocks so small that seven tokens take several: the paths that only long sequences meet."""
    for module, constant, value in SMALL_BLOCKS:
        # a package may export a builder under its module's name, so the module is looked up by its full one
        monkeypatch.setattr(importlib.import_module(f"headwise.operators.{module}"), constant, value)
    monkeypatch.setattr(Scores.chunks, "__defaults__", (14,))
    case.check(check)


def test_every_final_operator_has_a_case() -> None:
    missing = sorted(final_operators() - {type(case.operator()) for case in CASES}, key=lambda cls: cls.__name__)
    assert not missing, f"add a line to tests/operators/cases.py for {', '.join(cls.__name__ for cls in missing)}"


@pytest.mark.slow
@pytest.mark.parametrize("case, check", SLOW, ids=label)
def test_contract_of_every_variant(case: Case, check: str) -> None:
    test_contract(case, check)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in LAST.values()], ids=label)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor(case: Case) -> None:
    """torch's own compiler, which needs a C++ one: half a minute each."""
    if "compile" in case.skip:
        pytest.skip(case.skip["compile"])
    check_compile(case, "inductor")


def final_operators() -> set[type[AttentionOperator]]:
    """Every class in headwise.operators that is marked @final and is an operator."""
    for module in pkgutil.walk_packages(headwise.operators.__path__, "headwise.operators."):
        importlib.import_module(module.name)
    found, queue = set(), [AttentionOperator]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if cls.__module__.startswith("headwise.operators.") and getattr(cls, "__final__", False):
            found.add(cls)
    return found
