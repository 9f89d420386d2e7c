"""Families that nothing was made for: saved, loaded, padded, decoded, in halves, on texts shorter than the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.errors import InputError
from headwise.replacement import Choice, HeadCache, load
from headwise.replacement.planning.capture import find_sites
from tests.replacement.plans import plan_for

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
ENDLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 1}
GROUPED = {"num_key_value_heads": 2}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
DECODERS = {
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": None}),
    "OPTForCausalLM": ("OPTConfig", OPT),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),
}
ENCODERS = {
    "RobertaModel": ("RobertaConfig", {}),
    "ElectraModel": ("ElectraConfig", {"embedding_size": 16}),
}
WINDOW = Choice("window", {"width": 6, "leading": 2})
MIXED = [WINDOW, WINDOW, Choice("softmax"), Choice("softmax")]


def made(name: str) -> tuple[Any, Any]:
    """The model, with weights large enough for the heads to matter, and the same rewritten."""
    torch.manual_seed(0)
    config, own = (DECODERS | ENCODERS)[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**SIZES, **ENDLESS, **own)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(2)
    plan = plan_for(model, {"input_ids": torch.randint(2, 99, (1, 8))}, MIXED, length=96)
    return model, headwise.rewrite(model, plan)[0]


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_saved_and_loaded_in_single_and_half_precision(name: str, tmp_path: Path) -> None:
    model, new = made(name)
    new.save_pretrained(tmp_path)
    ids = torch.randint(2, 99, (2, 50))
    with torch.no_grad():
        expected, original = new(ids)[0], model(ids)[0]
        assert torch.equal(load(tmp_path)(ids)[0], expected)
        assert (expected - original).norm() > 1e-3 * original.norm()
        for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
            half = load(tmp_path, dtype=dtype)(ids)[0]
            assert half.dtype == dtype
            assert (half - expected).norm() < tolerance * expected.norm()
        torch.testing.assert_close(new(ids[:1, :3])[0], model(ids[:1, :3])[0])  # the window holds all of it


@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "RobertaModel", "ViTModel"])
def test_a_model_that_was_read_from_files_under_other_names(name: str, tmp_path: Path) -> None:
    """transformers renames tensors of some families when it reads them, and back when it saves them."""
    if name == "ViTModel":
        sizes = {size: SIZES[size] for size in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        config = transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=4)
        model, batch = transformers.ViTModel(config), {"pixel_values": torch.randn(1, 3, 32, 32)}
    else:
        model, batch = made(name)[0], {"input_ids": torch.randint(2, 99, (1, 40))}
    model.save_pretrained(tmp_path / "original")
    model = type(model).from_pretrained(tmp_path / "original").eval()
    new = headwise.rewrite(model, plan_for(model, batch, MIXED, length=96))[0]
    new.save_pretrained(tmp_path / "rewritten")
    again = load(tmp_path / "rewritten")
    again.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        for each in (again, load(tmp_path / "again")):
            assert torch.equal(each(**batch)[0], new(**batch)[0])


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_a_cache_is_decoding_without_one(name: str) -> None:
    """Greedy, beams and sampling on a padded batch; a second prompt; tokens taken back."""
    _, new = made(name)
    ids = torch.randint(2, 99, (2, 30))
    keep = torch.ones_like(ids)
    keep[0, :7] = 0
    settings: list[dict[str, Any]] = [{"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}]
    for setting in settings:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(1)
            given = {"attention_mask": keep, "max_new_tokens": 12, "use_cache": use_cache, **setting}
            found.append(new.generate(ids, **given))
        assert torch.equal(*found), setting
    cache, one = HeadCache(new, keep_all=True), {"max_new_tokens": 4, "do_sample": False}
    first = new.generate(ids[1:], past_key_values=cache, **one)
    longer = torch.cat([first, ids[:1, :9]], 1)
    second = new.generate(longer, past_key_values=cache, **one)
    assert torch.equal(second, new.generate(longer, use_cache=False, **one))
    with torch.no_grad():
        cache.crop(20 - cache.get_seq_length())
        rest = new(second[:, 20:], past_key_values=cache)[0]
        torch.testing.assert_close(rest, new(second, use_cache=False)[0][:, 20:], rtol=1e-4, atol=1e-5)


def test_an_encoder_whose_class_is_not_exported_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {f"{part}_{size}": x for part in ("encoder", "decoder") for size, x in SPEECH.items()}
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=32, num_mel_bins=8, max_source_positions=50, **sizes, **ENDLESS
    )
    encoder, batch = transformers.WhisperModel(config).encoder.eval(), {"input_features": torch.randn(1, 8, 100)}
    new = headwise.rewrite(encoder, plan_for(encoder, batch, MIXED), probe=batch)[0]
    new.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(**batch)[0], new(**batch)[0])
    facts = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(facts.replace("HeadwiseWhisperEncoder", "HeadwiseWhisperThing"))
    with pytest.raises(InputError, match="WhisperThing, which this version of transformers does not have"):
        load(tmp_path)


SPEECH = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def test_why_a_head_cannot_be_replaced() -> None:
    """The bias of T5 is no mask; the window of Mistral is one."""
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )
    config = transformers.MistralConfig(**SIZES, **ENDLESS, **GROUPED, sliding_window=12)
    mistral = transformers.MistralForCausalLM(config)
    for model, why in ((t5, "a bias is added to its scores"), (mistral, "its mask is neither padding nor causal")):
        sites = find_sites(model.eval(), {"input_ids": torch.randint(2, 99, (1, 40))})
        assert {site.skipped for site in sites.values()} == {why}
