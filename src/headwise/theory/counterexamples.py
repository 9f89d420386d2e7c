"""Search for a violation of left(z) <= right(z): maximise log left - log right by gradient ascent from many starts.

A positive maximum refutes the inequality, with the counter-example; a negative one is evidence, not proof, and measures
how loose the inequality is where it is tightest.  The same seed gives the same result.
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
    """The largest log(left / right), the tensors that attain it, and the start from which they were reached."""

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
    """`draw(generator)` returns the tensors to vary; `log_left` and `log_right` are functions of them.

    All starts run in one vmap.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [draw(generator) for _ in range(starts)]
    z = [torch.stack(each).detach().requires_grad_() for each in zip(*drawn, strict=True)]
    log_ratio = torch.vmap(lambda *x: log_left(*x) - log_right(*x))
    optimizer = torch.optim.Adam(z, lr=rate)
    best: Worst | None = None
    for _ in range(steps):
        gaps = log_ratio(*z)
        finite = gaps.detach().nan_to_num(nan=-torch.inf)
        start = int(finite.argmax())
        if finite[start] > (-torch.inf if best is None else best.gap):
            best = Worst(finite[start].item(), tuple(x[start].detach().clone() for x in z), start, starts)
        optimizer.zero_grad()
        (-gaps.sum()).backward()
        for x in z:
            # a start whose gradient is NaN stays where it is; the others continue
            if x.grad is not None:
                x.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    if best is None:
        raise InputError(f"search: none of {starts} starts gave a finite log(left) - log(right)")
    return best
