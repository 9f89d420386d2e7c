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

    logit growth: the largest score is above `high_logit`, and `growth` times what it was `window` measurements ago; or
    it is above `logit_limit`, where scores in bfloat16 are multiples of 4.
    entropy collapse: the share of entropy is below `entropy_share`, and a tenth of what it was.
    rank collapse: the effective rank is below `rank`, and a quarter of what it was when last measured.
    not finite: a score is NaN or infinite.
    """

    high_logit: float = 50.0
    logit_limit: float = 1000.0
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
        time = f"in {history.steps[-1] - history.steps[-1 - min(rules.window, len(history) - 1)]} steps"
        logits = history.series("max_logit", rules.window + 2)
        for i in _where(logits[-1] == math.inf):
            yield "not finite", history.heads[i], "a score is NaN or infinite"
        before = _lower(logits[:2]) if len(history) > rules.window else torch.full_like(logits[-1], math.nan)
        grown = (logits[-2:].amin(0) > rules.high_logit) & (logits[-1] > rules.growth * before.clamp(min=0))
        for i in _where((grown | (logits[-1] > rules.logit_limit)) & (logits[-1] < math.inf)):
            was = "" if before[i].isnan() else f", up from {before[i]:.3g} {time}"
            yield "logit growth", history.heads[i], f"the largest score is {logits[-1, i]:.3g}{was}"
        if len(history) <= rules.window:
            return
        shares = history.series("entropy_share", rules.window + 2)
        was = _lower(shares[:2])
        for i in _where((shares[-1] < rules.entropy_share) & (shares[-1] < was / 10)):
            yield (
                "entropy collapse",
                history.heads[i],
                f"every query attends to one key: {shares[-1, i]:.1%} of the possible entropy, down from "
                f"{was[i]:.1%} {time}",
            )
        rank, earlier = self._two_ranks()
        for i in _where((rank < rules.rank) & (rank < earlier / 4)):
            yield (
                "rank collapse",
                history.heads[i],
                f"all queries attend alike: effective rank {rank[i]:.2f}, down from {earlier[i]:.2f}",
            )

    def _two_ranks(self) -> tuple[Tensor, Tensor]:
        """The ranks of the last measurement, and for each head the one measured before; NaN where there is none."""
        ranks = (row[NAMES.index("effective_rank")] for row in reversed(self.history.values))
        now = next(ranks)
        before = torch.full_like(now, math.nan)
        if bool(now.isfinite().any()):
            for earlier in ranks:
                known = before[: len(earlier)]
                known.copy_(torch.where(known.isnan(), earlier, known))
                if not bool(before.isnan().any()):
                    break
        return now, before


def _where(condition: Tensor) -> list[int]:
    return condition.nonzero().flatten().tolist()


def _lower(x: Tensor) -> Tensor:
    """The lower of two numbers, or the one that is there."""
    return torch.fmin(x[0], x[1])
