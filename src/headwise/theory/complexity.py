"""cost(n) ~ n^a: the claimed exponent against counted operations, and against measured time and memory.

a is the slope of log cost over log n with its 95 % interval.  A claim such as O(n log n) has a slope too, over the same
lengths, so that all rows of a table are compared alike.  Counts and traced memory are the same in every run; times are
not, so no verdict rests on them.
"""

from __future__ import annotations

import math
import time
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
from headwise.theory.exponent import Exponent, exponent
from headwise.theory.peak_memory import peak_bytes

LENGTHS = (256, 512, 1024, 2048, 4096)
WIDTH, SLOTS = 16, 64

Build = Callable[[Tensor, Tensor], AttentionOperator]


@final
@dataclass(frozen=True, eq=False)
class Architecture:
    """How to build one layer's operator from q and k (n, WIDTH), and the cost claimed of it."""

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
"""Long, since a linear layer's time is that of calling, not of computing, for the first few thousand positions."""
TIMED_SHORTER = {"softmax": (1024, 2048, 4096, 8192), RECURRENT: (512, 1024, 2048, 4096)}


def claimed_growth(name: str, lengths: Sequence[int] = LENGTHS) -> float:
    claim = float if name == RECURRENT else ARCHITECTURES[name].claim
    return exponent(lengths, [claim(n) for n in lengths]).value


def cost(name: str, n: int) -> Cost:
    """Counted: one layer at length n."""
    if name == RECURRENT:
        return Recurrent(WIDTH, causal=True).cost(n)
    return ARCHITECTURES[name].build(*_inputs(n)[:2]).cost(WIDTH)


def growth(name: str, what: str, lengths: Sequence[int] = LENGTHS) -> Exponent:
    """Fitted exponent of `what` (multiply_adds, scalars or depth) of one layer."""
    return exponent(lengths, [getattr(cost(name, n), what) for n in lengths])


def memory_growth(name: str, lengths: Sequence[int] = LENGTHS) -> Exponent:
    """Fitted exponent of the peak memory of building one operator and applying it."""
    lengths = lengths[:3] if name == RECURRENT else lengths  # one traced operation after the other, n times over
    return exponent(lengths, [peak_bytes(_layer(name, n)) for n in lengths])


def formed_memory_growth(lengths: Sequence[int] = LENGTHS) -> Exponent:
    """The same for softmax attention that forms P, as the formula is written."""

    def layer(n: int) -> Callable[[], object]:
        q, k, v = _inputs(n)
        return lambda: torch.softmax(q @ k.mT / math.sqrt(WIDTH), -1) @ v

    return exponent(lengths, [peak_bytes(layer(n)) for n in lengths])


@torch.no_grad()
def time_growth(name: str, lengths: Sequence[int] | None = None, *, rounds: int = 5) -> Exponent:
    """Fitted exponent of the wall-clock time of the same: the smallest of a few rounds at each length."""
    lengths = TIMED_SHORTER.get(name, TIMED) if lengths is None else lengths
    return exponent(lengths, [_seconds(_layer(name, n), rounds) for n in lengths])


def _seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


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
