"""Everything that knows foreign models: loading them, making inputs, running them, and intercepting their attention.

A new model family usually needs no code: whatever calls torch's scaled_dot_product_attention is intercepted
(`intercept`), and its blocks are found by their names (`run.blocks_of`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from headwise.models.adopted_attention import adopt
from headwise.models.inputs import Inputs, max_positions
from headwise.models.intercept import AttentionCall, InterceptionError, intercept
from headwise.models.load import LoadedModel, load_model
from headwise.models.receipt import Left, Receipt

__all__ = [
    "AttentionCall",
    "Inputs",
    "InterceptionError",
    "Left",
    "LoadedModel",
    "Receipt",
    "adopt",
    "attention",
    "intercept",
    "load_model",
    "max_positions",
]


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """softmax(q k^T / sqrt(k) + attn_mask) v by the function that `intercept` replaces; for hand-written attention."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **kwargs)
