"""Alarms: each kind from a written history, and a real run whose logits explode."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from benchmarks.monitor import SETTINGS, TUNED, spike, train
from torch import nn

from headwise.examination.monitor import Alarm, AlarmRules, Head, History, Monitor
from headwise.examination.monitor.alarms import REPEAT_AFTER, AlarmWatch
from headwise.examination.monitor.history import NAMES

HEADS = [Head("layers.0", 0), Head("layers.0", 1)]
STEADY = dict.fromkeys(NAMES, 0.5) | {"max_logit": 5.0, "effective_rank": 20.0}


def raised(*changes: dict[str, float], rules: AlarmRules | None = None) -> list[Alarm]:
    """The alarms of a history in which the second head follows `changes` and the first is steady."""
    history = History("net")
    watch = AlarmWatch(rules or AlarmRules(), history)
    for step, change in enumerate(changes):
        second = STEADY | change
        history.add(10 * step, {HEADS[0]: [STEADY[name] for name in NAMES], HEADS[1]: [second[name] for name in NAMES]})
        assert watch.check() == [alarm for alarm in history.alarms if alarm.step == 10 * step]
    return history.alarms


def kinds(alarms: list[Alarm]) -> list[tuple[str, int, str, int]]:
    return [(alarm.kind, alarm.step, alarm.layer, alarm.head) for alarm in alarms]


def test_steady_heads_raise_nothing() -> None:
    assert raised(*[{}] * 30) == []


def test_logit_growth_names_the_head_and_the_numbers() -> None:
    alarms = raised(*({"max_logit": 5 * 1.3**i} for i in range(14)))
    # 5 × 1.3^9 = 53 is the first above 50, and two in a row are needed
    assert kinds(alarms) == [("logit growth", 100, "layers.0", 1)]
    assert alarms[0].message == "layers.0 head 1: the largest score is 68.9, up from 14.3 in 50 steps"


@pytest.mark.parametrize(
    "logits",
    [
        [5 * 1.3**i for i in range(9)],  # steep, but still low
        [40 * 1.05**i for i in range(60)],  # high, but slow
        [20.0] * 10 + [400.0] + [20.0] * 10,  # one measurement
        [-3.0] * 10,
    ],
    ids=["low", "slow", "once", "negative"],
)
def test_logits_that_raise_no_alarm(logits: list[float]) -> None:
    assert raised(*({"max_logit": x} for x in logits)) == []


def test_logits_above_the_limit_however_slow_or_early() -> None:
    assert kinds(raised({"max_logit": 1200.0})) == [("logit growth", 0, "layers.0", 1)]


def test_not_finite_is_told_at_once() -> None:
    alarms = raised({}, {"max_logit": math.inf})
    assert kinds(alarms) == [("not finite", 10, "layers.0", 1)]


def test_entropy_collapse_is_sudden() -> None:
    assert kinds(raised(*[{}] * 8, {"entropy_share": 0.004})) == [("entropy collapse", 80, "layers.0", 1)]
    assert raised(*({"entropy_share": 0.5 * 0.8**i} for i in range(40))) == []  # a head that slowly becomes sharp


def test_rank_collapse_is_against_the_last_measured_rank() -> None:
    unmeasured = {"effective_rank": math.nan}
    alarms = raised({}, *[unmeasured] * 8, {"effective_rank": 1.1}, *[unmeasured] * 3)
    assert kinds(alarms) == [("rank collapse", 90, "layers.0", 1)]
    assert "effective rank 1.10, down from 20.00" in alarms[0].message
    assert raised(*[{"effective_rank": 1.2}] * 9) == []  # a sink from the beginning


def test_an_alarm_is_raised_once_until_it_has_long_gone() -> None:
    bad = {"max_logit": math.inf}
    assert len(raised(*[bad] * 30)) == 1
    assert len(raised(bad, {}, bad)) == 1
    assert len(raised(bad, *[{}] * REPEAT_AFTER, bad)) == 2


def test_alarms_go_to_the_logger_or_to_a_function(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x).sum()

    x = torch.full((1, 3, 4, 2), math.nan)
    with caplog.at_level(logging.WARNING, logger="headwise.monitor"):
        loud = Monitor(Bad(), every=1)
        with loud.step():
            loud.model(x)
    assert [record.getMessage() for record in caplog.records] == [
        "step 0, not finite in  head 0: a score is NaN or infinite; and 2 more heads"
    ]
    heard: list[Alarm] = []
    quiet = Monitor(Bad(), every=1, on_alarm=heard.append)
    with quiet.step():
        quiet.model(x)
    assert kinds(heard) == [("not finite", 0, "", i) for i in range(3)]
    assert quiet.logs()["attention/alarms"] == 3.0


def test_alarms_are_not_repeated_after_a_restart() -> None:
    history = History("net")
    row = [math.inf, *[0.5] * (len(NAMES) - 1)]
    history.add(0, {HEADS[0]: row})
    assert len(AlarmWatch(AlarmRules(), history).check()) == 1
    again = History.from_dict(history.to_dict())
    again.add(10, {HEADS[0]: row})
    assert AlarmWatch(AlarmRules(), again).check() == []


@pytest.mark.parametrize(
    "losses, step",
    [
        ([3.0] * 30, None),
        ([3.0] * 30 + [3.6], 30),
        ([3.0] * 10 + [9.0] + [3.0] * 30, None),  # no 20 losses before it
        ([3.0 - 0.05 * i for i in range(40)] + [2.1], 40),
        ([3.0] * 5 + [math.nan], 5),
    ],
)
def test_spikes_are_as_defined(losses: list[float], step: int | None) -> None:
    assert spike(losses) == step


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS[:2], ids=lambda setting: setting.name)
def test_explosions_are_announced_before_the_loss_spikes(setting) -> None:
    announced, healthy = 0, []
    for seed in range(20):
        losses, monitor = train(setting, seed, planted=True)
        at = spike(losses)
        first = next((alarm.step for alarm in monitor.alarms if alarm.kind == "logit growth"), math.inf)
        announced += at is not None and first < at
        healthy += train(setting, seed, planted=False)[1].alarms
    assert announced >= 18
    assert healthy == []


def test_one_explosion_is_announced_before_its_spike() -> None:
    losses, monitor = train(TUNED, 0, planted=True)
    at = spike(losses)
    first = next(alarm for alarm in monitor.alarms if alarm.kind == "logit growth")
    assert at is not None
    assert 150 < first.step < at
    assert first.message.startswith(f"layers.{first.layer[-1]} head {first.head}: the largest score is ")
