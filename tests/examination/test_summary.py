"""What an examination says about many texts: every number with the number of texts it comes from."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
import torch

from headwise.examination import Record, examine, with_advice
from headwise.examination.measure.observe import Measurement
from headwise.examination.record import Mode
from headwise.models.inputs import IMAGE_WORDS
from tests.examination.measured import examination, text
from tests.models.tiny_models import ALL, sharpen

SINK = {"sink_mass": 0.6}
SHIFT = {"best_offset_mass": 0.8}
LOW, HIGH = {"output_error_64": 0.01}, {"output_error_64": 0.5}


def record(*texts: Measurement) -> Record:
    (found,) = examination(*texts).records
    return found


def test_a_text_without_spectra_is_not_counted_as_low_rank() -> None:
    found = record(text(LOW), text(), text(), text(LOW))
    assert found.kind == "low rank"
    assert found.kind_counts == {"low rank": 2}
    assert found.judged == 2
    assert found.stability == 1


def test_a_text_that_needs_no_spectrum_is_judged_without_one() -> None:
    found = record(text(HIGH, **SINK), text(**SINK), text(**SINK), text(mass_within_16=0.7, distant_mass=0.1))
    assert found.kind == "sink"
    assert found.kind_counts == {"sink": 3, "local": 1}
    assert found.judged == 4
    assert found.stability == 0.75


def test_texts_left_unjudged_count_like_the_judged_ones_of_their_sort() -> None:
    """Three of seven texts are sinks; of the four others one has a spectrum, and it is low rank."""
    found = record(text(LOW), text(), text(), text(), *[text(**SINK)] * 3)
    assert found.kind_counts == {"low rank": 1, "sink": 3}
    assert found.judged == 4
    assert found.kind == "low rank"
    assert found.stability == pytest.approx(4 / 7)


def test_without_any_spectrum_the_rank_is_said_to_be_unknown() -> None:
    found = examination(text(), text())
    assert found.records[0].kind == "dense"
    assert found.records[0].judged == 2
    assert any("No spectra were taken" in line for line in found.headline)


def test_a_kind_judged_on_one_text_has_no_stability() -> None:
    assert math.isnan(record(text(LOW), text(), text()).stability)
    assert examination(text(LOW)).to_dict()["records"][0]["stability"] is None


def test_one_text_has_no_spread() -> None:
    facts = examination(text(LOW), text(), text()).to_dict()["records"][0]["measures"]
    assert facts["output_error_64"] == {"mean": 0.01, "std": None, "min": 0.01, "max": 0.01, "texts": 1}
    assert facts["sink_mass"]["std"] == pytest.approx(0, abs=1e-12)


def test_the_spread_is_the_sample_standard_deviation() -> None:
    values = [0.1, 0.15, 0.25]
    (found,) = examination(*(text(sink_mass=x) for x in values)).records
    assert found.measures["sink_mass"].std == pytest.approx(statistics.stdev(values))


def test_a_measure_that_some_texts_lack_counts_the_others() -> None:
    found = record(text(contribution=math.nan), text(contribution=3.0), text(contribution=5.0))
    assert (found.measures["contribution"].mean, found.measures["contribution"].texts) == (4, 2)


def test_positions_are_not_averaged() -> None:
    found = record(*(text(**SINK, sink_position=at) for at in (0.0, 200.0, 0.0, 0.0)))
    assert "sink_position" not in found.measures
    assert found.modes["sink_position"] == Mode(0, 3, 4)
    assert found.description == "60% of its attention goes to one token, token 0 on 3 of 4 texts"
    assert found.evidence["sink_position"] == 0


def test_offsets_are_not_averaged() -> None:
    found = record(*(text(**SHIFT, best_offset=at) for at in (-1.0, -1.0, 5.0)))
    assert found.description == "attends to one offset (80% of its weight), the previous token on 2 of 3 texts"
    found = record(*(text(**SHIFT, best_offset=at) for at in (-1.0, 7.0)))
    assert found.description == "attends to one offset (80% of its weight), a different one on each text"


def test_an_agreed_position_is_said_plainly() -> None:
    assert record(text(**SINK), text(**SINK)).description == "60% of its attention goes to token 0"
    assert record(text(**SHIFT)).description == "attends to the previous token (80% of its weight)"


def test_a_description_is_about_the_texts_of_that_kind() -> None:
    found = record(text(sink_mass=0.9), text(sink_mass=0.7), text(sink_mass=0.05, mass_within_16=0.9, distant_mass=0.1))
    assert found.description == "80% of its attention goes to token 0"
    assert found.evidence_texts == 2


@pytest.mark.parametrize("lengths", [(512, 512), (80, 512)])
def test_the_headline_names_texts_and_lengths(lengths: tuple[int, int]) -> None:
    found = examination(*(text(LOW, n=n) for n in lengths))
    words = "512 tokens" if lengths[0] == 512 else "80 to 512 tokens"
    assert found.headline[0].startswith(f"1 head, judged on 2 texts of {words}: ")
    assert (found.sites[0]["shortest"], found.sites[0]["longest"]) == lengths


def test_the_headline_says_where_few_texts_have_spectra() -> None:
    found = examination(text(LOW), text(), text())
    assert "The kind of 1 head depends on spectra, which 1 of 3 texts have." in found.headline
    assert found.inputs["spectra_exact"] is True


def test_the_headline_says_whether_spectra_are_exact() -> None:
    spectrum = {**LOW, "effective_rank": 20.0}
    exact = examination(text(spectrum), text(spectrum))
    assert "Effective ranks (mean over 2 texts, exact) range from 20 to 20" in " ".join(exact.headline)
    rough = examination(replace(text({**spectrum, "effective_rank_error": 0.6}), spectra_exact=False))
    assert "Effective ranks (of one text, estimated within 3%)" in " ".join(rough.headline)
    assert rough.inputs["spectra_exact"] is False


def test_a_real_examination_counts_no_text_without_spectra() -> None:
    """The values that a comparison pairs are there for every text on which they were measured."""
    torch.manual_seed(0)
    batches = [{"input_ids": torch.randint(99, (1, 40))} for _ in range(5)]
    found = examine(sharpen(ALL["gpt2"]()[0]), batches, spectra_every=3)
    for head in found.records:
        assert head.judged == sum(head.kind_counts.values()) <= 5
        assert len(head.by_text["entropy"]) == head.measures["entropy"].texts == 5
        assert len(head.by_text["effective_rank"]) == head.measures["effective_rank"].texts == 2
    json.loads(found.to_json(), parse_constant=lambda x: pytest.fail(f"{x} in the JSON"))


def test_images_are_called_so() -> None:
    images = examination(text(LOW, n=197), text(LOW, n=197), kind="images", words=IMAGE_WORDS)
    assert images.headline[0].startswith("1 head, judged on 2 images of 197 patches: ")
    assert "Nothing stands out on these images of 197 patches" in with_advice(images).advice[0]["text"]


def test_a_trait_holds_on_half_of_the_texts() -> None:
    near = {"distant_mass": 0.1}
    assert record(text(**SINK, **near), text(**SINK)).traits == ["near"]
    assert record(text(**SINK, **near), text(**SINK), text(**SINK)).traits == []
    # a rank is a trait on half of the texts that have a spectrum
    assert record(text(LOW, **SINK), text(HIGH, **SINK), text(**SINK), text(**SINK)).traits == ["low rank"]
    assert record(text(**SINK), text(HIGH, **SINK)).traits == []


def test_a_score_on_repeated_tokens_counts_on_every_text() -> None:
    """It was measured beside the first text only."""
    found = record(text(induction_score=0.8), text(**SINK), text(**SINK))
    assert (found.kind, found.stability, found.traits) == ("induction", 1, ["sink"])
    assert found.measures["induction_score"].texts == 1
