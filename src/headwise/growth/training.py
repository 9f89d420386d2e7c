"""A small model trained on a built-in task, which asks every so often whether its heads are too narrow, and grows.

What `headwise grow` shows; the same few lines go into any training loop (docs/grow.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

from headwise.errors import InputError
from headwise.growth.grower import Grower
from headwise.growth.growth_event import GrowthEvent, HeadScore
from headwise.growth.tasks import Reader, Task, average, lookup

TASKS = {"lookup": lookup, "average": average}


@final
@dataclass(frozen=True, eq=False)
class Moment:
    """The state of a run after `step` steps; `event` is what was decided there, if anything was asked."""

    step: int
    loss: float  # on data never trained on
    widths: dict[str, tuple[int, ...]]  # key widths of the heads, by layer
    scores: tuple[HeadScore, ...]  # empty where nothing was observed
    parameters: int
    event: GrowthEvent | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "widths": {layer: list(widths) for layer, widths in self.widths.items()},
            "bottlenecks": [
                {"layer": s.layer, "head": s.head, "score": s.bottleneck, "validated": s.validated, "share": s.share}
                for s in self.scores
            ],
            "parameters": self.parameters,
            "event": None if self.event is None else self.event.to_dict(),
        }


def train_and_grow(
    task: Task,
    *,
    steps: int = 600,
    every: int = 200,
    key_width: int = 2,
    layers: int = 1,
    heads: int = 2,
    batch: int = 32,
    observe: int = 24,
    rate: float = 3e-3,
    seed: int = 0,
) -> Iterator[Moment]:
    """Train, and after every `every` steps grow if it helps; yields a Moment every quarter of that, and at growth.

    The last `observe` steps before each decision are observed; the loss that decides is on other sequences.
    """
    if min(steps, every, key_width, layers, heads, batch, observe) < 1:
        raise InputError("grow: steps, every, key_width, layers, heads, batch and observe must be at least 1")
    torch.manual_seed(seed)
    model = Reader(task, layers=layers, heads=heads, key_width=key_width)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    draws = torch.Generator().manual_seed(seed + 1)
    held_out = task.draw(256, torch.Generator().manual_seed(seed + 2))
    unseen = task.draw(512, torch.Generator().manual_seed(seed + 3))
    grower = Grower(model, optimizer)
    grower.pause()

    def moment(step: int, scores: tuple[HeadScore, ...] = (), event: GrowthEvent | None = None) -> Moment:
        with torch.no_grad():
            loss = float(model.loss(*unseen))
        widths = {name: layer.key_widths for name, layer in grower.layers.items()}
        return Moment(step, loss, widths, scores, sum(p.numel() for p in model.parameters()), event)

    try:
        yield moment(0)
        for step in range(1, steps + 1):
            watching = (step - 1) % every >= every - observe and step < steps
            grower.resume() if watching else grower.pause()
            optimizer.zero_grad()
            model.loss(*task.draw(batch, draws)).backward()
            if watching:
                grower.observe()
            optimizer.step()
            if step % every == 0 and step < steps:
                scores = tuple(grower.scores())
                event = grower.grow(loss=lambda: model.loss(*held_out))
                grower.reset()
                yield moment(step, scores, event)
            elif step % max(1, every // 4) == 0 or step == steps:
                yield moment(step)
    finally:
        grower.close()
