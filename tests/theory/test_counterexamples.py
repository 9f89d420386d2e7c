"""The search for violations of an inequality."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.theory.counterexamples import search


def test_search_finds_a_violation_where_there_is_one() -> None:
    """x <= x^2 fails between 0 and 1; x^2 <= 1 + x^2 nowhere."""
    draw = lambda g: (torch.rand(1, dtype=torch.float64, generator=g) + 0.9,)  # noqa: E731
    found = search(lambda x: x.log().sum(), lambda x: 2 * x.log().sum(), draw, starts=2, steps=50)
    assert found.gap > 0
    assert 0 < found.at[0].item() < 1
    again = search(lambda x: x.log().sum(), lambda x: 2 * x.log().sum(), draw, starts=2, steps=50)
    assert again.gap == found.gap
    assert torch.equal(again.at[0], found.at[0])
    none = search(lambda x: 2 * x.log().sum(), lambda x: (1 + x**2).log().sum(), draw, starts=2, steps=50)
    assert none.gap < 0
    with pytest.raises(HeadwiseError, match="none of 2 starts"):
        search(lambda x: (-x).log().sum(), lambda x: x.sum(), draw, starts=2, steps=2)


def test_a_start_that_becomes_nan_does_not_stop_the_others() -> None:
    draws = iter((-1.0, 0.5))
    found = search(
        lambda x: x.log().sum(),
        lambda x: 2 * x.log().sum(),
        lambda g: (torch.tensor([next(draws)], dtype=torch.float64),),
        starts=2,
        steps=20,
    )
    assert found.start == 1
    assert found.gap > math.log(2)
