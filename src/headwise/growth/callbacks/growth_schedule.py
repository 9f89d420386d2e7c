"""When to observe and when to grow: after every `every` steps, from the last `observe` steps before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.growth.bottleneck import HeadKey
from headwise.growth.grower import Grower
from headwise.growth.growth_event import GrowthEvent

ModelLoss = Callable[[Any], Tensor | float]
"""model -> the loss on data held out from training"""


@final
class GrowthSchedule:
    """A Grower that a training loop tells about its steps: `before_step` after backward, `after_step` after the update.

    `until`      the last step at which the model may grow
    `p`, `heads` those of `Grower.grow`
    `options`    those of `Grower`
    """

    def __init__(
        self,
        loss: ModelLoss,
        every: int = 500,
        *,
        observe: int = 24,
        until: int | None = None,
        p: int | Literal["auto"] = "auto",
        heads: Sequence[HeadKey] | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        for name, value in {"every": every, "observe": observe}.items():
            if value < 1:
                raise InputError(f"growth: {name} must be at least 1, but is {value}")
        self.loss, self.every, self.observe, self.until = loss, every, min(observe, every), until
        self.p: int | Literal["auto"] = p
        self.heads: Sequence[HeadKey] | Literal["auto"] = heads
        self.options = options
        self.events: list[tuple[int, GrowthEvent]] = []
        self.grower: Grower | None = None

    def start(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin to watch; parameters for new dimensions join the optimizers here."""
        # accelerate wraps optimizers
        inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self.grower = Grower(model, inner, **self.options)
        self.grower.pause()

    def before_step(self, step: int) -> None:
        """`step` updates were made, and the backward pass for the next has finished."""
        assert self.grower is not None, "start was called"
        if self._watching(step):
            self.grower.observe()

    def after_step(self, step: int) -> GrowthEvent | None:
        """`step` updates were made; returns what `grow` did, if it was time."""
        assert self.grower is not None, "start was called"
        event = None
        if step % self.every == 0 and step and (self.until is None or step <= self.until):
            model = self.grower.model
            event = self.grower.grow(self.p, self.heads, loss=lambda: self.loss(model))
            self.grower.reset()
            self.events.append((step, event))
        self.grower.resume() if self._watching(step) else self.grower.pause()
        return event

    def stop(self) -> None:
        if self.grower is not None:
            self.grower.close()

    def _watching(self, step: int) -> bool:
        return step % self.every >= self.every - self.observe and (self.until is None or step < self.until)
