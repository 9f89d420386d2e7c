"""Attention is a row-stochastic linear operator P: build it, measure it, test what is claimed of it, replace it.

The names below are resolved when first used (PEP 562), so `import headwise` and `headwise --help` do not load torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers take it for typing's, whose import would be most of the time this module takes
__version__ = "0.1.0"

# module -> the public names it defines; the import block below says the same to type checkers
_NAMES = {
    "headwise.errors": ["HeadwiseError"],
    "headwise.cost": ["Cost"],
    "headwise.operators": [
        "AttentionOperator",
        "Claim",
        "concatenation",
        "dot_product",
        "embedded_gaussian",
        "gaussian",
        "kronecker",
        "per_head",
        "product",
        "shift",
        "softmax",
        "toeplitz",
        "toeplitz_softmax",
        "uniform",
    ],
    "headwise.grow": ["Grower"],
    "headwise.nn": ["GridAttention", "LearnedQuery", "MultiHead"],
    "headwise.theory": ["check_equivariance", "check_invariance"],
    "headwise.rewrite.make": ["plan"],
    "headwise.testing": ["assert_operator"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("cost", "errors", "examine", "grow", "linalg", "nn", "operators", "rewrite", "shapes", "testing", "theory")

if TYPE_CHECKING:
    from headwise.cost import Cost as Cost
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.grow import Grower as Grower
    from headwise.nn import GridAttention as GridAttention
    from headwise.nn import LearnedQuery as LearnedQuery
    from headwise.nn import MultiHead as MultiHead
    from headwise.operators import AttentionOperator as AttentionOperator
    from headwise.operators import Claim as Claim
    from headwise.operators import concatenation as concatenation
    from headwise.operators import dot_product as dot_product
    from headwise.operators import embedded_gaussian as embedded_gaussian
    from headwise.operators import gaussian as gaussian
    from headwise.operators import kronecker as kronecker
    from headwise.operators import per_head as per_head
    from headwise.operators import product as product
    from headwise.operators import shift as shift
    from headwise.operators import softmax as softmax
    from headwise.operators import toeplitz as toeplitz
    from headwise.operators import toeplitz_softmax as toeplitz_softmax
    from headwise.operators import uniform as uniform
    from headwise.rewrite.make import plan as plan
    from headwise.testing import assert_operator as assert_operator
    from headwise.theory import check_equivariance as check_equivariance
    from headwise.theory import check_invariance as check_invariance

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


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
