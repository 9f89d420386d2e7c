"""Everything that knows foreign models: loading them, feeding them, running them, and intercepting their attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from headwise.models.adopted_attention import adopt
from headwise.models.intercept import Call, InterceptionError, intercept
from headwise.models.receipt import Left, Receipt

__all__ = ["Call", "InterceptionError", "Left", "Receipt", "adopt", "attention", "intercept"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """softmax(q k^T / sqrt(k) + mask) v through the one call that `intercept` sees; for hand-written attention."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)
