"""Replace attention heads by cheaper operators: `plan` chooses, `rewrite` installs, `load` restores a saved model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.install.saved import load
from headwise.replacement.kinds import KINDS, AttentionSample, Choice, HeadInputs, Kind, KindOption, register_kind
from headwise.replacement.planning.make_plan import plan
from headwise.replacement.plans import Plan, PlanPoint
from headwise.replacement.replacing import Replacement, replace
from headwise.replacement.rewriting import rewrite
from headwise.replacement.standard_kinds import SOFTMAX

if TYPE_CHECKING:
    from headwise.replacement.install.head_cache import HeadCache as HeadCache

__all__ = [
    "KINDS",
    "SOFTMAX",
    "AttentionSample",
    "Choice",
    "HeadCache",
    "HeadInputs",
    "Kind",
    "KindOption",
    "MixedHeads",
    "Plan",
    "PlanPoint",
    "Replacement",
    "load",
    "plan",
    "register_kind",
    "replace",
    "rewrite",
]


def __getattr__(name: str) -> Any:
    if name == "HeadCache":  # derives from a class of transformers, which is loaded only for it
        from headwise.replacement.install.head_cache import HeadCache

        return HeadCache
    raise AttributeError(f"module 'headwise.replacement' has no attribute {name!r}")
