"""Importance equals a plain ablation, one head at a time, in float64, by hooks that know the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.examination import compare_examinations, examine, with_importance
from headwise.examination.measure import importance as module
from tests.examination.measure import planted_heads
from tests.models.tiny_models import ALL, sharpen

pytest.importorskip("transformers")


def causal_lm() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4, n_positions=64, use_cache=False)
    return sharpen(GPT2LMHeadModel(config).eval())


def projections(model: nn.Module) -> list[nn.Module]:
    """The modules whose input is the concatenated output of the heads, layer by layer."""
    names = ("attention.output.dense", "attn.c_proj", "self_attn.o_proj")
    return [m for name, m in model.named_modules() if name.endswith(names)]


def slow(model: nn.Module, batch: dict[str, Tensor], heads: int) -> Tensor:
    """(heads of all layers, texts) in float64."""
    double = nn.Module.double(copy.deepcopy(model)).eval()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

    def answers() -> tuple[Tensor, bool]:
        out = double(**batch)
        return (out.logits, True) if hasattr(out, "logits") else (out.last_hidden_state, False)

    rows = []
    with torch.no_grad():
        before, logits = answers()
        for projection in projections(double):
            for head in range(heads):

                def ablate(module: nn.Module, args: tuple, head: int = head) -> tuple:
                    x = args[0].clone()
                    width = x.shape[-1] // heads
                    part = x[..., head * width : (head + 1) * width]
                    for text in range(len(x)):
                        part[text] = part[text][real[text]].mean(0)
                    return (x,)

                with projection.register_forward_pre_hook(ablate):
                    after, _ = answers()
                changes = []
                for a, b, keep in zip(before, after, real, strict=True):
                    a, b = a[keep], b[keep]
                    if logits:
                        p, q = a.softmax(-1), b.softmax(-1)
                        changes.append((p * (p / q).log()).sum(-1).mean())
                    else:
                        changes.append(((a - b).norm(dim=-1) / a.norm(dim=-1)).mean())
                rows.append(torch.stack(changes))
    return torch.stack(rows)


def measured(model: nn.Module, batches: list) -> Tensor:
    found = with_importance(examine(model, batches, spectra_every=0), model, batches)
    return torch.tensor([record.by_text["importance"] for record in found.records], dtype=torch.float64)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_states_move_as_in_a_slow_ablation(family: str) -> None:
    model, batch = ALL[family]()
    model = sharpen(model)
    batch = {"input_ids": torch.cat([batch["input_ids"], batch["input_ids"].flip(-1)])}
    heads = model.config.num_attention_heads
    expected = slow(model, batch, heads)
    assert expected.min() > 1e-5  # every head does something
    torch.testing.assert_close(measured(model, [batch]), expected, rtol=1e-3, atol=1e-6)


def test_logits_move_as_in_a_slow_ablation() -> None:
    model, batch = causal_lm(), {"input_ids": torch.randint(99, (2, 30), generator=torch.Generator().manual_seed(0))}
    found = with_importance(examine(model, [batch], spectra_every=0), model, [batch])
    values = torch.tensor([record.by_text["importance"] for record in found.records], dtype=torch.float64)
    torch.testing.assert_close(values, slow(model, batch, 4), rtol=1e-3, atol=1e-7)
    assert next(x for x in found.measures if x["name"] == "importance")["unit"] == "nats"


def test_padding_counts_neither_in_the_mean_nor_in_the_answer() -> None:
    model = sharpen(ALL["bert"]()[0])
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 18:] = 0
    batch = {
        "input_ids": torch.randint(99, (2, 30), generator=torch.Generator().manual_seed(0)),
        "attention_mask": mask,
    }
    expected = slow(model, batch, 4)
    torch.testing.assert_close(measured(model, [batch]), expected, rtol=1e-3, atol=1e-6)
    alone = measured(model, [{"input_ids": batch["input_ids"][1:, :18]}])
    torch.testing.assert_close(measured(model, [batch])[:, 1:], alone, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_copies_and_single_heads_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ALL[family]()
    model = sharpen(model)
    in_copies = measured(model, [batch])
    monkeypatch.setattr(module, "ENTRIES", 3 * 40 * 32)
    torch.testing.assert_close(measured(model, [batch]), in_copies, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(module, "blocks_of", lambda model: {})
    torch.testing.assert_close(measured(model, [batch]), in_copies, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["t5", "whisper", "vit", "torch_encoder"])
def test_other_families_have_an_importance_for_every_head(family: str) -> None:
    model, batch = ALL[family]()
    values = measured(sharpen(model), [batch])
    assert (values > 0).all()
    assert values.isfinite().all()


def test_torch_layers_with_tokens_first() -> None:
    """(tokens, texts, width) and (texts, tokens, width) say the same of each text."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    second = copy.deepcopy(first)
    for block in second.layers:
        block.self_attn.batch_first = False  # type: ignore[union-attr]
    x = torch.randn(3, 10, 16)
    heads = [("layers.0.self_attn", 0), ("layers.1.self_attn", 1)]
    with torch.no_grad():
        a = module._Trial(first, heads).changes(x, lambda heads: None)
        b = module._Trial(second, heads).changes(x.transpose(0, 1).contiguous(), lambda heads: None)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_head_that_says_the_same_to_every_token_has_none() -> None:
    """A uniform head without a mask gives every token the mean of all values already."""
    batches = [{"input_ids": planted_heads.text(seed=seed)} for seed in range(3)]
    idle, busy = (
        with_importance(examine(model, batches), model, batches).records[0].measures["importance"]
        for model in (planted_heads.Planted(planted_heads.uniform), planted_heads.Planted(planted_heads.previous))
    )
    assert idle.max < 1e-6
    assert busy.min > 0.5
    assert idle.texts == 3


def test_progress_json_and_comparison_know_it() -> None:
    model, batch = ALL["bert"]()
    model = sharpen(model)
    batches = [batch, batch]
    seen: list[tuple[str, int, int | None]] = []
    examined = examine(model, batches)
    found = with_importance(examined, model, batches, progress=lambda *step: seen.append(step))
    heads = len(examined.records)
    assert seen[-1] == ("replacing each head by its mean", 2 * heads, 2 * heads)
    assert seen == sorted(seen)
    facts = found.to_dict()
    assert facts["records"][0]["measures"]["importance"]["texts"] == 2
    other = with_importance(examined, model, batches).to_dict()
    other["records"][3]["measures"]["importance"]["mean"] += 100
    other["records"][3]["by_text"]["importance"] = [100.0, 100.1]
    assert compare_examinations(facts, other).heads[0].measure == "importance"


def test_batches_of_another_kind_are_refused() -> None:
    model, batch = ALL["bert"]()
    examined = examine(model.eval(), [batch])
    other = ALL["gpt2"]()[0].eval()
    with pytest.raises(InputError, match=r"GPT2Model does not attend at encoder.layer.0"):
        with_importance(examined, other, [batch])
