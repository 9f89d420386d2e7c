"""Every operator keeps the contract, in every variant listed in `cases`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import headwise
from headwise.operators._kernels import limits
from headwise.operators.base import AttentionOperator
from headwise.operators.concatenation import Concatenation
from headwise.operators.dot_product import DotProduct
from headwise.operators.relative.toeplitz import Toeplitz, ToeplitzSoftmax
from headwise.operators.similarity import Similarity
from headwise.operators.softmax import Softmax
from headwise.testing import CHECKS, Case
from headwise.testing.contract import check_compile, check_trace
from tests.operators.cases import CASES, EXACT

# Compiling takes most of the time.  The fast tier traces the last variant of each operator into one graph and runs that
# as it is; the slow tier lowers the graph of every variant too, and sends the last through torch's own compiler.
LAST = {type(case.operator()): case.name for case in CASES}
LASTS = [case for case in CASES if case.name in LAST.values()]
COMPILED = {"compile": check_compile, "trace": check_trace}


def label(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "name", "")


def unless_skipped(case: Case, check: str) -> None:
    if check in case.skip:
        pytest.skip(case.skip[check])


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in COMPILED])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_contract(case: Case, check: str) -> None:
    unless_skipped(case, check)
    case.check(check)


@pytest.mark.parametrize("check", COMPILED)
@pytest.mark.parametrize("case", LASTS, ids=label)
def test_contract_in_one_graph(case: Case, check: str) -> None:
    unless_skipped(case, check)
    COMPILED[check](case, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("check", COMPILED)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_contract_in_a_lowered_graph(case: Case, check: str) -> None:
    unless_skipped(case, check)
    COMPILED[check](case, "aot_eager")


SMALL_BLOCKS = {"SCORE_ENTRIES": 14, "MAX_COLUMNS": 3, "DIAGONAL_BLOCK": 2, "SHORT_TOEPLITZ": 0}
# a causal softmax states its cost in full, while small blocks leave out keys that none of their rows attends to
IN_BLOCKS = [
    (case, check)
    for case in EXACT
    for check in ("values", "gradients", "broadcast", "strides", "cost")
    if type(case.operator()) in (Softmax, DotProduct, Concatenation, Similarity, Toeplitz, ToeplitzSoftmax)
    and not (check == "cost" and type(case.operator()) is Softmax)
]


@pytest.mark.parametrize("case, check", IN_BLOCKS, ids=label)
def test_contract_in_blocks(case: Case, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with blocks so small that seven tokens take several: the paths that only long sequences meet."""
    for name, value in SMALL_BLOCKS.items():
        monkeypatch.setattr(limits, name, value)
    case.check(check)


def test_every_final_operator_has_a_case() -> None:
    missing = sorted(final_operators() - {type(case.operator()) for case in CASES}, key=lambda cls: cls.__name__)
    assert not missing, f"add a line to a case file in tests/operators for {', '.join(cls.__name__ for cls in missing)}"


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.parametrize("case", LASTS, ids=label)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor(case: Case) -> None:
    """torch's own compiler, which needs a C++ one: half a minute each."""
    unless_skipped(case, "compile")
    check_compile(case, "inductor")


def final_operators() -> set[type[AttentionOperator]]:
    """Every class of headwise that is marked @final and is an operator; those of several processes are tested there."""
    for module in pkgutil.walk_packages(headwise.__path__, "headwise."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    found, queue = set(), [AttentionOperator]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        ours = cls.__module__.startswith("headwise.") and not cls.__module__.startswith("headwise.distributed.")
        if ours and getattr(cls, "__final__", False):
            found.add(cls)
    return found
