"""The rules that give a head its kind."""

from __future__ import annotations

import pytest
import torch

from headwise.examination import examine
from headwise.examination.measure.head_kinds import HeadKind, describe, kind_of, low_rank
from headwise.examination.record import Mode
from tests.examination.measure import planted_heads

HEAD = {
    "entropy_share": 0.5,
    "toeplitz_error": 0.9,
    "best_offset": -1.0,
    "best_offset_mass": 0.1,
    "sink_mass": 0.1,
    "sink_position": 0.0,
    "mass_within_16": 0.2,
    "distant_mass": 0.5,
    "distant_chance": 0.56,
    "visible_share": 1.0,
    "row_maximum": 0.4,
    "output_error_64": 0.5,
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "dense"),
        ({"induction_score": 0.6}, "induction"),
        ({"induction_mass": 0.6, "induction_chance": 0.05}, "induction"),
        ({"duplicate_score": 0.6, "sink_mass": 0.8}, "duplicate token"),
        ({"entropy_share": 0.98}, "uniform"),
        ({"best_offset_mass": 0.6}, "positional"),
        ({"toeplitz_error": 0.2}, "positional"),
        ({"delimiter_mass": 0.6, "delimiter_chance": 0.1}, "delimiter"),
        ({"sink_mass": 0.4}, "sink"),
        ({"mass_within_16": 0.6, "distant_mass": 0.2}, "local"),
        ({"entropy_share": 0.99, "visible_share": 0.2, "distant_mass": 0.0, "toeplitz_error": 0.1}, "local"),
        ({"distant_mass": 0.9, "row_maximum": 0.8}, "retrieval"),
        ({"output_error_64": 0.02}, "low rank"),
        ({"entropy_share": 0.8}, "broad"),
    ],
)
def test_each_rule_decides(change: dict[str, float], kind: str) -> None:
    found = kind_of({**HEAD, **change}, 512)
    assert found is not None
    assert found.name == kind
    assert set(found.evidence) & set(change) or kind == "dense"


@pytest.mark.parametrize(
    ("change", "not_this"),
    [
        ({"induction_mass": 0.6, "induction_chance": 0.3}, "induction"),  # hardly above an average
        ({"induction_mass": 0.9, "induction_chance": 0.1, "induction_score": 0.1}, "induction"),  # the text is periodic
        ({"delimiter_mass": 0.6, "delimiter_chance": 0.4}, "delimiter"),  # a text of punctuation
        ({"delimiter_mass": 0.6, "delimiter_chance": 0.1, "sink_mass": 0.5}, "delimiter"),  # one special token
        ({"mass_within_16": 0.9}, "local"),  # a text of 20 tokens, nearly all of which are within 16
        ({"entropy_share": 0.99, "visible_share": 0.2, "distant_mass": 0.0}, "uniform"),  # a window
        ({"distant_mass": 0.9, "row_maximum": 0.8, "sink_mass": 0.4}, "retrieval"),  # a sink is far from most queries
    ],
)
def test_a_rule_does_not_decide(change: dict[str, float], not_this: str) -> None:
    found = kind_of({**HEAD, **change}, 512)
    assert found is not None
    assert found.name != not_this


PLANTED = {
    planted_heads.induction: ("induction", "sink"),
    planted_heads.duplicate: ("duplicate token", None),
    planted_heads.delimiter: ("delimiter", None),
    planted_heads.sink: ("sink", None),
    planted_heads.previous: ("positional", "previous token"),
    planted_heads.toeplitz: ("positional", "near"),
    planted_heads.uniform: ("uniform", None),
    planted_heads.local: ("local", None),
    planted_heads.retrieval: ("retrieval", None),
    planted_heads.broad: ("broad", None),
    planted_heads.low_rank: ("low rank", None),
    planted_heads.dense: ("dense", None),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_head_is_recognised(planted: planted_heads.Scores) -> None:
    kind, trait = PLANTED[planted]
    batches = [{"input_ids": planted_heads.text(seed=seed)} for seed in range(2)]
    model = planted_heads.Planted(planted)
    (record,) = examine(model, batches, token_names=planted_heads.names, spectra_every=1).records
    assert record.kind == kind
    assert record.stability == 1
    assert trait is None or trait in record.traits
    assert kind not in record.traits


@pytest.mark.parametrize("width", [4, 16, 40])
def test_a_window_that_the_mask_shows_is_local(width: int) -> None:
    model = planted_heads.Planted(planted_heads.uniform, mask=planted_heads.window(width))
    (record,) = examine(model, [{"input_ids": planted_heads.text()}]).records
    assert record.kind == "local"
    assert record.description.startswith("averages over the window that its mask shows")


@pytest.mark.parametrize("n", [24, 64])
def test_on_a_short_text_a_dense_head_is_not_local(n: int) -> None:
    """At 24 tokens, 16 tokens to each side are nearly all of them."""
    (record,) = examine(planted_heads.Planted(planted_heads.dense), [{"input_ids": planted_heads.text(n)}]).records
    assert record.kind != "local"


def test_a_head_that_attends_before_a_duplicate_has_that_trait() -> None:
    model = planted_heads.Planted(planted_heads.previous_of_duplicate)
    (record,) = examine(model, [{"input_ids": planted_heads.text()}]).records
    assert "previous of duplicate" in record.traits
    assert record.measures["previous_of_duplicate_score"].mean > 0.9
    assert record.measures["induction_score"].mean < 0.1


def test_an_induction_head_that_rests_on_a_sink_says_so() -> None:
    model = planted_heads.Planted(planted_heads.induction)
    (record,) = examine(model, [{"input_ids": planted_heads.text()}]).records
    first, second = record.description.split("; ")
    assert first == "attends to what followed its token earlier (100% of its weight on random tokens repeated twice)"
    assert second.startswith("on these texts 3")
    assert second.endswith("% of its attention goes to one token")


def test_induction_on_a_periodic_text_is_told_from_a_fixed_offset() -> None:
    """With a period of 48 both attend to the token 47 before; on other repeated tokens only one of them does."""
    text = {"input_ids": planted_heads.text(48).repeat(1, 2)}

    def offset(ids: torch.Tensor) -> torch.Tensor:
        return 20 * torch.eye(len(ids)).roll(47, dims=0)

    (induction,) = examine(planted_heads.Planted(planted_heads.induction), [text]).records
    (positional,) = examine(planted_heads.Planted(offset), [text]).records
    assert (induction.kind, positional.kind) == ("induction", "positional")


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
