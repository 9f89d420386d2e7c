"""The gradient searches behind the claims about rank collapse."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.ledger.rank_collapse import bound_gap, corrected_gap, doubled_step, entrywise_gap, triangle_gap


@pytest.mark.parametrize("gap", [triangle_gap, lambda: entrywise_gap(2, 1)], ids=["triangle", "step 9"])
def test_refutations_are_found_by_gradient_search(gap) -> None:
    """The worst case is a violation, and the same in every run."""
    found = gap()
    assert found.gap > 0
    assert gap().gap == found.gap
    assert all(torch.equal(a, b) for a, b in zip(gap().at, found.at, strict=True))


def test_searches_without_result_find_violations_of_a_stronger_inequality() -> None:
    assert -0.7 < corrected_gap(2, 1).gap < 0
    tight = bound_gap(1, 2, 1, 1, constant=4.0, starts=4, steps=150)
    assert tight.gap == pytest.approx(math.log(1 / 8), abs=0.02)  # two tokens of one number each
    proven = bound_gap(1, 2, 1, 1, starts=4, steps=150)
    assert proven.gap == pytest.approx(0.0, abs=0.02)  # attained: C = 1/2 for two tokens
    assert bound_gap(1, 2, 1, 1, constant=0.4, starts=4, steps=150).gap > 0


def test_the_factor_of_step_9_needs_its_premise() -> None:
    moved, doubled = doubled_step()
    assert moved == pytest.approx(0.517, abs=1e-3)
    assert doubled == pytest.approx(0.320, abs=1e-3)
    assert math.expm1(1.2564) < 2 * 1.2564 < math.expm1(1.2565) + 1e-3
    inside, allowed = doubled_step(score=1.25)
    assert inside <= allowed
