"""Attention as transformers calls it, computed by the MixedHeads or OperatorHeads in the calling module.

One function for `AttentionInterface` and one for `AttentionMaskInterface`, registered under the same name: without the
second the library silently drops padding.  Arguments that change the result and are not supported raise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.pretrained import attention_functions
from headwise.operators.masks import Mask
from headwise.replacement.install.mixed_heads import is_padding_or_causal
from headwise.replacement.install.operator_heads import OperatorHeads

NAME = "headwise"
"""Contains none of the words (flash, sdpa, flex_attention, a slash) that transformers treats specially."""

MARK = "headwise_layer"
"""Attribute of a tensor of new keys: the layer of a HeadCache that knows the keys before them."""

CHANGES = {
    "softcap": "capped scores",
    "s_aux": "an extra sink in the softmax",
    "cu_seq_lens_q": "sequences packed into one",
    "cu_seq_lens_k": "sequences packed into one",
    "cache": "a paged cache",
}
"""Arguments that change what attention computes and that no replaced head supports."""


def register() -> None:
    """Register `attention` and `mask` with transformers; may be called repeatedly."""
    from transformers.masking_utils import sdpa_mask

    attention_functions.register(NAME, attention, mask, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query (b, h, m, k), key and value (b, h_kv, n, ·) -> (b, m, h, d)"""
    for name, why in CHANGES.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__}: {why} ({name}) is not supported in a rewritten model")
    heads = getattr(module, NAME, None)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    flag = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    past = getattr(key, MARK, None)
    n = key.shape[-2] + (0 if past is None else past.get_seq_length())
    if isinstance(heads, OperatorHeads):
        mask = Mask.from_transformers(attention_mask, flag, query.shape[-2], n)
        if position_bias is not None:
            mask = mask.with_bias(position_bias if mask.attn_bias is None else mask.attn_bias + position_bias)
        needed = bool(kwargs.get("output_attentions"))
        out, weights = heads(query, key, value, mask, scale=scale, dropout=dropout, need_weights=needed)
        return out.transpose(1, 2).contiguous(), weights

    def original(key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """(b, m, h, d) as the model was."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        pairs = _pairs(attention_mask, query.shape[-2])
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, pairs, **options, **kwargs)

    if past is None and (heads is None or heads.runs_original(query, key, value)):
        return original(key, value)
    read = Mask.from_transformers(attention_mask, flag, query.shape[-2], n)
    why = _unsupported(read, position_bias, dropout)
    if heads is not None and heads.replaced is not None and why is not None:
        head, choice = heads.replaced
        raise UnsupportedError(f"{type(module).__name__}: head {head} is {choice}, which does not support {why}")
    if why is not None and past is not None:
        raise UnsupportedError(f"HeadCache: does not support {why}; or pass past_key_values=DynamicCache(config=…)")
    if why is not None:
        return original(key, value)
    if past is not None:
        out = past.attend(query, key, value, read, scale, lambda k, v: original(k, v)[0].transpose(1, 2))
    else:
        assert heads is not None
        out = heads(query, key, value, key_mask=read.key_mask, causal=read.causal, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def _pairs(attention_mask: Tensor | None, m: int) -> Tensor | None:
    """The mask that `mask` shortened to (b, n), as the library makes it: (b, 1, m, n)"""
    if attention_mask is None or attention_mask.dim() != 2:
        return attention_mask
    n = attention_mask.shape[-1]
    causal = torch.ones(m, n, dtype=torch.bool, device=attention_mask.device).tril(n - m)
    return causal & attention_mask.bool()[:, None, None, :]


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """(b, n) for causal attention, (b, 1, 1, n) for attention to all keys, None if no key is padding.

    Any other mask (a sliding window, packed sequences, a static cache) is made by the library's own function as
    (b, 1, m, n), which softmax heads support and others refuse.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    causal, every = mask_function is causal_mask_function, mask_function is bidirectional_mask_function
    if local_size is not None and kv_length + kv_offset <= local_size:
        # a sliding window or chunk that contains all keys, unless it is combined with another mask
        causal, every = allow_is_causal_skip, not allow_is_causal_skip and allow_is_bidirectional_skip
    filled = not isinstance(q_offset, Tensor) and kv_offset == 0 and (every or kv_length == q_offset + q_length)
    if not (filled and (causal or every)):
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **kwargs,
        )
    skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    if attention_mask is None:
        if skip:
            return None
        keep = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    else:
        keep = F.pad(attention_mask.bool(), (0, max(0, kv_length - attention_mask.shape[-1])))[:, :kv_length]
        if skip and not torch.compiler.is_compiling() and bool(keep.all()):
            return None
    return keep if causal else keep[:, None, None, :]


def _unsupported(mask: Mask, position_bias: Tensor | None, dropout: float) -> str | None:
    """What only the original attention can do, and what to change."""
    if not is_padding_or_causal(mask):
        return (
            f"a mask (m = {mask.m}, n = {mask.n}) that is neither padding nor causal (or comes from a static cache, or "
            "is built while compiling); pass a mask (b, n)"
        )
    if position_bias is not None:
        return f"a position bias of shape {tuple(position_bias.shape)}; keep the heads of this model softmax"
    if dropout:
        return f"attention dropout of {dropout:g}; call model.eval(), or set the attention dropout of its config to 0"
    return None
