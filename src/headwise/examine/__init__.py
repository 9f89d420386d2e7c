"""What every head of a model is doing: `headwise.examine(model, batches)` returns an Examination."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from headwise.examine.intercept import Call, InterceptionError, intercept
from headwise.examine.record import Examination, Record, Statistic
from headwise.examine.run import examine

__all__ = ["Call", "Examination", "InterceptionError", "Record", "Statistic", "attention", "examine", "intercept"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """softmax(q k^T / sqrt(k) + mask) v: the one line by which hand-written attention becomes visible to `examine`."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)


class _Verb(types.ModuleType):
    """The package is called like the function it is about: headwise.examine(model, batches)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Examination:
        return examine(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
