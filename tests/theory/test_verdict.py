"""A verdict holds, fails or does not apply; and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from headwise.outputs import json_text
from headwise.theory import Verdict


def verdict(measured: float, bound: float, **premises: bool) -> Verdict:
    return Verdict("a <= b", "nowhere", measured, bound, premises)


@pytest.mark.parametrize(
    "measured, bound, holds",
    [
        (1.0, 2.0, True),
        (2.0, 1.0, False),
        (1.0, 1.0, True),
        (1.0 + 5e-10, 1.0, True),  # an attained bound may be missed by rounding
        (1.0 + 5e-9, 1.0, False),
        (-1.0, -2.0, False),
        (-2.0, -1.0, True),
        (-1.0 + 5e-10, -1.0, True),
        (0.0, 0.0, True),
        (1e-300, 0.0, False),
        (5.0, math.inf, True),
        (math.inf, 5.0, False),
        (-math.inf, -math.inf, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
    ],
)
def test_holds_when_measured_is_at_most_the_bound(measured: float, bound: float, holds: bool) -> None:
    assert verdict(measured, bound, real=True).holds is holds
    assert verdict(measured, bound).holds is holds


def test_a_theorem_does_not_apply_if_a_premise_fails() -> None:
    for measured in (0.0, 9.0):
        result = verdict(measured, 1.0, stochastic=True, finite=False)
        assert result.holds is None
        assert result.failed_premises == ("finite",)
        assert str(result) == "a <= b: does not apply, because not: finite"


def test_words_and_json() -> None:
    assert str(verdict(1.0, 2.0)) == "a <= b: holds, 1 against 2"
    assert str(verdict(3.0, 2.0)) == "a <= b: FAILS, 3 against 2"
    plain = json.loads(json_text(verdict(1.0, math.inf, real=True).to_json()))
    expected = {"measured": 1.0, "bound": None, "premises": {"real": True}, "holds": True}
    assert plain == {"claim": "a <= b", "source": "nowhere", **expected}


def test_it_is_a_value() -> None:
    premises = {"real": True}
    fixed = Verdict("a", "b", torch.tensor(1.0), torch.tensor(2.0), premises)  # pyright: ignore[reportArgumentType]
    premises["real"] = False
    assert fixed.holds is True
    assert type(fixed.measured) is float
    assert fixed == Verdict("a", "b", 1.0, 2.0, {"real": True})
    with pytest.raises(dataclasses.FrozenInstanceError):
        fixed.bound = 0.0  # pyright: ignore[reportAttributeAccessIssue]
