"""Look for a violation of left(z) <= right(z): maximise log left - log right by gradient ascent from many starts.

A positive maximum refutes the inequality and comes with its counter-example; a negative one is evidence, not proof, and
says how loose the inequality is where it is tightest.  The same seed gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import InputError

Draw = Callable[[torch.Generator], tuple[Tensor, ...]]
Side = Callable[..., Tensor]


@final
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
    """`draw(generator)` gives the tensors to vary; the sides take them and return the logs of both sides.

    All starts climb side by side (vmap), which takes about as long as one of them.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [draw(generator) for _ in range(starts)]
    z = [torch.stack(each).detach().requires_grad_() for each in zip(*drawn, strict=True)]
    both = torch.vmap(lambda *x: log_left(*x) - log_right(*x))
    optimizer = torch.optim.Adam(z, lr=rate)
    best: Worst | None = None
    for _ in range(steps):
        gaps = both(*z)
        found = gaps.detach().nan_to_num(nan=-torch.inf)
        start = int(found.argmax())
        if found[start] > (-torch.inf if best is None else best.gap):
            best = Worst(found[start].item(), tuple(x[start].detach().clone() for x in z), start, starts)
        optimizer.zero_grad()
        (-gaps.sum()).backward()
        for x in z:
            # a start that has left the numbers stays where it is; the others go on
            if x.grad is not None:
                x.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    if best is None:
        raise InputError(f"search: none of {starts} starts gave a finite log(left) - log(right)")
    return best
