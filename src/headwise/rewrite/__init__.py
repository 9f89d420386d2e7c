"""Replace layers by cheaper or equal ones and hand back a receipt: attention head by head, convolution as attention.

`headwise.rewrite(model, plan)` returns a new model, its heads replaced by the operators the plan names.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from headwise.rewrite.apply import rewrite
from headwise.rewrite.choice import KINDS, Choice
from headwise.rewrite.convolution import convert, to_convolution
from headwise.rewrite.heads import Heads
from headwise.rewrite.receipt import Left, Receipt
from headwise.rewrite.saved import load
from headwise.rewrite.taps import exact, soft, soft_grid

__all__ = [
    "KINDS",
    "Choice",
    "Heads",
    "Left",
    "Receipt",
    "convert",
    "exact",
    "load",
    "rewrite",
    "soft",
    "soft_grid",
    "to_convolution",
]


class _Verb(types.ModuleType):
    """The package is called like the function it is about: headwise.rewrite(model, plan)."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, Receipt]:
        return rewrite(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
