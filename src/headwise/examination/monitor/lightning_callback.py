"""A monitor in Lightning's Trainer: its numbers go to every logger of the Trainer.

from headwise.examination.monitor import LightningMonitorCallback
Trainer(..., callbacks=[LightningMonitorCallback(every=20)])
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from headwise.examination.monitor.monitor import Monitor, MonitoredStep


def _base() -> type:
    with contextlib.suppress(ModuleNotFoundError):
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]

        return Callback
    with contextlib.suppress(ModuleNotFoundError):
        from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]

        return Callback
    return object


class LightningMonitorCallback(_base()):
    """Measures the first batch of every `every`-th step; `options` are those of `Monitor`.

    The numbers are logged when they are measured, whatever log_every_n_steps says, as Lightning's own
    LearningRateMonitor does.  The history is part of Lightning's checkpoints.
    """

    def __init__(self, every: int = 10, *, prefix: str = "attention", per_head: bool = False, **options: Any) -> None:
        super().__init__()
        self.every, self.prefix, self.per_head, self.options = every, prefix, per_head, options
        self.monitor: Monitor | None = None
        self._state: dict[str, Any] | None = None
        self._step: tuple[contextlib.AbstractContextManager[MonitoredStep], MonitoredStep] | None = None
        self._last = -1  # the last step that was measured: several batches may make one step

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.monitor = Monitor(pl_module, self.every, **self.options)
        if self._state is not None:
            self.monitor.load_state_dict(self._state)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        assert self.monitor is not None
        self.monitor.steps = trainer.global_step
        if self.monitor.due and trainer.global_step != self._last:
            self._last = trainer.global_step
            context = self.monitor.step()
            self._step = context, context.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._step is None or self.monitor is None:
            return
        (context, step), self._step = self._step, None
        step.loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        context.__exit__(None, None, None)
        numbers = self.monitor.logs(self.prefix, per_head=self.per_head)
        trainer.callback_metrics.update(numbers)
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=self._last)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        if self._step is not None:
            (context, _), self._step = self._step, None
            with contextlib.suppress(type(exception)):
                context.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict or None
