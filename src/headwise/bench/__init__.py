"""Measure what operators and layers cost: over length, against other packages, and their distance from softmax."""

from headwise.bench.cases import CASES, OperatorCase
from headwise.bench.clock import Times, Timing, forward_and_backward, in_turns, times_in_turns
from headwise.bench.fidelity import Fidelity, measure_fidelity
from headwise.bench.peers import LayerTimes, compare_layers
from headwise.bench.scaling import Scaling, ScalingJob, load_scaling, measure_scaling, scaling_jobs

__all__ = [
    "CASES",
    "Fidelity",
    "LayerTimes",
    "OperatorCase",
    "Scaling",
    "ScalingJob",
    "Times",
    "Timing",
    "compare_layers",
    "forward_and_backward",
    "in_turns",
    "load_scaling",
    "measure_fidelity",
    "measure_scaling",
    "scaling_jobs",
    "times_in_turns",
]
