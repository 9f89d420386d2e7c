"""Times as medians with a spread; calls are timed in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

Call = Callable[[], object]

PASSES = ("forward", "forward_backward")
"""The fields of `Times`."""


@final
@dataclass(frozen=True)
class Timing:
    """Seconds: the median, and the distance between quartiles, NaN where there is only one; both NaN without any."""

    median: float
    spread: float

    def over(self, other: Timing) -> float:
        return self.median / other.median


@final
@dataclass(frozen=True)
class Times:
    """Of a forward pass without gradients, and of a forward and backward pass."""

    forward: Timing
    forward_backward: Timing

    def over(self, other: Times) -> tuple[float, float]:
        return self.forward.over(other.forward), self.forward_backward.over(other.forward_backward)


def in_turns(
    work: Mapping[str, Call],
    *,
    rounds: int = 5,
    seconds: float = 20.0,
    known: Mapping[str, Sequence[float]] | None = None,
    keep: Callable[[str, int, float], None] = lambda name, turn, spent: None,
) -> dict[str, Timing]:
    """Time every call once per round, after a warm-up round; at least one round, and none begins after `seconds`.

    known  seconds of the first rounds, from an interrupted run
    keep   is given the seconds of each new measurement as soon as it is made, with its name and round
    """
    times = {name: list((known or {}).get(name, ()))[:rounds] for name in work}
    spent = sum(x for each in times.values() for x in each)
    warm = False
    for turn in range(rounds):
        missing = {name: call for name, call in work.items() if len(times[name]) <= turn}
        if missing and turn and spent > seconds:
            break
        if missing and not warm:
            start, warm = time.perf_counter(), True
            for call in work.values():
                call()
            spent += time.perf_counter() - start
        for name, call in missing.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
            spent += times[name][-1]
            keep(name, turn, times[name][-1])
    return {name: timing(x) for name, x in times.items()}


def timing(seconds: Sequence[float]) -> Timing:
    if not seconds:
        return Timing(math.nan, math.nan)
    if len(seconds) == 1:
        return Timing(seconds[0], math.nan)
    if len(seconds) < 3:
        return Timing(statistics.median(seconds), max(seconds) - min(seconds))
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, high - low)


def forward_and_backward(
    run: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor | None = None
) -> tuple[Call, Call]:
    """Two calls: `run` without gradients, and `run` with the gradients of its output (or of its sum) for `inputs`."""

    def forward() -> None:
        with torch.no_grad():
            run()

    def backward() -> None:
        out = run()
        out = out.sum() if gradient is None else out
        torch.autograd.grad(out, inputs, gradient, allow_unused=True)

    return forward, backward


def times_in_turns(
    work: Mapping[str, tuple[Call, Call]],
    *,
    rounds: int = 5,
    seconds: float = 60.0,
    known: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    keep: Callable[[str, str, int, float], None] = lambda passes, name, turn, spent: None,
) -> dict[str, Times]:
    """Forward passes of all work in turns, then forward and backward passes, for twice as many seconds.

    `known` and `keep` are those of `in_turns`, for each of "forward" and "forward_backward".
    """
    forward, backward = (
        in_turns(
            {name: calls[i] for name, calls in work.items()},
            rounds=rounds,
            seconds=(i + 1) * seconds,
            known=(known or {}).get(passes),
            keep=partial(keep, passes),
        )
        for i, passes in enumerate(PASSES)
    )
    return {name: Times(forward[name], backward[name]) for name in work}
