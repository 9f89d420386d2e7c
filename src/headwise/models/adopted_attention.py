"""Replace the attention of an existing model by `MultiHead` layers that compute the same function, and can be grown.

Supported are nn.MultiheadAttention, and the self-attention modules of transformers' BERT (and the families copied from
it) and GPT-2.  They are recognised by their parts, so transformers itself is not imported.  Adopt before the optimizer
is made: parameters are new objects.
"""

from __future__ import annotations

import math
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.nn.drop_in import DropIn
from headwise.nn.multihead import MultiHead, multihead_from
from headwise.operators.masks import Mask


def adopt(model: nn.Module) -> list[str]:
    """Replace every supported attention module in place, or none if one raises; returns the names of those replaced.

    >>> encoder = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    >>> adopt(encoder)
    ['self_attn']
    """
    made = {name: _adopted(module) for name, module in model.named_modules()}
    replaced = {name: new for name, new in made.items() if new is not None}
    if not replaced:
        raise UnsupportedError(
            f"adopt: {type(model).__name__} has no nn.MultiheadAttention and no attention like BERT's or GPT-2's; "
            "build it from headwise.nn.MultiHead instead"
        )
    for name, new in replaced.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new)
    for part in ("config", "generation_config"):
        config = getattr(model, part, None)
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False  # a cache holds keys of one width
    return list(replaced)


def _adopted(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.MultiheadAttention):
        _check_dropout(module, module.dropout)
        new = DropIn.from_torch(module)
        new.layer.dropout = 0.0
        return new
    inner = getattr(module, "self", None)
    if isinstance(inner, nn.Module) and type(inner).__name__.endswith("SelfAttention") and hasattr(module, "output"):
        parts = (getattr(inner, part, None) for part in ("query", "key", "value"))
        dense = getattr(module.output, "dense", None)
        if all(isinstance(part, nn.Linear) for part in (*parts, dense)):
            return AdoptedBertAttention(module)
    if all(hasattr(module, part) for part in ("c_attn", "c_proj", "split_size")) and not hasattr(module, "q_attn"):
        return AdoptedGpt2Attention(module)
    return None


@final
class AdoptedBertAttention(nn.Module):
    """Takes the place of a BertAttention: attention, W_o, dropout, residual connection and norm."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        inner, output = cast(Any, module).self, cast(Any, module).output
        _check_dropout(inner, inner.dropout.p)
        self.attend = _multihead(
            inner.num_attention_heads,
            inner.scaling,
            [(linear.weight, linear.bias) for linear in (inner.query, inner.key, inner.value, output.dense)],
        ).train(module.training)
        self.dropout, self.norm = output.dropout, output.LayerNorm
        self.causal = bool(getattr(inner, "is_causal", False))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        masks = _masks(hidden_states, attention_mask, self.causal, args, kwargs)
        out = self.norm(self.dropout(self.attend(hidden_states, **masks)) + hidden_states)
        return out, _weights(self.attend, hidden_states, masks, kwargs)


@final
class AdoptedGpt2Attention(nn.Module):
    """Takes the place of a GPT2Attention."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        m = cast(Any, module)
        _check_dropout(m, m.attn_dropout.p)
        weights = [*m.c_attn.weight.mT.chunk(3), m.c_proj.weight.mT]
        biases = [*m.c_attn.bias.chunk(3), m.c_proj.bias]
        self.attend = _multihead(m.num_heads, m.scaling, list(zip(weights, biases, strict=True))).train(m.training)
        self.dropout = m.resid_dropout

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        masks = _masks(hidden_states, attention_mask, True, args, {**kwargs, "past_key_values": past_key_values})
        return self.dropout(self.attend(hidden_states, **masks)), _weights(self.attend, hidden_states, masks, kwargs)


@torch.no_grad()
def _multihead(heads: int, scaling: float, parts: list[tuple[Tensor, Tensor | None]]) -> MultiHead:
    """Queries, keys, values and output as (weight, bias); a scale other than 1/sqrt(k) goes into the queries."""
    layer = multihead_from(parts, heads)
    for parameter in layer.query.parameters():
        parameter *= scaling * math.sqrt(layer.key_widths[0])
    return layer


def _masks(
    x: Tensor, mask: Tensor | None, causal: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A transformers mask as keywords of MultiHead; other arguments that would have an effect are refused."""
    for name in ("past_key_values", "encoder_hidden_states", "position_bias"):
        if kwargs.get(name) is not None:
            hint = "; call the model with use_cache=False" if name == "past_key_values" else ""
            raise UnsupportedError(f"adopt: adopted attention does not take {name}{hint}")
    if any(x is not None for x in args):
        raise UnsupportedError("adopt: adopted attention takes tokens and a mask; pass everything else by keyword")
    if mask is not None and mask.dim() != 4:
        raise UnsupportedError(
            f"adopt: the attention mask has shape {tuple(mask.shape)}, but (b, 1, m, n) is needed; load the model with "
            'attn_implementation="sdpa"'
        )
    read = Mask.from_transformers(mask, causal, x.shape[-2], x.shape[-2])
    key_mask = None if read.key_mask is None else read.key_mask.squeeze(1)  # the heads share it
    return {"causal": read.causal, "key_mask": key_mask, "pair_mask": read.pair_mask, "attn_bias": read.attn_bias}


def _weights(layer: MultiHead, x: Tensor, masks: dict[str, Any], kwargs: dict[str, Any]) -> Tensor | None:
    return layer.operator(x, **masks).dense() if kwargs.get("output_attentions") else None


def _check_dropout(module: nn.Module, p: float) -> None:
    if p > 0 and module.training:
        raise UnsupportedError(
            f"adopt: dropout {p} on the attention weights makes P random; call .eval() before adopting "
            "(and .train() after), or set it to 0 in the model's configuration"
        )
