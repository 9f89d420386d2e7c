"""Families of models from transformers against a dense float64 computation; `families` says how.

The table in docs/reference/families.md is written by `python -m tests.examination.families --write`.
"""

from __future__ import annotations

import pytest
import torch

from tests.examination.families import PAGE, Call, dense_measures, examine_families, families, in_a_process

SAMPLE = ["bert", "llama", "t5", "vit", "wav2vec2"]
CHUNKS = 12


def listed() -> dict[str, str]:
    """family -> outcome, from the page."""
    found, outcome = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            outcome = line.removeprefix("## ").partition(":")[0].lower()
        elif line.startswith("| ") and not line.startswith("| family"):
            found[line.split("|")[1].strip()] = outcome
    return found


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_equals_the_dense_computation(family: str) -> None:
    (found,) = examine_families([family])
    assert found.outcome == "seen", found
    assert found.sites >= 2
    assert found.error < 1e-4


def test_the_page_lists_nothing_wrong() -> None:
    outcomes = listed()
    assert [family for family, outcome in outcomes.items() if outcome == "wrong"] == []
    assert all(outcomes[family] == "seen" for family in SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_family_is_as_the_page_says(chunk: int) -> None:
    """Seen with the right numbers, or refused with a sentence; a family that this machine cannot build in time may be
    missing."""
    expected = listed()
    for found in in_a_process(sorted(families())[chunk::CHUNKS]):
        assert found.outcome != "wrong", found
        if "seconds" not in found.why:
            assert found.outcome == expected.get(found.family), found


def test_the_dense_computation_by_hand() -> None:
    """Two queries, two keys, P = [[1, 0], [1/2, 1/2]]."""
    zero = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    visible = torch.tensor([[True, False], [True, True]])[None, None]
    found, size = dense_measures(Call(zero, zero, zero + 1, 1.0, visible, torch.zeros(1, 1, 2, 2)), 0)
    assert size == (2, 2)
    expected = {"first_mass": 0.75, "previous_mass": 0.25, "diagonal_mass": 0.75, "frobenius": 1.5**0.5}
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value)
