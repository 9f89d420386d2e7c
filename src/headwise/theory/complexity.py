"""cost(n) ~ n^a: the claimed exponent against counted operations and against measured time, with an interval.

a is the slope of log cost over log n, fitted by least squares; its 95 % interval comes from the residuals (Student).  A
claim such as O(n log n) has a slope too, over the same lengths, so that all rows of a table are compared alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headwise.cost import Cost
from headwise.operators.base import AttentionOperator
from headwise.operators.efficient import efficient
from headwise.operators.factored import factored
from headwise.operators.hashed import hashed
from headwise.operators.projected import projected
from headwise.operators.projections import dense, pooling
from headwise.operators.softmax import softmax
from headwise.operators.strided import strided
from headwise.operators.window import window

LENGTHS = (256, 512, 1024, 2048, 4096)
WIDTH, SLOTS = 16, 64

# 97.5 % quantiles of Student's t with 1 ... 8 degrees of freedom
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)


@dataclass(frozen=True)
class Slope:
    """exponent +- half: the fitted slope and its 95 % interval."""

    exponent: float
    half: float


def fit(lengths: Sequence[int], values: Sequence[float]) -> Slope:
    """Slope of log value over log n.

    >>> round(fit([2, 4, 8], [12, 48, 192]).exponent, 6)
    2.0
    """
    x, y = [math.log(n) for n in lengths], [math.log(max(value, 1e-300)) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    square = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / square
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    degrees = len(x) - 2
    half = _STUDENT[min(degrees, 8) - 1] * math.sqrt(rest / degrees / square) if degrees > 0 else math.inf
    return Slope(slope, half)


def _queries(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)


def _projection(k: int, n: int) -> torch.Tensor:
    return torch.randn(k, n, generator=torch.Generator().manual_seed(1)) / math.sqrt(n)


ARCHITECTURES: dict[str, tuple[Callable[[int], AttentionOperator], Callable[[int], float]]] = {
    "softmax": (lambda n: softmax(*_queries(n)), lambda n: n**2),
    "strided": (lambda n: strided(*_queries(n)), lambda n: n**1.5),
    "hashed": (
        lambda n: hashed(*_queries(n), generator=torch.Generator().manual_seed(2)),
        lambda n: n * math.log2(n),
    ),
    "projected": (lambda n: projected(*_queries(n), dense(_projection(SLOTS, n))), lambda n: n),
    "window": (lambda n: window(*_queries(n), 65), lambda n: n),
    "efficient": (lambda n: efficient(*_queries(n)), lambda n: n),
    "factored": (lambda n: factored(*_queries(n), pooling(n, n // SLOTS)), lambda n: n),
}
"""Name -> how to build it at length n, and the claimed cost."""


def cost(name: str, n: int) -> Cost:
    """One layer at length n; a recurrent one (a GRU) multiplies n states by six matrices, one after the other."""
    if name == "recurrent":
        return Cost(6 * n * WIDTH * WIDTH, 4 * WIDTH, depth=n)
    return ARCHITECTURES[name][0](n).cost(WIDTH)


def growth(name: str, what: str, lengths: Sequence[int] = LENGTHS) -> Slope:
    """Fitted exponent of `what` (multiply_adds, scalars or depth) of one layer."""
    return fit(lengths, [getattr(cost(name, n), what) for n in lengths])


def claimed_growth(name: str, lengths: Sequence[int] = LENGTHS) -> float:
    claim = (lambda n: float(n)) if name == "recurrent" else ARCHITECTURES[name][1]
    return fit(lengths, [claim(n) for n in lengths]).exponent


def measured_growth(name: str, lengths: Sequence[int], *, rounds: int = 3) -> Slope:
    """Fitted exponent of the wall-clock time of one apply: the smallest of a few rounds at each length."""
    times = []
    for n in lengths:
        operator, v = ARCHITECTURES[name][0](n), torch.randn(n, WIDTH)
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            operator(v)
            found.append(time.perf_counter() - start)
        times.append(min(found))
    return fit(lengths, times)
