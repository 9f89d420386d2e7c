"""Adopted models compute the same function, can be grown, and load from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import UnsupportedError
from headwise.growth import Grower
from headwise.models import adopt
from headwise.nn import MultiHead

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, intermediate_size=16, attn_implementation="sdpa")
    return transformers.BertForMaskedLM(config).eval()


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **options)).eval()


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(50, (4, 9))
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@pytest.mark.parametrize(
    "make", [bert, gpt2, lambda: gpt2(scale_attn_by_inverse_layer_idx=True)], ids=["bert", "gpt2", "gpt2 layer scale"]
)
def test_the_function_is_preserved_and_the_model_grows(make: Any) -> None:
    model, data = make(), batch()
    key_mask = data["attention_mask"].bool()
    before = model(**data, use_cache=False) if "GPT2" in type(model).__name__ else model(**data)
    names = adopt(model)
    assert len(names) == 2
    after = model(**data)
    torch.testing.assert_close(after.logits[key_mask], before.logits[key_mask], rtol=1e-4, atol=1e-5)
    whole = {"input_ids": data["input_ids"], "labels": data["labels"]}
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    grower = Grower(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(**data).loss.backward()
        grower.observe()
        optimizer.step()
    first = next(iter(grower.layers))
    event = grower.grow(p=2, heads=[(first, 1)], loss=lambda: model(**whole).loss)
    assert [(c.before, c.after) for c in event.changes] == [(8, 10)]
    assert event.loss_after is not None
    assert event.loss_before is not None
    assert event.loss_after <= event.loss_before + 1e-6
    optimizer.zero_grad()
    model(**data).loss.backward()
    optimizer.step()
    other = make()
    adopt(other)
    grower.close()
    other.load_state_dict(model.state_dict())
    assert [m.key_widths for m in other.modules() if isinstance(m, MultiHead)] == [(8, 10), (8, 8)]
    torch.testing.assert_close(other.eval()(**data).logits, model.eval()(**data).logits)


def test_torch_encoders_are_adopted() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True), 2)
    x = torch.randn(3, 5, 16)
    before = model(x)
    assert adopt(model) == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(model(x), before)
    grower = Grower(model, torch.optim.SGD(model.parameters(), 0.1))
    model(x).square().mean().backward()
    grower.observe()
    assert len(grower.scores()) == 4


def test_unsupported_models_and_arguments() -> None:
    with pytest.raises(UnsupportedError, match=r"Linear has no nn.MultiheadAttention and no attention like"):
        adopt(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"dropout 0.1 on the attention weights.*call .eval\(\)"):
        adopt(bert().train())
    model = gpt2()
    adopt(model)
    with pytest.raises(UnsupportedError, match="does not take past_key_values; call the model with use_cache=False"):
        model(torch.zeros(1, 3, dtype=torch.long), use_cache=True)
