"""Models of transformers, in place, that call scaled_dot_product_attention themselves, in all or in some layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise
from headwise.errors import UnsupportedError
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
def test_a_token_after_cached_keys_of_torch_is_told_from_cross_attention() -> None:
    """The call of torch's function does not say whether its single query belongs after the keys."""
    model = transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=30, **SIZES)).eval()
    ids, settings = torch.randint(30, (1, 8)), {"max_new_tokens": 2, "do_sample": False}
    with headwise.replace(model, "window", width=3):
        with pytest.raises(UnsupportedError, match=r"token after cached keys, call with use_cache=False; use softmax"):
            model.generate(ids, **settings)
        assert model.generate(ids, use_cache=False, **settings).shape == (1, 10)


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


def reads_masks() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Doge adds a mask of its own to that of each layer; T5Gemma2 joins those of the decoder and of the encoder."""
    sizes = {**SIZES, "intermediate_size": 24}
    text = {**sizes, "vocab_size": 30, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    encoder = transformers.T5Gemma2EncoderConfig(text_config=text, vision_config=vision)
    joint = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=28, eoi_token_index=29)
    doge = transformers.DogeConfig(**{**text, "head_dim": 8})
    ids = torch.arange(24).reshape(2, 12) + 1
    return {
        "doge": (transformers.DogeForCausalLM(doge), {"input_ids": ids}),
        "t5gemma2": (
            transformers.T5Gemma2ForConditionalGeneration(joint),
            {"input_ids": ids, "decoder_input_ids": ids[:, :7], "use_cache": False},
        ),
    }


@torch.no_grad()
@pytest.mark.parametrize("family", ["doge", "t5gemma2"])
def test_families_that_read_masks_see_whole_ones(family: str) -> None:
    torch.manual_seed(0)
    model, batch = reads_masks()[family]
    model = model.double().eval()
    batch = {**batch, "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    batch["attention_mask"][0, 8:] = 0
    before = model(**batch).logits
    with headwise.replace(model, "softmax"):
        torch.testing.assert_close(model(**batch).logits, before, rtol=0, atol=1e-10)
    with headwise.replace(model, "window", width=3), pytest.raises(UnsupportedError, match="self_attn: window width=3"):
        model(**batch)


@torch.no_grad()
def test_compiled_parts_read_the_padding_too() -> None:
    """The mask is made outside of them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=30, intermediate_size=24, **SIZES)
    model, ids = transformers.LlamaModel(config).eval(), torch.randint(30, (2, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones(2, 12, dtype=torch.long), "use_cache": False}
    batch["attention_mask"][0, 8:] = 0
    with headwise.replace(model, "window", width=3):
        expected = model(**batch).last_hidden_state
        for layer in model.layers:
            layer.compile(backend="eager")
        torch.testing.assert_close(model(**batch).last_hidden_state, expected)
