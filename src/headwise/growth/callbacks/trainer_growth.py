"""Growth in transformers' Trainer.

Trainer(..., callbacks=[headwise.growth.callbacks.GrowthCallback(held_out_loss, every=500)])
"""

from __future__ import annotations

from typing import Any

from headwise.errors import needs_extra
from headwise.growth.callbacks.growth_schedule import GrowthSchedule, ModelLoss

with needs_extra("models", "GrowthCallback"):
    from transformers import TrainerCallback


class GrowthCallback(TrainerCallback):
    """Widens heads every `every` steps if the held-out `loss(model)` falls; `options` are those of GrowthSchedule.

    `events` holds (step, GrowthEvent).  Checkpoints that the Trainer writes carry the widths and are loaded by the auto
    classes after `import headwise`.
    """

    def __init__(self, loss: ModelLoss, every: int = 500, **options: Any) -> None:
        self.schedule = GrowthSchedule(loss, every, **options)

    @property
    def events(self) -> list[Any]:
        return self.schedule.events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule.start(kwargs["model"], [kwargs["optimizer"]])
        self.schedule.after_step(state.global_step) if state.global_step == 0 else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule.before_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        event = self.schedule.after_step(state.global_step)
        if event is not None and event.changes:
            control.should_log = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule.stop()
