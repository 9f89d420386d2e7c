"""The rules that give a head its kind."""

from __future__ import annotations

import pytest

from headwise.examination.measure.head_kinds import kind_of, low_rank

HEAD = {
    "entropy_share": 0.5,
    "toeplitz_error": 0.9,
    "best_offset": -1.0,
    "best_offset_mass": 0.1,
    "sink_mass": 0.1,
    "sink_position": 0.0,
    "mass_within_16": 0.2,
    "output_error_64": 0.5,
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "dense"),
        ({"entropy_share": 0.98}, "uniform"),
        ({"best_offset_mass": 0.6}, "positional"),
        ({"toeplitz_error": 0.2}, "positional"),
        ({"sink_mass": 0.4}, "sink"),
        ({"mass_within_16": 0.6}, "local"),
        ({"output_error_64": 0.02}, "low rank"),
        ({"entropy_share": 0.8}, "broad"),
    ],
)
def test_each_rule_decides(change: dict[str, float], kind: str) -> None:
    found = kind_of({**HEAD, **change}, 512)
    assert found.name == kind
    assert found.description
    assert set(change) <= {*found.evidence, "sink_position"}


def test_the_description_of_a_low_rank_head_names_rank_and_error() -> None:
    found = kind_of({**HEAD, "output_error_64": 0.047}, 512)
    assert found.description == "rank 64 reproduces its output within 4.7 %"


@pytest.mark.parametrize(("n", "rank"), [(16, 8), (64, 8), (200, 16), (4096, 64)])
def test_low_means_at_most_an_eighth_of_the_text(n: int, rank: int) -> None:
    assert low_rank(n) == rank
