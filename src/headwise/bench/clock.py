"""Times as medians with a spread; calls are timed in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Call = Callable[[], object]


@final
@dataclass(frozen=True)
class Timing:
    """Seconds: the median, and the distance between quartiles, NaN where there is only one."""

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


def in_turns(work: Mapping[str, Call], *, rounds: int = 5, seconds: float = 20.0) -> dict[str, Timing]:
    """Time every call once per round, after a warm-up round; at least one round, and none begins after `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in work}
    start = time.perf_counter()
    for turn in range(rounds + 1):
        for name, call in work.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
        if turn and time.perf_counter() - start > seconds:
            break
    return {name: timing(x) for name, x in times.items()}


def timing(seconds: Sequence[float]) -> Timing:
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
    work: Mapping[str, tuple[Call, Call]], *, rounds: int = 5, seconds: float = 60.0
) -> dict[str, Times]:
    """Forward passes of all work in turns, then forward and backward passes, for twice as many seconds."""
    forward = in_turns({name: calls[0] for name, calls in work.items()}, rounds=rounds, seconds=seconds)
    backward = in_turns({name: calls[1] for name, calls in work.items()}, rounds=rounds, seconds=2 * seconds)
    return {name: Times(forward[name], backward[name]) for name in work}
