"""What choices and plans cost: counted multiply-adds, or seconds measured on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.kinds import Choice
from headwise.replacement.planning.capture import AttentionSite
from headwise.replacement.plans import Plan
from headwise.replacement.standard_kinds import SOFTMAX

REPEATS = 5


def relative_costs(
    sites: Mapping[str, AttentionSite], choices: Sequence[Choice], length: int, objective: str
) -> dict[tuple[str, Choice], float]:
    """Cost of one head by (site, choice), as a share of softmax attention of all heads."""

    @cache
    def cost(choice: Choice, heads: int, width: int, causal: bool) -> float:
        if objective == "multiply_adds":
            return choice.cost(length, width, causal).multiply_adds
        # in a mixed layer an operator has only some of the heads, and a few together cost more per head than all
        together = heads if choice == SOFTMAX else max(1, heads // 4)
        group = MixedHeads([choice] * together, width, length)
        return _seconds(group, length, causal) / together

    costs = {
        (name, choice): cost(choice, site.heads, site.width, site.causal)
        for name, site in sites.items()
        for choice in choices
    }
    total = sum(site.heads * costs[name, SOFTMAX] for name, site in sites.items())
    return {key: value / total for key, value in costs.items()}


def time_plan(plan: Plan) -> dict[str, Any]:
    """Seconds of attention in the whole model at the length of the plan, with softmax and as planned."""
    sites: dict[str, dict[str, Any]] = {}
    for site, choices in plan.sites.items():
        facts = plan.model["sites"][site]
        unchanged = MixedHeads([SOFTMAX] * len(choices), facts["width"], plan.length)
        seconds = [_seconds(heads, plan.length, facts["causal"]) for heads in (unchanged, plan.mixed_heads(site))]
        sites[site] = {"softmax": seconds[0], "planned": seconds[1], "operators": len(set(choices))}
    softmax, planned = (sum(row[name] for row in sites.values()) for name in ("softmax", "planned"))
    return {"length": plan.length, "softmax": softmax, "planned": planned, "ratio": planned / softmax, "sites": sites}


def _seconds(heads: MixedHeads, length: int, causal: bool) -> float:
    """Median time of a few calls on one sequence."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, len(heads.choices), length, heads.width, generator=generator)
    times = []
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            heads(q, k, v, causal=causal, scale=heads.width**-0.5)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first call of a shape is slower
