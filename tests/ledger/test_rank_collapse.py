"""The gradient searches behind the claims about rank collapse."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.ledger.rank_collapse import bound_gap, corrected_gap, entrywise_gap, triangle_gap


@pytest.mark.parametrize("gap", [triangle_gap, lambda: entrywise_gap(2, 1)], ids=["triangle", "step 9"])
def test_refutations_are_found_by_gradient_search(gap) -> None:
    """The worst case is a violation, and the same in every run."""
    found = gap()
    assert found.gap > 0
    assert gap().gap == found.gap
    assert all(torch.equal(a, b) for a, b in zip(gap().at, found.at, strict=True))


def test_searches_without_result_find_violations_of_a_stronger_inequality() -> None:
    assert corrected_gap(2, 1).gap == pytest.approx(math.log(1 / 4), abs=0.01)  # with 2D / 4 it is attained
    tight = bound_gap(1, 2, 1, 1, starts=4, steps=150)
    assert tight.gap == pytest.approx(math.log(1 / 8), abs=0.02)  # two tokens of one number each
    assert bound_gap(1, 2, 1, 1, constant=0.4, starts=4, steps=150).gap > 0
