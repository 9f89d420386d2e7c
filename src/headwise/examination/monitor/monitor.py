"""Measure the attention of a model while it trains.

    monitor = headwise.Monitor(model)
    for batch in batches:
        with monitor.step():
            loss = model(**batch).loss
            loss.backward()
        ...
        log(monitor.logs())

Every `every`-th step is measured, through `headwise.models.intercept`; in all other steps nothing is replaced, hooked
or computed.  The model, its gradients and the random state are what they would be without a monitor.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.examination.monitor.alarms import AlarmRules, AlarmWatch
from headwise.examination.monitor.call_measures import HeadSample, measure_call
from headwise.examination.monitor.history import NAMES, Alarm, Head, History
from headwise.models.intercept import AttentionCall, intercept, nothing_seen, uncompiled
from headwise.models.unseen import check_own_attention

LOGGER = logging.getLogger("headwise.monitor")


class Monitor:
    """Measures of every attention head at every `every`-th step; several models are given as {name: model}.

    `rows` query rows of each attention call are sampled for entropies, row maxima and sink mass (None: all rows); the
    largest score is over all of them.  Effective rank is measured at every `rank_every`-th measurement (0: never).
    Alarms go to the logger "headwise.monitor", or to `on_alarm` if that is given.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        every: int = 10,
        *,
        rows: int | None = 256,
        rank_every: int = 20,
        rules: AlarmRules | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
        seed: int = 0,
    ) -> None:
        if every < 1 or rank_every < 0 or (rows is not None and rows < 1):
            raise InputError(
                f"Monitor: every = {every} and rows = {rows} must be at least 1, rank_every = {rank_every} at least 0"
            )
        models = _by_name(model)
        self.model = nn.ModuleDict(models) if isinstance(model, Mapping) else models[""]
        self.every, self.rows, self.rank_every = every, rows, rank_every
        self.rules = rules or AlarmRules()
        self.on_alarm = on_alarm
        self.steps = 0  # steps begun
        self.history = History(", ".join(type(each).__name__ for each in models.values()))
        self._generator = torch.Generator().manual_seed(seed)
        self._watch = AlarmWatch(self.rules, self.history)

    def __repr__(self) -> str:
        return f"Monitor({self.history.model}, every={self.every}, {len(self.history)} measurements)"

    @property
    def due(self) -> bool:
        """Whether the next step is measured."""
        return self.steps % self.every == 0

    def step(self) -> contextlib.AbstractContextManager[MonitoredStep]:
        """A context around the forward and backward pass of one step, measured if it is due.

        Several forward passes inside (gradient accumulation) are measured as one larger batch.  Set `loss` of the step
        to add it to the history: `with monitor.step() as step: ...; step.loss = loss`.
        """
        number, due = self.steps, self.due
        self.steps += 1
        return self._measured(number) if due else _SKIPPED

    @contextlib.contextmanager
    def _measured(self, number: int) -> Iterator[MonitoredStep]:
        step = MonitoredStep()
        with_rank = self.rank_every > 0 and len(self.history) % self.rank_every == 0
        samples: dict[str, HeadSample] = {}

        def see(call: AttentionCall) -> None:
            if _in_backward():  # gradient checkpointing computes the forward pass again
                return
            name, earlier = _unwrapped(call.site), samples.get(_unwrapped(call.site))
            rank = with_rank and earlier is None
            sample = measure_call(call, rows=self.rows, with_rank=rank, generator=self._generator)
            if sample is not None:
                samples[name] = sample if earlier is None else earlier.merged(sample)

        with intercept(self.model, see):
            yield step
        if not samples:
            if not self.history.steps:
                check_own_attention(self.model)
                raise nothing_seen(self.model)
            return  # a step without a forward pass
        self.history.add(number, _numbers(samples))
        if step.loss is not None:
            self.add_loss(step.loss, step=number)
        self._announce(self._watch.check())

    def _announce(self, alarms: list[Alarm]) -> None:
        if self.on_alarm is not None:
            for alarm in alarms:
                self.on_alarm(alarm)
            return
        for kind in dict.fromkeys(alarm.kind for alarm in alarms):
            first, *others = [alarm for alarm in alarms if alarm.kind == kind]
            more = f"; and {len(others)} more heads" if others else ""
            LOGGER.warning("step %d, %s in %s%s", first.step, kind, first.message, more)

    def add_loss(self, loss: float | Tensor, *, step: int | None = None) -> None:
        """Add a loss to the history, of the present step if none is given; it is shown beside the measures."""
        step = self.steps - 1 if step is None else step
        self.history.losses.append((step, loss.detach().item() if isinstance(loss, Tensor) else float(loss)))

    @property
    def latest(self) -> list[dict[str, Any]]:
        """The last measurement, one dict a head; empty before the first."""
        return self.history.at(-1) if self.history.steps else []

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms so far."""
        return self.history.alarms

    def logs(self, prefix: str = "attention", *, per_head: bool = False) -> dict[str, float]:
        """The last measurement as numbers for a logger, see `History.logs`."""
        return self.history.logs(prefix, per_head=per_head)

    def to_pandas(self) -> Any:
        """The history as a pandas.DataFrame with one row a step and head."""
        return self.history.to_pandas()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after a restart, of plain numbers and lists; for a checkpoint."""
        return {"steps": self.steps, "history": self.history.to_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: step numbers, history, and alarms that were raised already."""
        self.steps = int(state["steps"])
        self._generator.set_state(state["generator"])
        self._continue(History.from_dict(state["history"]))

    def save(self, path: str | Path) -> Path:
        """Write the history as one JSON file, replacing an earlier one; for `load` and `headwise monitor`."""
        return self.history.save(path)

    def write_page(self, directory: str | Path, *, force: bool = False) -> Path:
        """Write history.html, a page with a slider over steps, and history.json; the path of the page.

        An earlier page there is replaced with `force`.
        """
        from headwise.examination.monitor.history_page import write_history  # needs the extra "report"

        return write_history(self.history, directory, force=force)[0]

    def load(self, path: str | Path) -> None:
        """Go on with the history that `save` wrote, at the step after its last measurement."""
        history = History.load(path)
        self.steps = history.steps[-1] + 1 if history.steps else 0
        self._continue(history)

    def _continue(self, history: History) -> None:
        history.model = self.history.model
        self.history = history
        self._watch = AlarmWatch(self.rules, history)


class MonitoredStep:
    """One step; `loss`, if set, is added to the history of a measured one."""

    loss: float | Tensor | None = None


class _SkippedStep(contextlib.AbstractContextManager[MonitoredStep]):
    """A step that is not measured."""

    def __enter__(self) -> MonitoredStep:
        return MonitoredStep()

    def __exit__(self, *error: object) -> None:
        return None


_SKIPPED = _SkippedStep()


def _by_name(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The models by name, as they were before torch.compile; one model has no name."""
    models = model if isinstance(model, Mapping) else {"": model}
    if not models or not all(isinstance(each, nn.Module) for each in models.values()):
        raise InputError(f"Monitor: takes a torch.nn.Module, or modules by name, but got {type(model).__name__}")
    return {name: uncompiled(each) for name, each in models.items()}


def _unwrapped(site: str) -> str:
    """The name of a layer without what DistributedDataParallel and others put before it."""
    return site.removeprefix("module.")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _numbers(samples: Mapping[str, HeadSample]) -> dict[Head, list[float]]:
    """The measures of every head, moved to Python at once: on a graphics card this is the only wait."""
    measured = []
    for sample in samples.values():
        rank = torch.full_like(sample.max_logit, torch.nan) if sample.effective_rank is None else sample.effective_rank
        # NaN means that there is no number; a score that is not one is infinite
        largest = sample.max_logit.nan_to_num(nan=torch.inf)
        rest = [getattr(sample, name) for name in NAMES[1:-1]]
        measured.append(torch.stack([largest, *rest, rank]))
    table = torch.cat([x.to(measured[0].device) for x in measured], dim=1).T.tolist()
    heads = [Head(name, i) for name, sample in samples.items() for i in range(len(sample.max_logit))]
    return dict(zip(heads, table, strict=True))
