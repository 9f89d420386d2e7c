"""Find heads whose query/key width is too small, and add the best dimensions."""

from headwise.growth.adopt import adopt
from headwise.growth.grower import Grower
from headwise.growth.growth_event import GrowthEvent, HeadChange, HeadScore
from headwise.growth.refit import refit
from headwise.growth.solve import Factors, Problem, closed_form, fisher_form, shrink

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
