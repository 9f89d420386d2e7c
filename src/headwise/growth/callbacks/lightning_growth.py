"""Growth in Lightning's Trainer.

from headwise.growth.callbacks import LightningGrowthCallback
Trainer(..., callbacks=[LightningGrowthCallback(held_out_loss, every=500)])
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from headwise.growth.callbacks.growth_schedule import GrowthSchedule, ModelLoss


def _base() -> type:
    with contextlib.suppress(ModuleNotFoundError):
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]

        return Callback
    with contextlib.suppress(ModuleNotFoundError):
        from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]

        return Callback
    return object


class LightningGrowthCallback(_base()):
    """Widens heads every `every` steps if the held-out `loss(module)` falls; `options` are those of GrowthSchedule.

    `attention` is the name of the part of the LightningModule that grows, such as "model", where it is a model of
    transformers.
    """

    def __init__(self, loss: ModelLoss, every: int = 500, *, attention: str = "", **options: Any) -> None:
        super().__init__()
        self.schedule, self.attention = GrowthSchedule(loss, every, **options), attention

    @property
    def events(self) -> list[Any]:
        return self.schedule.events

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.schedule.start(pl_module.get_submodule(self.attention), trainer.optimizers)
        self.schedule.after_step(0) if trainer.global_step == 0 else None

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        self.schedule.before_step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != getattr(self, "_last", 0):  # several batches may make one step
            self._last = trainer.global_step
            self.schedule.after_step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.schedule.stop()
