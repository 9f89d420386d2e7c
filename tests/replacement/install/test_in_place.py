"""Models of transformers, in place, that call scaled_dot_product_attention themselves, in all or in some layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise
from headwise.models.intercept import intercept
from headwise.operators import softmax
from headwise.replacement import Choice

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_falcon_with_windows_is_falcon_under_that_mask(padding: str) -> None:
    torch.manual_seed(0)
    config = transformers.FalconConfig(vocab_size=30, initializer_range=0.3, **SIZES)
    model = transformers.FalconForCausalLM(config).double().eval()
    ids, keep = torch.randint(30, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    keep[0, {"none": slice(0), "left": slice(4), "right": slice(8, None)}[padding]] = 0
    batch = {"input_ids": ids, "attention_mask": keep, "use_cache": False}
    before = model(**batch).logits

    def banded(site: str, attention: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        band = torch.ones(12, 12, dtype=torch.bool).tril().triu(-2) & keep.bool()[:, None, None]
        q, k, v = args
        return softmax(q, k.expand_as(q), pair_mask=band)(v.expand_as(q))

    with intercept(model, answer=banded):
        expected = model(**batch).logits
    with headwise.replace(model, "window", width=3) as receipt:
        found = model(**batch).logits
    assert len(receipt.known) == 2
    real = keep.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-10)
    assert (found - before)[real].abs().max() > 1e-3
    assert torch.equal(model(**batch).logits, before)


@torch.no_grad()
def test_a_layer_beside_those_of_the_interface_is_replaced_too() -> None:
    """The head of Aimv2 attends by torch's function, its blocks through the interface."""
    torch.manual_seed(0)
    config = transformers.Aimv2VisionConfig(image_size=8, patch_size=4, intermediate_size=24, **SIZES)
    model, x = transformers.Aimv2VisionModel(config).eval(), torch.randn(2, 3, 8, 8)
    calls: list[str] = []
    with intercept(model, lambda call: calls.append(call.site)):
        before = model(x).pooler_output
    with headwise.replace(model, {"head": Choice("uniform")}) as receipt:
        assert receipt.known == tuple(calls)
        assert (model(x).pooler_output - before).abs().max() > 1e-6
    assert torch.equal(model(x).pooler_output, before)
