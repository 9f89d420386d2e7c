"""What a plan's operators take on this machine, beside what their counted multiply-adds promise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headwise.replacement.choice import EXACT, Choice
from headwise.replacement.install.mixed_heads import Heads
from headwise.replacement.plan import Plan
from headwise.replacement.rewrite import site_heads

REPEATS = 5


def seconds(choice: Choice, heads: int, length: int, width: int, causal: bool) -> float:
    """Of one head of one sequence, when `heads` of them run together; the median of a few runs."""
    group = Heads([choice] * heads, width, length)
    q, k, v = torch.randn(3, 1, heads, length, width, generator=torch.Generator().manual_seed(0))
    return _median(lambda: group(q, k, v, causal=causal, scale=width**-0.5)) / heads


def timed(plan: Plan) -> dict[str, Any]:
    """Attention of the whole model at the plan's length, exact and as planned: seconds, their ratio, each site's."""
    rows: dict[str, Any] = {}
    sums = [0.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    for site, choices in plan.sites.items():
        known = plan.model["sites"][site]
        h, d, causal = known["heads"], known["width"], known["causal"]
        tensors = torch.randn(3, 1, h, plan.length, d, generator=generator).unbind(0)
        groups = Heads([EXACT] * h, d, plan.length), site_heads(plan, site)
        both = [_median(partial(group, *tensors, causal=causal, scale=d**-0.5)) for group in groups]
        rows[site] = {"exact": both[0], "planned": both[1], "operators": len(set(choices))}
        sums = [total + each for total, each in zip(sums, both, strict=True)]
    return {"length": plan.length, "exact": sums[0], "planned": sums[1], "ratio": sums[1] / sums[0], "sites": rows}


def _median(run: Callable[[], Any]) -> float:
    with torch.no_grad():
        run()  # the first call of a shape is slower
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)
