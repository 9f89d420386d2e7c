"""Find heads whose query/key width is too small, and add the best dimensions."""

from headwise.growth.grower import Grower
from headwise.growth.growth_event import GrowthEvent, HeadGrowth, HeadScore
from headwise.growth.metric import Metric, register_metric
from headwise.growth.problem import Factors, Problem
from headwise.growth.shrinking import Shrinking, shrink
from headwise.growth.solve import Solution, WeightPath, closed_form, narrowed, refit

__all__ = [
    "Factors",
    "Grower",
    "GrowthEvent",
    "HeadGrowth",
    "HeadScore",
    "Metric",
    "Problem",
    "Shrinking",
    "Solution",
    "WeightPath",
    "closed_form",
    "narrowed",
    "refit",
    "register_metric",
    "shrink",
]
