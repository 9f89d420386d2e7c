"""Families of transformers that have only eager attention, replaced and narrowed: their masks say what is causal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.errors import UnsupportedError
from headwise.models.intercept import InterceptionError
from headwise.models.pretrained.attention_functions import supports_sdpa
from headwise.replacement import Choice
from headwise.replacement.install.sharded_attention import sequence_parallel_model

pytest.importorskip("transformers")


def translator() -> tuple[Any, dict[str, Tensor]]:
    """Its decoder's attention says that it is not causal; one text is padded."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    torch.manual_seed(0)
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "sparse_step")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    config = NllbMoeConfig(
        vocab_size=60, d_model=32, encoder_ffn_dim=40, decoder_ffn_dim=40, num_experts=2, expert_capacity=64,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        init_std=0.3, **layers, **heads,
    )  # fmt: skip
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[1, 8:] = 0
    ids, earlier = torch.randint(3, 60, (2, 12)), torch.randint(3, 60, (2, 9))
    return (
        NllbMoeForConditionalGeneration(config).double().eval(),
        {"input_ids": ids, "attention_mask": keep, "decoder_input_ids": earlier},
    )


def captioner() -> tuple[Any, dict[str, Tensor]]:
    """Its images are read through the interface, its text by attention written by hand."""
    from transformers import GitConfig, GitModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = GitConfig(vision_config=vision, vocab_size=50, max_position_embeddings=40, initializer_range=0.3, **sizes)
    batch = {"input_ids": torch.randint(3, 50, (2, 9)), "pixel_values": torch.randn(2, 3, 8, 8).double()}
    return GitModel(config).double().eval(), batch


@torch.no_grad()
@pytest.mark.parametrize("build", [translator, captioner])
def test_softmax_in_the_place_of_eager_attention_changes_nothing(build: Any) -> None:
    model, batch = build()
    assert not supports_sdpa(model)
    before = model(**batch)[0]
    with headwise.replace(model, Choice("softmax")):
        torch.testing.assert_close(model(**batch)[0], before, rtol=0, atol=1e-5)  # eager softmax may be in float32
    assert torch.equal(model(**batch)[0], before)


@torch.no_grad()
def test_a_decoder_stays_causal_and_decodes_with_a_cache() -> None:
    model, batch = translator()
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "attention_mask": batch["attention_mask"]}
    with headwise.replace(model, {"model.decoder.layers.*.self_attn": Choice("window", {"width": 3})}):
        texts = [model.generate(batch["input_ids"], use_cache=use, **settings) for use in (True, False)]
        before = model(**batch).logits
        batch["decoder_input_ids"][:, 6:] = 7
        torch.testing.assert_close(model(**batch).logits[:, :6], before[:, :6], rtol=0, atol=1e-10)
    assert torch.equal(*texts)


def test_narrowed_heads_stay_causal(tmp_path: Path) -> None:
    """With nearly all dimensions kept, the output nearly stays; as if all keys were seen, it would change by 6."""
    model, batch = translator()
    narrow, _ = headwise.shrink(model, [batch] * 2, keep=0.999)
    assert isinstance(narrow, torch.nn.Module)
    narrow.save_pretrained(tmp_path)  # type: ignore[operator]
    from transformers import AutoModelForSeq2SeqLM

    with torch.no_grad():
        before = model(**batch).logits
        for each in (narrow, AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)):
            assert (each(**batch).logits - before).abs().max() < 1
            later = {**batch, "decoder_input_ids": batch["decoder_input_ids"].clone()}
            later["decoder_input_ids"][:, 6:] = 7
            same = each(**later).logits[:, :6]
            torch.testing.assert_close(same, each(**batch).logits[:, :6], rtol=0, atol=1e-10)


def test_parts_with_different_implementations_get_them_back() -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 30, "max_position_embeddings": 8},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
    )
    model = CLIPModel(config)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    headwise.replace(model, Choice("softmax")).undo()
    assert [model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation] == [
        "sdpa",
        "eager",
    ]


def test_no_rank_has_the_mask_that_eager_attention_needs() -> None:
    with (
        pytest.raises(UnsupportedError, match=r"NllbMoe.* has only eager attention"),
        sequence_parallel_model(translator()[0]),
    ):
        pass


def test_rewriting_says_that_replace_can_change_eager_attention() -> None:
    model, batch = translator()
    with pytest.raises(InterceptionError, match=r"only eager attention, which plans cannot .*headwise\.replace can$"):
        headwise.rewrite(model, Choice("window", {"width": 3}), probe=batch)


def test_the_receipt_names_layers_that_attend_by_hand() -> None:
    model, _ = captioner()
    with headwise.replace(model, Choice("softmax")) as receipt:
        assert receipt.known == ("image_encoder.vision_model.encoder.layers.0.self_attn",)
        assert receipt.left == ("encoder.layer.0.attention.self",)
        assert str(receipt).endswith("call no attention function: encoder.layer.0.attention.self")
