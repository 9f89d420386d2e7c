"""When to speak up: rules over the last measurements of a head, each a comparison with the same head earlier on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.examination.monitor.history import NAMES, Alarm, Head, History

REPEAT_AFTER = 10
"""Measurements for which a condition must not have held before its alarm is raised again."""


@dataclass(frozen=True)
class AlarmRules:
    """The limits of alarms; the defaults were chosen on small language models (benchmarks/monitor.py).

    logit growth: the largest score is `growth` times what it was `window` measurements ago, and above `largest_logit`.
    entropy collapse: the share of entropy is below `entropy_share`, and a tenth of what it was.
    rank collapse: the effective rank is below `rank`, and a quarter of what it was when last measured.
    not finite: a score is NaN or infinite.
    """

    largest_logit: float = 50.0
    growth: float = 2.0
    window: int = 5
    entropy_share: float = 0.01
    rank: float = 1.5


class AlarmWatch:
    """Applies rules after every measurement; every alarm is raised once until its condition has long gone."""

    def __init__(self, rules: AlarmRules, history: History) -> None:
        self.rules, self.history = rules, history
        self._since = {(alarm.kind, Head(alarm.layer, alarm.head)): 0 for alarm in history.alarms}

    def check(self) -> list[Alarm]:
        """The alarms of the last measurement, which are added to the history."""
        self._since = {key: count + 1 for key, count in self._since.items()}
        raised = []
        for kind, head, message in self._conditions():
            if self._since.get((kind, head), REPEAT_AFTER + 1) > REPEAT_AFTER:
                raised.append(Alarm(self.history.steps[-1], kind, head.layer, head.head, f"{head}: {message}"))
            self._since[kind, head] = 0
        self.history.alarms += raised
        return raised

    def _conditions(self) -> Iterator[tuple[str, Head, str]]:
        rules, history = self.rules, self.history
        ago = f"{history.steps[-1] - history.steps[-1 - min(rules.window, len(history) - 1)]} steps ago"
        logits = history.series("max_logit", rules.window + 2)
        for i in _where(logits[-1] == math.inf):
            yield "not finite", history.heads[i], "a score is NaN or infinite"
        if len(history) <= rules.window:
            return
        before = _median(logits[:2])
        for i in _where((logits[-2:].amin(0) > rules.largest_logit) & (logits[-1] > rules.growth * before.clamp(min=0))):
            if logits[-1, i] < math.inf:
                yield (
                    "logit growth",
                    history.heads[i],
                    f"the largest score is {logits[-1, i]:.3g}, {before[i]:.3g} {ago}",
                )
        shares = history.series("entropy_share", rules.window + 2)
        was = _median(shares[:2])
        for i in _where((shares[-1] < rules.entropy_share) & (shares[-1] < was / 10)):
            yield (
                "entropy collapse",
                history.heads[i],
                f"every query attends to one key: {shares[-1, i]:.1%} of the possible entropy, {was[i]:.1%} {ago}",
            )
        rank, earlier = self._two_ranks()
        for i in _where((rank < rules.rank) & (rank < earlier / 4)):
            yield (
                "rank collapse",
                history.heads[i],
                f"all queries attend alike: effective rank {rank[i]:.2f}, {earlier[i]:.2f} when last measured",
            )

    def _two_ranks(self) -> tuple[Tensor, Tensor]:
        """The ranks of the last measurement, and those of the one before that had ranks; NaN where there are none."""
        rows = [row[NAMES.index("effective_rank")] for row in self.history.values]
        now = rows[-1]
        earlier = next((row for row in reversed(rows[:-1]) if bool(row.isfinite().any())), torch.empty(0))
        before = torch.full_like(now, math.nan)
        before[: len(earlier)] = earlier
        return now, before


def _where(condition: Tensor) -> list[int]:
    return condition.nonzero().flatten().tolist()


def _median(x: Tensor) -> Tensor:
    return torch.nanmedian(x, dim=0).values
