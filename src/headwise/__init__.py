"""See what every attention head of a PyTorch model does, find out which could be cheaper, and replace them.

The verbs are `examine`, `verify`, `plan`, `rewrite`, `replace`, `convert` and `Grower`.  Attention is a row-stochastic
linear operator P, and every form of it is a value that is applied, measured and exchanged.

Names are resolved on first use (PEP 562), so `import headwise` and `headwise --help` do not load torch.  It also lets
transformers' AutoModel load rewritten and resized models, whenever transformers is imported.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # a constant instead of typing's: importing typing would dominate the import time
__version__ = "0.9.0"

# module -> the public names it defines; the import block below repeats them for type checkers
_NAMES = {
    "headwise.errors": ["HeadwiseError"],
    "headwise.cost": ["Cost"],
    "headwise.operators": [
        "AttentionOperator",
        "Claim",
        "concatenation",
        "dot_product",
        "efficient",
        "embedded_gaussian",
        "factored",
        "fixed",
        "gaussian",
        "hashed",
        "kronecker",
        "nystrom",
        "per_head",
        "product",
        "projected",
        "shift",
        "softmax",
        "strided",
        "toeplitz",
        "toeplitz_softmax",
        "uniform",
        "window",
    ],
    "headwise.convolution": ["convert"],
    "headwise.examination": ["Examination", "compare", "examine"],
    "headwise.examination.monitor": ["Monitor", "MonitorCallback"],
    "headwise.growth": ["Grower", "shrink"],
    "headwise.ledger": ["Ledger", "ModelAudit", "verify"],
    "headwise.models": ["Receipt"],
    "headwise.nn": ["GridAttention", "LearnedQuery", "MultiHead"],
    "headwise.replacement": ["Plan", "plan", "replace", "rewrite"],
    "headwise.testing": ["assert_operator"],
    "headwise.theory": ["check_equivariance", "check_invariance"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = (
    "bench",
    "convolution",
    "cost",
    "errors",
    "examination",
    "growth",
    "ledger",
    "linalg",
    "models",
    "nn",
    "operators",
    "replacement",
    "shapes",
    "testing",
    "theory",
)

if TYPE_CHECKING:
    from headwise.convolution import convert as convert
    from headwise.cost import Cost as Cost
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.examination import Examination as Examination
    from headwise.examination import compare as compare
    from headwise.examination import examine as examine
    from headwise.examination.monitor import Monitor as Monitor
    from headwise.examination.monitor import MonitorCallback as MonitorCallback
    from headwise.growth import Grower as Grower
    from headwise.growth import shrink as shrink
    from headwise.ledger import Ledger as Ledger
    from headwise.ledger import ModelAudit as ModelAudit
    from headwise.ledger import verify as verify
    from headwise.models import Receipt as Receipt
    from headwise.nn import GridAttention as GridAttention
    from headwise.nn import LearnedQuery as LearnedQuery
    from headwise.nn import MultiHead as MultiHead
    from headwise.operators import AttentionOperator as AttentionOperator
    from headwise.operators import Claim as Claim
    from headwise.operators import concatenation as concatenation
    from headwise.operators import dot_product as dot_product
    from headwise.operators import efficient as efficient
    from headwise.operators import embedded_gaussian as embedded_gaussian
    from headwise.operators import factored as factored
    from headwise.operators import fixed as fixed
    from headwise.operators import gaussian as gaussian
    from headwise.operators import hashed as hashed
    from headwise.operators import kronecker as kronecker
    from headwise.operators import nystrom as nystrom
    from headwise.operators import per_head as per_head
    from headwise.operators import product as product
    from headwise.operators import projected as projected
    from headwise.operators import shift as shift
    from headwise.operators import softmax as softmax
    from headwise.operators import strided as strided
    from headwise.operators import toeplitz as toeplitz
    from headwise.operators import toeplitz_softmax as toeplitz_softmax
    from headwise.operators import uniform as uniform
    from headwise.operators import window as window
    from headwise.replacement import Plan as Plan
    from headwise.replacement import plan as plan
    from headwise.replacement import replace as replace
    from headwise.replacement import rewrite as rewrite
    from headwise.testing import assert_operator as assert_operator
    from headwise.theory import check_equivariance as check_equivariance
    from headwise.theory import check_invariance as check_invariance

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"headwise.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # the next look-up does not come here
        return value
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


_AUTO = "transformers.models.auto.configuration_auto"


_MODEL_TYPES = {
    "headwise": "headwise.replacement.install.transformers_models",  # rewritten models
    "headwise_widths": "headwise.models.widths.resized_models",
}


def _add_model_types() -> None:
    """Make AutoConfig read the config.json of rewritten and of resized models."""
    for name, reader in _MODEL_TYPES.items():

        class Config(sys.modules[_AUTO].PreTrainedConfig):
            model_type = name
            module = reader

            @classmethod
            def from_dict(cls, config_dict: dict, **kwargs: object) -> object:
                return importlib.import_module(cls.module).read_config(config_dict, **kwargs)

        sys.modules[_AUTO].CONFIG_MAPPING.register(name, Config, exist_ok=True)


class _WhenImported:
    """A finder that finds one module, and calls `_add_model_types` after it was loaded."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if name != _AUTO:
            return None
        spec = importlib.import_module("importlib.machinery").PathFinder.find_spec(name, path)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module: object) -> None:
                load(module)
                _add_model_types()

            spec.loader.exec_module = exec_module
        return spec


if _AUTO in sys.modules:
    _add_model_types()
else:
    sys.meta_path.insert(0, _WhenImported)  # type: ignore[arg-type]
