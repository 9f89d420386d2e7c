"""Comparing two examinations: no spread from one text, and what differs beside the model is said."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from scipy import stats

from headwise.errors import InputError
from headwise.examination import compare_examinations, examine
from headwise.examination.comparison import normal_deviate
from tests.examination.measured import examination, text
from tests.models.tiny_models import ALL, sharpen


def report(*sinks: float, n: int = 512, error: float | None = None, digest: str = "", **inputs: Any) -> dict[str, Any]:
    """The report of one head with these shares on one key, one for each text; `digest` stands for their contents."""
    spectrum = None if error is None else {"output_error_64": error}
    return examination(*(text(spectrum, n, digest, sink_mass=x) for x in sinks), **inputs).to_dict()


def test_one_text_each_gives_no_z() -> None:
    found = compare_examinations(report(0.1), report(0.2))
    (head,) = found.heads
    assert head.z is None
    assert (head.measure, head.texts_a, head.texts_b) == ("sink_mass", 1, 1)
    assert head.relative == pytest.approx(0.5)
    assert found.ranked_by == "relative"


def test_different_texts_are_compared_by_welch() -> None:
    """Against scipy's test, with the floor of 1 % added to its standard error."""
    a, b = [0.11, 0.15, 0.12, 0.18], [0.21, 0.25, 0.23]
    found = compare_examinations(report(*a, digest="x"), report(*b, digest="y"))
    expected = stats.ttest_ind(a, b, equal_var=False)
    error = (sum(b) / 3 - sum(a) / 4) / abs(expected.statistic)
    t = (sum(b) / 3 - sum(a) / 4) / math.hypot(error, 0.01 * sum(b) / 3)
    assert not found.paired
    assert found.heads[0].z == pytest.approx(normal_deviate(t, expected.df), rel=1e-4)


def test_the_same_texts_are_compared_in_pairs() -> None:
    """Every text moved by about 0.02 while texts differ by 0.1: a spread over texts would hide that."""
    a, b = [0.10, 0.15, 0.20, 0.25], [0.121, 0.169, 0.221, 0.269]
    apart = compare_examinations(report(*a, digest="x"), report(*b, digest="y"))
    paired = compare_examinations(report(*a, digest="x"), report(*b, digest="x"))
    assert paired.paired
    assert apart.heads[0].z is not None
    assert paired.heads[0].z is not None
    assert apart.heads[0].z < 1 < 2.5 < paired.heads[0].z


@pytest.mark.parametrize("df", [2, 3, 8, 30])
@pytest.mark.parametrize("t", [0.5, 2.0, 5.0])
def test_t_becomes_a_normal_deviate_of_the_same_probability(t: float, df: int) -> None:
    assert normal_deviate(t, df) == pytest.approx(stats.norm.isf(stats.t.sf(t, df)), abs=0.06)


def test_a_measure_of_one_text_is_not_ranked_among_the_others() -> None:
    a, b = (
        examination(text({"output_error_64": error}), *[text(sink_mass=x) for x in (0.1, 0.12)]).to_dict()
        for error in (0.1, 0.9)
    )
    found = compare_examinations(a, b)
    assert found.ranked_by == "z"
    assert found.unranked == ["output_error_64"]
    assert found.heads[0].measure != "output_error_64"


def test_other_lengths_are_said_and_marked() -> None:
    found = compare_examinations(report(0.1, 0.11), report(0.1, 0.12, n=256))
    assert "length: 512 and 256 tokens" in found.differs
    assert not found.heads[0].same_length
    same = compare_examinations(report(0.1, 0.11), report(0.1, 0.12))
    assert same.differs == []
    assert same.heads[0].same_length


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "random tokens"}, "kind of inputs: text and random tokens"),
        ({"source": ["b.txt"]}, "source: a.txt and b.txt"),
        ({"digest": "y"}, "contents of the inputs: "),
    ],
)
def test_other_inputs_are_said(change: dict[str, Any], words: str) -> None:
    common = {"source": ["a.txt"], "digest": "x"}
    found = compare_examinations(report(0.1, 0.11, **common), report(0.1, 0.12, **{**common, **change}))
    (difference,) = found.differs
    assert difference.startswith(words)


def test_other_settings_masks_and_numbers_of_texts_are_said() -> None:
    a, b = report(0.1, 0.11), report(0.1, 0.12, 0.13, error=0.2)
    b["provenance"].update(seed=7, spectra_every=4)
    b["sites"][0]["causal"] = True
    assert compare_examinations(a, b).differs == [
        "texts: 2 and 3",
        "texts with spectra: 0 and 3",
        "seed: 0 and 7",
        "spectra every: 1 and 4 batches",
        "causal masks: at layer.0 in one of them only",
    ]


def test_nothing_in_common_is_refused() -> None:
    a, b = report(0.1), report(0.2)
    for record in b["records"]:
        record["measures"] = {}
    with pytest.raises(InputError, match="no measure in common"):
        compare_examinations(a, b)


def test_unknown_numbers_are_no_difference() -> None:
    a, b = report(0.1, 0.2), report(0.1, 0.3)
    a["records"][0]["measures"]["sink_mass"]["mean"] = None
    head = compare_examinations(a, b).heads[0]
    assert head.measure != "sink_mass"
    json.dumps(compare_examinations(a, b).to_dict(), allow_nan=False)


def test_two_examinations_of_the_same_texts_are_paired() -> None:
    torch.manual_seed(0)
    model = sharpen(ALL["llama"]()[0])
    batches = [{"input_ids": torch.randint(99, (1, 24))} for _ in range(3)]
    before = examine(model, batches).to_dict()
    with torch.no_grad():
        model.layers[1].self_attn.q_proj.weight.mul_(4)
    after = examine(model, batches).to_dict()
    assert compare_examinations(before, after).paired
    other = examine(model, [{"input_ids": x["input_ids"].flip(1)} for x in batches]).to_dict()
    found = compare_examinations(before, other)
    assert not found.paired
    assert found.differs[0].startswith("contents of the inputs: ")
