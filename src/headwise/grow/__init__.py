"""Find heads whose query/key width is too small, and add the best dimensions."""

from headwise.grow.adopt import adopt
from headwise.grow.event import GrowthEvent, HeadChange, HeadScore
from headwise.grow.grower import Grower
from headwise.grow.refit import refit
from headwise.grow.solve import Factors, Problem, closed_form, fisher_form, shrink

__all__ = [
    "Factors",
    "Grower",
    "GrowthEvent",
    "HeadChange",
    "HeadScore",
    "Problem",
    "adopt",
    "closed_form",
    "fisher_form",
    "refit",
    "shrink",
]
