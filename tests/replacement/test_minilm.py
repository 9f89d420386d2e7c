"""MiniLM: unchanged with softmax heads, equal to an explicit P with replaced ones, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.models.load import SAMPLES, load_model
from headwise.replacement import Choice, load
from tests.replacement.install.test_transformers_models import explicit_weights, shaken, states
from tests.replacement.plans import SMALL, plan_for

transformers = pytest.importorskip("transformers")
pytest.importorskip(SAMPLES["minilm"].module)

TEXTS = [
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of "
    "the world.",
    "There is nothing surprising in this.",
]


@pytest.fixture(scope="module")
def minilm() -> tuple[nn.Module, dict[str, Tensor]]:
    loaded = load_model("minilm")
    tokenizer = loaded.preprocessor(transformers.AutoTokenizer)
    return loaded.model, dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))


def test_softmax_everywhere_is_the_original_model(minilm) -> None:
    model, batch = minilm
    new, receipt = headwise.rewrite(model, plan_for(model, batch, [Choice("softmax")], length=512))
    keep = batch["attention_mask"].bool()
    torch.testing.assert_close(states(new, batch)[keep], states(model, batch)[keep], rtol=1e-5, atol=1e-6)
    assert receipt.largest_change <= 1e-5
    assert receipt.cost_before.multiply_adds == 6 * 12 * 2 * 512 * 512 * 32


def test_padding_has_no_effect_and_files_are_bit_for_bit(minilm, tmp_path: Path) -> None:
    model, batch = minilm
    some = [
        Choice("window", {"width": 9, "leading": 1}),
        Choice("softmax"),
        Choice("toeplitz"),
        Choice("window_low_rank"),
    ]
    new = shaken(headwise.rewrite(model, plan_for(model, batch, some, length=512))[0])
    keep = batch["attention_mask"].bool()
    alone = {name: x[1:, keep[1]] for name, x in batch.items()}
    torch.testing.assert_close(states(new, batch)[1, keep[1]], states(new, alone)[0], rtol=1e-4, atol=1e-5)
    new.save_pretrained(tmp_path)
    assert torch.equal(states(load(tmp_path), batch), states(new, batch))


@pytest.mark.slow
@pytest.mark.parametrize("choice", SMALL, ids=str)
def test_each_kind_equals_the_model_with_explicit_weights(minilm, choice: Choice) -> None:
    model, batch = minilm
    keep = batch["attention_mask"].bool()
    new = shaken(headwise.rewrite(model, plan_for(model, batch, [choice], length=64))[0]).double()
    found = states(new, batch)
    with explicit_weights(keep):
        new.set_attn_implementation("explicit")
        expected = states(new, batch)
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-5, atol=1e-7)
