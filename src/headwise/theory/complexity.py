"""cost(n) ~ c n^a: fitted exponents of counted operations, of traced memory and of time, against the claimed ones.

a is the slope of log cost over log n by least squares, with a 95 % interval from the residuals.  The exponent of a
claim such as O(n log n) is fitted over the same lengths, so that all rows of a table are compared alike.  Counts and
traced memory are reproducible; times are not, and no verdict depends on them.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.nn.recurrent import Recurrent
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projections import dense, pooling
from headwise.operators.softmax import softmax
from headwise.operators.sparse.hashed import hashed
from headwise.operators.sparse.strided import strided
from headwise.operators.sparse.window import window
from headwise.testing.counting import LongestChain, peak_bytes

LENGTHS = (256, 512, 1024, 2048, 4096)
WIDTH, SLOTS = 16, 64

# two-sided 95 % quantiles of Student's t by degrees of freedom; beyond ten, the normal one
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}

Build = Callable[[Tensor, Tensor], AttentionOperator]


@dataclass(frozen=True)
class Exponent:
    value: float
    half_width: float  # NaN for two points
    points: int

    def __str__(self) -> str:
        return f"n^{self.value:.2f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.2f}")


def exponent(n: Sequence[int], cost: Sequence[float]) -> Exponent:
    """The exponent a in cost ~ c n^a.

    >>> exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0])
    Exponent(value=2.0, half_width=0.0, points=4)
    """
    x, y = [math.log2(v) for v in n], [math.log2(v) for v in cost]
    count = len(x)
    if count < 2:
        return Exponent(math.nan, math.nan, count)
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if count == 2:
        return Exponent(slope, math.nan, count)
    left = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(left / (count - 2) / spread)
    return Exponent(slope, _STUDENT.get(count - 2, 1.96) * error, count)


@final
@dataclass(frozen=True, eq=False)
class Architecture:
    """How to build the operator of one layer from q and k (n, WIDTH), and its claimed cost."""

    build: Build
    claim: Callable[[int], float]


def _projected(q: Tensor, k: Tensor, slots: int = SLOTS) -> AttentionOperator:
    n = k.shape[-2]
    e = torch.randn(slots, n, generator=torch.Generator().manual_seed(1)) / math.sqrt(n)
    return projected(q, k, dense(e))


ARCHITECTURES: dict[str, Architecture] = {
    "softmax": Architecture(softmax, lambda n: n**2),
    "strided": Architecture(strided, lambda n: n**1.5),
    "hashed": Architecture(
        lambda q, k: hashed(q, k, generator=torch.Generator().manual_seed(2)), lambda n: n * math.log2(n)
    ),
    "projected": Architecture(_projected, float),
    "window": Architecture(partial(window, width=65), float),
    "efficient": Architecture(efficient, float),
    "factored": Architecture(lambda q, k: factored(q, k, pooling(len(k), len(k) // SLOTS)), float),
}
RECURRENT = "recurrent"

TIMED = (4096, 8192, 16384, 32768)
"""Long: for shorter inputs, overhead dominates the time of a linear layer."""
TIMED_SHORTER = {"softmax": (1024, 2048, 4096, 8192), RECURRENT: (512, 1024, 2048, 4096)}


def claimed_growth(name: str, lengths: Sequence[int] = LENGTHS) -> float:
    claim = float if name == RECURRENT else ARCHITECTURES[name].claim
    return exponent(lengths, [claim(n) for n in lengths]).value


def cost(name: str, n: int) -> Cost:
    """The counted cost of one layer at length n."""
    if name == RECURRENT:
        return Recurrent(WIDTH, causal=True).cost(n)
    return ARCHITECTURES[name].build(*_inputs(n)[:2]).cost(WIDTH)


def growth(name: str, field: str, lengths: Sequence[int] = LENGTHS) -> Exponent:
    """Fitted exponent of `field` (multiply_adds, scalars or depth) of one layer."""
    return exponent(lengths, [getattr(cost(name, n), field) for n in lengths])


def memory_growth(name: str, lengths: Sequence[int] = LENGTHS) -> Exponent:
    """Fitted exponent of the peak memory of building one operator and applying it."""
    lengths = lengths[:3] if name == RECURRENT else lengths  # n traced operations one after the other
    return exponent(lengths, [peak_bytes(_layer(name, n)) for n in lengths])


def chain_growth(name: str, lengths: Sequence[int] = LENGTHS) -> Exponent:
    """Fitted exponent of the longest chain of dependent operations, traced while one layer runs."""
    lengths = lengths[:3] if name == RECURRENT else lengths
    chains = []
    for n in lengths:
        layer = _layer(name, n)
        with LongestChain() as chain:
            layer()
        chains.append(chain.steps)
    return exponent(lengths, chains)


def formed_memory_growth(lengths: Sequence[int] = LENGTHS) -> Exponent:
    """Fitted exponent of the peak memory of softmax attention that forms P."""

    def layer(n: int) -> Callable[[], object]:
        q, k, v = _inputs(n)
        return lambda: torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1) @ v

    return exponent(lengths, [peak_bytes(layer(n)) for n in lengths])


@torch.no_grad()
def time_growth(name: str, lengths: Sequence[int] | None = None, *, rounds: int = 5) -> Exponent:
    """Fitted exponent of the time of building one operator and applying it: the smallest of `rounds` at each length."""
    lengths = TIMED_SHORTER.get(name, TIMED) if lengths is None else lengths
    # the first round is for warming up
    return exponent(lengths, [min(timeit.repeat(_layer(name, n), number=1, repeat=rounds + 1)[1:]) for n in lengths])


def _inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, WIDTH, generator=generator) for _ in range(3))
    return q, k, v


def _layer(name: str, n: int) -> Callable[[], object]:
    q, k, v = _inputs(n)
    if name == RECURRENT:
        layer = Recurrent(WIDTH, causal=True)
        return lambda: layer(v)
    build = ARCHITECTURES[name].build
    return lambda: build(q, k)(v)
