"""Plans by whole layers, written as an architecture of transformers with sliding layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
from headwise.errors import UnsupportedError
from headwise.replacement import Choice
from headwise.replacement.install.stock_models import stock_model
from tests.replacement.install.test_head_cache import learned_positions, sliding_layers
from tests.replacement.install.test_transformers_models import SOFTMAX, causal_lm, ids
from tests.replacement.plans import plan_for

transformers = pytest.importorskip("transformers")
WINDOW = Choice("window", {"width": 9})


def rewritten(model: nn.Module, *layers: list[Choice]) -> nn.Module:
    plan = plan_for(model, {"input_ids": ids(1, 5)}, [SOFTMAX], length=64)
    sites = {site: list(row) for site, row in zip(plan.sites, layers, strict=True)}
    return headwise.rewrite(model, replace(plan, sites=sites), probe={"input_ids": ids(1, 5)})[0]


def qwen() -> nn.Module:
    config = {**sliding_layers().config.to_dict(), "layer_types": ["full_attention"] * 4, "use_sliding_window": False}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**config, "sliding_window": None})).eval()


@pytest.mark.parametrize("make, name", [(causal_lm, "MinistralForCausalLM"), (qwen, "Qwen2ForCausalLM")])
def test_it_is_loaded_without_headwise(make, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    layers = model.config.num_hidden_layers
    new = rewritten(model, *([SOFTMAX] * 4, [WINDOW] * 4) * (layers // 2))
    stock_model(model, new).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == name
    assert "headwise" not in (tmp_path / "config.json").read_text()
    assert again.config.layer_types == ["full_attention", "sliding_attention"] * (layers // 2)
    tokens = ids(1, 60)
    with torch.no_grad():
        found, expected, before = (each(tokens, use_cache=False).logits for each in (again, new, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (before - expected).abs().max() > 1e-3
    options = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(again.generate(tokens[:, :30], **options), new.generate(tokens[:, :30], **options))


REFUSED = {
    "heads": ([[SOFTMAX, WINDOW] * 2, [SOFTMAX] * 4], r"one operator for all heads .* softmax and window width=9"),
    "leading": (
        [[SOFTMAX] * 4, [Choice("window", {"width": 9, "leading": 1})] * 4],
        r"without leading keys, .* leading=1",
    ),
    "widths": ([[WINDOW] * 4, [Choice("window", {"width": 5})] * 4], r"windows of one width, but the widths are: 5, 9"),
    "nothing": ([[SOFTMAX] * 4] * 2, r"the widths are: none"),
    "kind": ([[SOFTMAX] * 4, [Choice("uniform")] * 4], r"knows softmax and causal windows .* has uniform"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_stock_form_is_refused(case: str) -> None:
    layers, message = REFUSED[case]
    model = causal_lm()
    with pytest.raises(UnsupportedError, match=message):
        stock_model(model, rewritten(model, *layers))


def test_families_without_a_twin() -> None:
    model = learned_positions()
    with pytest.raises(UnsupportedError, match="no class of transformers is GPT2LMHeadModel with sliding layers"):
        stock_model(model, rewritten(model, [WINDOW] * 4, [WINDOW] * 4))
    biased = causal_lm(attention_bias=True)  # which Ministral has not
    with pytest.raises(
        UnsupportedError, match=r"MinistralForCausalLM and LlamaForCausalLM differ in the tensor .*bias"
    ):
        stock_model(biased, rewritten(biased, [WINDOW] * 4, [WINDOW] * 4))
