"""The rules that give a head its kind."""

from __future__ import annotations

import pytest

from headwise.examination.measure.head_kinds import HeadKind, describe, kind_of, low_rank
from headwise.examination.record import Mode

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
    assert found is not None
    assert found.name == kind
    assert set(change) <= set(found.evidence)


def test_a_rule_whose_measure_is_missing_does_not_decide() -> None:
    unknown = {name: x for name, x in HEAD.items() if name != "output_error_64"}
    assert kind_of(unknown, 512) is None
    assert kind_of(unknown, 512, ignore_rank=True) == HeadKind("dense", ("entropy_share",))
    assert kind_of({**unknown, "sink_mass": 0.4}, 512) == HeadKind("sink", ("sink_mass", "sink_position"))


def test_the_description_of_a_low_rank_head_names_rank_and_error() -> None:
    kind = HeadKind("low rank", ("output_error_64",))
    assert describe(kind, {"output_error_64": 0.047}, {}) == "rank 64 reproduces its output within 4.7 %"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode(3, 4, 4), "40% of its attention goes to token 3"),
        (Mode(3, 2, 4), "40% of its attention goes to one token, token 3 on 2 of 4 texts"),
        (Mode(3, 1, 4), "40% of its attention goes to one token, a different one on each text"),
    ],
)
def test_the_description_of_a_sink_says_how_many_texts_agree(mode: Mode, words: str) -> None:
    assert (
        describe(HeadKind("sink", ("sink_mass", "sink_position")), {"sink_mass": 0.4}, {"sink_position": mode}) == words
    )


@pytest.mark.parametrize(("n", "rank"), [(16, 8), (64, 8), (200, 16), (4096, 64)])
def test_low_means_at_most_an_eighth_of_the_text(n: int, rank: int) -> None:
    assert low_rank(n) == rank
