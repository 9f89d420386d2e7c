"""A monitor in transformers' Trainer: its numbers go into the Trainer's logs, and so to every logger.

Trainer(..., callbacks=[headwise.MonitorCallback(every=20)])
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError, needs_extra
from headwise.examination.monitor.monitor import Monitor

with needs_extra("models", "MonitorCallback"):
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler

HISTORY = "attention_history.json"
"""The history, in the output directory and in every checkpoint."""


class MonitorCallback(TrainerCallback):
    """Measures the first forward pass of every `every`-th step, and adds the numbers to the next logs.

    `options` are those of `Monitor`.  The history is saved with every checkpoint and at the end, and goes on when
    training is resumed from a checkpoint.  An alarm makes the Trainer log at once.
    """

    def __init__(self, every: int = 10, *, prefix: str = "attention", per_head: bool = False, **options: Any) -> None:
        self.every, self.prefix, self.per_head, self.options = every, prefix, per_head, options
        self.monitor: Monitor | None = None
        self._pass: _NextForwardPass | None = None
        self._logged = 0  # measurements that are in the logs

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._move_to_front(sys._getframe(1).f_locals.get("self"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        self._move_to_front(sys._getframe(1).f_locals.get("self"))  # for callbacks that were added later
        if args.torch_compile:
            raise InputError(
                "MonitorCallback: torch_compile = True compiles the model, whose attention is then not seen; leave it "
                "out, or use headwise.Monitor in a loop of your own, which runs measured steps uncompiled"
            )
        if args.n_gpu > 1:
            raise InputError(
                f"MonitorCallback: the Trainer runs copies of the model in {args.n_gpu} threads; start it with "
                "torchrun, one process a device"
            )
        self.monitor = Monitor(model, self.every, **self.options)
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}" / HISTORY
        if state.global_step > 0 and checkpoint.is_file():
            self.monitor.load(checkpoint)
        self._logged = len(self.monitor.history)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._cancel()
        self._monitored.steps = state.global_step
        if self._monitored.due:
            self._pass = _NextForwardPass(kwargs["model"], self._monitored)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._cancel()
        history = self._monitored.history
        if history.alarms and history.alarms[-1].step == history.steps[-1] and self._logged < len(history):
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.monitor is None or logs is None:
            return
        if "loss" in logs:
            self.monitor.add_loss(logs["loss"], step=state.global_step)
        if self._logged < len(self.monitor.history):
            self._logged = len(self.monitor.history)
            numbers = self.monitor.logs(self.prefix, per_head=self.per_head)
            logs.update(numbers)
            state.log_history[-1].update(numbers)  # a copy of the logs, made before they came here

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(Path(args.output_dir) / f"checkpoint-{state.global_step}", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._cancel()
        self._save(Path(args.output_dir), state)

    @property
    def _monitored(self) -> Monitor:
        assert self.monitor is not None
        return self.monitor

    def _save(self, directory: Path, state: Any) -> None:
        if state.is_world_process_zero and directory.is_dir():
            self._monitored.save(directory / HISTORY)

    def _cancel(self) -> None:
        if self._pass is not None:
            self._pass.cancel()
            self._pass = None

    def _move_to_front(self, handler: object) -> None:
        """Let this callback see the logs first: loggers come before a user's callbacks, and read what is there then."""
        if isinstance(handler, CallbackHandler) and handler.callbacks[0] is not self:
            handler.callbacks = [self, *(each for each in handler.callbacks if each is not self)]


class _NextForwardPass:
    """Measures the next forward pass of a model, through two hooks that remove themselves.

    Callbacks of a Trainer are not told about an exception.  The second hook runs after an exception too, so that
    nothing stays intercepted.
    """

    def __init__(self, model: nn.Module, monitor: Monitor) -> None:
        self.monitor, self._context = monitor, None
        self._before = model.register_forward_pre_hook(self._open)
        self._after = model.register_forward_hook(self._close, always_call=True)

    def cancel(self) -> None:
        self._before.remove()
        self._after.remove()

    def _open(self, module: nn.Module, args: Any) -> None:
        self._before.remove()
        self._context = self.monitor.step()
        self._context.__enter__()

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        self._after.remove()
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(*(sys.exc_info() if output is None else (None, None, None)))
