"""Look for a violation of left(z) <= right(z): maximise log left - log right by gradient ascent from many starts.

A positive maximum refutes the inequality and comes with its counter-example; a negative one is evidence, not proof, and
says how loose the inequality is where it is tightest.  The same seed gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Draw = Callable[[torch.Generator], tuple[Tensor, ...]]
Side = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Worst:
    """The largest log(left / right) found, where, and from which of how many starts."""

    gap: float
    at: tuple[Tensor, ...]
    start: int
    starts: int


def search(
    log_left: Side,
    log_right: Side,
    draw: Draw,
    *,
    starts: int = 20,
    steps: int = 200,
    rate: float = 0.05,
    seed: int = 0,
) -> Worst:
    """`draw(generator)` gives the tensors to vary; the sides take them and return the logs of both sides."""
    generator = torch.Generator().manual_seed(seed)
    best: Worst | None = None
    for start in range(starts):
        z = tuple(x.detach().clone().requires_grad_() for x in draw(generator))
        optimizer = torch.optim.Adam(z, lr=rate)
        for _ in range(steps):
            gap = log_left(*z) - log_right(*z)
            value = gap.item()
            if value == value and (best is None or value > best.gap):
                best = Worst(value, tuple(x.detach().clone() for x in z), start, starts)
            optimizer.zero_grad()
            (-gap).backward()
            if not all(x.grad is None or bool(x.grad.isfinite().all()) for x in z):
                break
            optimizer.step()
    assert best is not None, "no start gave a finite value"
    return best
