"""Times as medians with a spread, calls taken in turns so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds: the median, and the distance between quartiles, NaN where there is only one."""

    median: float
    spread: float

    def over(self, other: Timing) -> float:
        return self.median / other.median


def in_turns(
    work: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 5,
    seconds: float = 20.0,
    done: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Every call once a round, after one round to warm up; fewer rounds (never fewer than one) beyond `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in work}
    start = time.perf_counter()
    for turn in range(rounds + 1):
        for name, call in work.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
        if done is not None:
            done()
        if turn and time.perf_counter() - start > seconds:
            break
    return {name: timing(x) for name, x in times.items()}


def timing(seconds: list[float]) -> Timing:
    if len(seconds) == 1:
        return Timing(seconds[0], math.nan)
    if len(seconds) < 3:
        return Timing(statistics.median(seconds), max(seconds) - min(seconds))
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, high - low)


def without_nan(found: dict[str, Any]) -> dict[str, Any]:
    """NaN is no JSON."""
    parts = {key: without_nan(x) if isinstance(x, dict) else x for key, x in found.items()}
    return {key: None if x != x else x for key, x in parts.items()}
