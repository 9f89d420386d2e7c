"""`replace`: other operators in foreign models, against the same models with attention by definition."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.models.intercept import InterceptionError
from headwise.nn import LearnedProjection
from headwise.replacement import Choice
from tests.replacement import attention_reference as reference

B, N, E, H = 3, 13, 16, 4
LENGTHS = torch.tensor([13, 7, 10])
MASKS = ("none", "left", "right", "causal")


def padding(which: str) -> Tensor | None:
    """(b, n), True where there is padding."""
    if which == "left":
        return torch.arange(N) < (N - LENGTHS)[:, None]
    return torch.arange(N) >= LENGTHS[:, None] if which == "right" else None


# ---- six types of models; each is called with the name of a mask ----


class Block(nn.Module):
    """A block as in timm: one linear layer for q, k and v, scaled_dot_product_attention, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(E), nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.dropout = 0.0

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal)
        return x + self.proj(out.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x, attn_mask, is_causal)
        return x


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)


class Grouped(nn.Module):
    """Two key heads for four query heads, another scale, and attention in a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, E), nn.Linear(E, E // 2), nn.Linear(E, E // 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, E // H)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + grouped_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def encoder(*, batch_first: bool) -> tuple[nn.Module, Callable[..., Tensor]]:
    layer = nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=batch_first, norm_first=not batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)

    def call(model: nn.Module, x: Tensor, which: str) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=x.dtype) if which == "causal" else None
        keys = padding(which)
        if keys is not None and not batch_first:  # torch's additive form
            keys = torch.zeros(B, N, dtype=x.dtype).masked_fill(keys, -math.inf)
        x = x if batch_first else x.transpose(0, 1)
        out = model(x, mask=mask, src_key_padding_mask=keys, is_causal=mask is not None)
        return out if batch_first else out.transpose(0, 1)

    return model, call


def timm_like() -> tuple[nn.Module, Callable[..., Tensor]]:
    def call(model: nn.Module, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        return model(x, None if keys is None else ~keys[:, None, None, :], which == "causal")

    return Blocks(), call


def by_hand() -> tuple[nn.Module, Callable[..., Tensor]]:
    def call(model: nn.Module, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        visible = torch.ones(B, 1, N, N, dtype=torch.bool) if keys is None else (~keys)[:, None, None, :]
        mask = visible.tril() if which == "causal" else visible.expand(B, 1, N, N)
        return model(x, torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min))

    return Grouped(), call


def bert() -> tuple[nn.Module, Callable[..., Tensor]]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 24}
    model = BertModel(BertConfig(vocab_size=9, max_position_embeddings=N, **sizes))

    def call(model: Any, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        mask = None if keys is None else (~keys).long()
        if which == "causal":
            mask = torch.ones(B, 1, N, N, dtype=torch.bool).tril()
        return model(inputs_embeds=x, attention_mask=mask).last_hidden_state

    return model, call


def llama() -> tuple[nn.Module, Callable[..., Tensor]]:
    """Rotary, grouped queries, always causal."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 24}
    model = LlamaModel(LlamaConfig(vocab_size=9, num_key_value_heads=2, max_position_embeddings=N, **sizes))

    def call(model: Any, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        mask = None if keys is None else (~keys).long()
        return model(inputs_embeds=x, attention_mask=mask, use_cache=False).last_hidden_state

    return model, call


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor]]]] = {
    "nn.TransformerEncoder": partial(encoder, batch_first=True),
    "nn.TransformerEncoder, sequence first": partial(encoder, batch_first=False),
    "timm": timm_like,
    "grouped": by_hand,
    "BERT": bert,
    "Llama": llama,
}
OPERATORS: dict[str, dict[str, Any]] = {
    "window": {"width": 5, "leading": 1},
    "strided": {"stride": 3},
    "fixed": {"block": 4, "summaries": 1},
    "efficient": {"sharpness": 2.0},
    "uniform": {},
    "dot_product": {},
    "softmax": {},
    "projected": {"rank": 4},
}


def made(name: str) -> tuple[nn.Module, Callable[..., Tensor], Tensor]:
    torch.manual_seed(0)
    model, call = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)  # far from uniform attention
    return model.double().eval(), call, torch.randn(B, N, E, dtype=torch.float64)


def by_definition(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, call: Callable[..., Tensor], x: Tensor, which: str, name: str
) -> Tensor:
    """The output of the unchanged model with attention by definition."""
    expected = reference.Reference(getattr(reference, name), **OPERATORS[name])
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", expected)
        patch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
        out = call(model, x, which)
    assert expected.calls
    return out


@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", MODELS)
def test_a_replaced_model_is_the_model_with_that_operator(
    monkeypatch: pytest.MonkeyPatch, name: str, operator: str, which: str
) -> None:
    model, call, x = made(name)
    before = call(model, x, which)
    expected = by_definition(monkeypatch, model, call, x, which, operator)
    keys = padding(which)
    real = torch.ones(B, N, dtype=torch.bool) if keys is None else ~keys
    with headwise.replace(model, operator, **OPERATORS[operator]) as receipt, torch.no_grad():
        assert len(receipt.sites) == len(receipt.known)
        if operator == "projected" and (which == "causal" or name == "Llama"):
            with pytest.raises(UnsupportedError, match="projected rank=4 attends to later keys; use one of softmax"):
                call(model, x, which)
            return
        after = call(model, x, which)
    # the means of segments are in single precision
    torch.testing.assert_close(after[real], expected[real], rtol=0, atol=1e-6 if operator == "projected" else 1e-9)
    if operator != "softmax":
        assert (after - before)[real].abs().max() > 1e-3
    torch.testing.assert_close(call(model, x, which)[real], before[real], rtol=0, atol=1e-12)
