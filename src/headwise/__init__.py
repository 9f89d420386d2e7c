"""Attention is a row-stochastic linear operator P: build it, measure it, test what is claimed of it, replace it.

The names below are resolved when first used (PEP 562), so `import headwise` and `headwise --help` do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> the module that defines it; the import block below says the same to type checkers
_HOME = {
    "HeadwiseError": "headwise.errors",
    "Cost": "headwise.cost",
    "AttentionOperator": "headwise.operators",
    "Claim": "headwise.operators",
}
_MODULES = ("errors", "shapes", "cost", "linalg", "operators", "testing", "nn", "theory")

if TYPE_CHECKING:
    from headwise.cost import Cost as Cost
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.operators import AttentionOperator as AttentionOperator
    from headwise.operators import Claim as Claim

__all__ = ["AttentionOperator", "Claim", "Cost", "HeadwiseError", "__version__"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"headwise.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # so that the next look-up does not come here
        return value
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
