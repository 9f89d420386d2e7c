"""Advice comes from planted facts, names the heads, and says nothing where nothing stands out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwise.examination import Examination, Record, Statistic, examine, with_advice, with_importance
from tests.examination.measure import planted_heads
from tests.examination.measured import examination, text
from tests.models.tiny_models import ALL, sharpen

HEADS = 4


def planned(*changes: dict[str, float], n: int = 512, command: str = "", **fields) -> Examination:
    """One site of four heads with the measures of `HEAD`, changed head by head."""
    one = examination(text(n=n, contribution=1.0, frobenius=8.0, first_mass=0.0, largest_score=20.0))
    records = []
    for head in range(HEADS):
        change = changes[head] if head < len(changes) else {}
        measures = {k: Statistic(v, v, v, v, 1) for k, v in change.items()}
        records.append(replace(one.records[0], head=head, measures={**one.records[0].measures, **measures}))
    made = {"command": command}
    cosines = [[1.0 if i == j else 0.1 for j in range(HEADS)] for i in range(HEADS)]
    return with_advice(replace(one, records=records, provenance=made, **{"redundancy": cosines, **fields}))


def topics(found: Examination) -> list[str]:
    return [piece["topic"] for piece in found.advice]


def test_nothing_stands_out() -> None:
    found = planned()
    assert topics(found) == ["nothing stands out"]
    assert "512 tokens" in found.advice[0]["text"]
    assert found.advice[0]["heads"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"best_offset_mass": 0.95}, "1 by one offset"),
        ({"mass_within_16": 0.95}, "1 by a window of ±16"),
        ({"mass_within_16": 0.5, "first_mass": 0.49}, "1 by a window of ±16 and the first key"),
        ({"mass_within_64": 0.95}, "1 by a window of ±64"),
        ({"entropy_share": 0.995}, "1 by an average"),
        ({"toeplitz_error": 0.1}, "1 by a profile over offsets"),
        ({"output_error_64": 0.02}, "1 by rank 64"),
    ],
)
def test_a_head_that_a_cheap_operator_would_replace(change: dict[str, float], words: str) -> None:
    found = planned({}, {}, change, command="headwise examine bert-base --texts 4")
    (piece,) = found.advice
    assert piece["topic"] == "cheap operators"
    assert f"1 of 4 heads look replaceable by cheaper operators: {words}." in piece["text"]
    assert piece["heads"] == [[0, 2]]
    assert piece["command"] == "headwise plan bert-base --length 512"
    assert "Candidates" in piece["text"]


def test_the_saving_is_the_share_of_multiply_adds() -> None:
    """Two of four heads by windows of 33 of 512 keys leave (2 + 2 * 33 / 512) / 4 = 53 %."""
    found = planned({"mass_within_16": 0.95}, {"mass_within_16": 0.95})
    assert "about 53% of its multiply-adds" in found.advice[0]["text"]


def test_commands_are_for_models_named_on_the_command_line() -> None:
    change = {"mass_within_16": 0.95}
    assert planned(change).advice[0]["command"] is None
    assert planned(change, command="headwise examine --texts 4").advice[0]["command"] == "headwise plan --length 512"


def test_a_rank_is_no_candidate_in_a_decoder_nor_a_wide_window_in_a_short_text() -> None:
    found = planned({"output_error_64": 0.01})
    causal = with_advice(replace(found, sites=[{**found.sites[0], "causal": True}]))
    assert topics(causal) == ["nothing stands out"]
    assert topics(planned({"mass_within_16": 0.99}, n=40)) == ["nothing stands out"]


def test_offsets_between_two_sequences_are_no_evidence() -> None:
    found = planned({"best_offset_mass": 0.95})
    assert topics(with_advice(replace(found, sites=[{**found.sites[0], "kind": "cross"}]))) == ["nothing stands out"]


def test_an_induction_head_on_a_sink_is_not_called_replaceable() -> None:
    found = planned({"mass_within_16": 0.3, "first_mass": 0.69})
    assert topics(found) == ["cheap operators"]
    induction: list[Record] = [replace(record, kind="induction") for record in found.records]
    assert topics(with_advice(replace(found, records=induction))) == ["nothing stands out"]


def test_heads_that_add_next_to_nothing() -> None:
    found = planned({"contribution": 0.02}, {"contribution": 0.11, "sink_mass": 0.95})  # the median is 0.555
    (piece,) = found.advice
    assert piece["topic"] == "idle heads"
    assert piece["heads"] == [[0, 0], [0, 1]]
    assert "2 heads add at most 20% of what the median head of the layer adds" in piece["text"]
    assert "Candidates for removal" in piece["text"]
    assert topics(planned({"contribution": 0.11}, {"contribution": 0.3, "sink_mass": 0.95})) == ["nothing stands out"]


def test_duplicates_of_one_layer_only_and_not_of_averages() -> None:
    cosines = [[1.0, 0.97, 0.1, 0.1], [0.97, 1.0, 0.1, 0.1], [0.1, 0.1, 1.0, 0.99], [0.1, 0.1, 0.99, 1.0]]
    found = planned(redundancy=cosines)
    (piece,) = found.advice
    assert piece["topic"] == "duplicate heads"
    assert "2 pairs of heads" in piece["text"]
    assert "layer 0 head 2 and 3 (0.99), layer 0 head 0 and 1 (0.97)" in piece["text"]
    averages = planned({"frobenius": 1.1}, {}, {"sink_mass": 0.8}, redundancy=cosines)
    assert "duplicate heads" not in topics(averages)


def test_scores_that_half_precision_rounds() -> None:
    found = planned({"largest_score": 300.0}, {"largest_score": 100.0}, {"largest_score": 5000.0})
    (piece,) = found.advice
    assert piece["heads"] == [[0, 2], [0, 0]]
    assert "2 heads exceeds 256 (up to 5000; layer 0 head 2, layer 0 head 0)" in piece["text"]
    assert "off by up to 16, which changes weights by a factor of up to e^16; float16 ends at 65504" in piece["text"]
    scores = torch.linspace(4100, 8000, 1000)
    assert 15 < (scores.bfloat16().float() - scores).abs().max() <= 16


def test_layers_in_which_tokens_become_equal() -> None:
    layers = {"names": ["in", "layer.0", "layer.1"], "relative_residual": [0.9, 0.5, 0.1]}
    found = planned(layers=layers, sites=[{**planned().sites[0], "block": "layer.1"}])
    (piece,) = found.advice
    assert piece["topic"] == "tokens collapse"
    assert "After layer.1 the tokens are nearly equal: the relative residual falls from 0.50 to 0.10" in piece["text"]
    assert len(piece["heads"]) == HEADS


def test_attention_that_was_not_measured_comes_first() -> None:
    found = planned({"mass_within_16": 0.95}, unseen=[{"name": "trunk.3", "class": "Attention", "why": "by hand"}])
    assert topics(found) == ["not measured", "cheap operators"]
    assert "1 module that may attend was not measured: trunk.3 (Attention)." in found.advice[0]["text"]


def test_a_planted_idle_head_is_found_by_its_importance() -> None:
    """The output projection of one head is zero: whatever it attends to, the answer does not depend on it."""
    model, batch = ALL["bert"]()
    model = sharpen(model, 1000)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.output.dense.weight.mul_(50)
        model.encoder.layer[1].attention.output.dense.weight[:, 8:16] = 0
    examined = examine(model, [batch])
    by_contribution = next(x for x in examined.advice if x["topic"] == "idle heads")
    assert by_contribution["heads"] == [[1, 1]]
    piece = next(x for x in with_importance(examined, model, [batch]).advice if x["topic"] == "idle heads")
    assert piece["heads"] == [[1, 1]]
    assert "changes by at most 0.00% on one text (layer 1 head 1)" in piece["text"]


def test_an_idle_induction_head_is_kept() -> None:
    """It does nothing on texts without repetitions, which says nothing of others."""
    found = planned({"importance": 0.001}, {"importance": 0.002}, {"importance": 0.1}, {"importance": 0.1})
    (piece,) = found.advice
    assert piece["heads"] == [[0, 0], [0, 1]]
    records = [replace(r, kind="induction") if r.head == 0 else r for r in found.records]
    (piece,) = with_advice(replace(found, records=records)).advice
    assert piece["heads"] == [[0, 1]]
    assert "Not counted: layer 0 head 0, that follows repeated tokens" in piece["text"]


def test_planted_heads_get_the_operator_that_fits() -> None:
    batches = [{"input_ids": planted_heads.text(256)}]
    cases = [(planted_heads.previous, "one offset"), (planted_heads.uniform, "an average")]
    for planted, operator in [*cases, (planted_heads.local, "a window of ±16")]:
        (piece,) = examine(planted_heads.Planted(planted), batches).advice
        assert f"1 of 1 head look replaceable by cheaper operators: 1 by {operator}." in piece["text"]
    (piece,) = examine(planted_heads.Planted(planted_heads.dense), batches).advice
    assert piece["topic"] == "nothing stands out"
