"""Replace attention heads by cheaper operators: `plan` chooses them, `rewrite` installs them, `load` reads them back."""

from __future__ import annotations

from headwise.replacement.choice import KINDS, Choice
from headwise.replacement.install.mixed_heads import Heads
from headwise.replacement.install.saved import load
from headwise.replacement.plan import Plan, Point
from headwise.replacement.planning.make_plan import plan
from headwise.replacement.rewrite import rewrite

__all__ = ["KINDS", "Choice", "Heads", "Plan", "Point", "load", "plan", "rewrite"]
