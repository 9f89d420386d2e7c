"""The model of what attention on many processes costs: its arithmetic, what it is fitted to, and its command."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headwise.bench import sharded_runs
from headwise.bench.sharded_cases import HEADS, WIDTH, sharded_cases
from headwise.bench.sharded_cost import ComputeCost, Link, compared, fitted_costs, projected_times
from headwise.bench.sharded_runs import run_sharded
from headwise.cli.main import main


def test_a_cost_is_fitted_to_times() -> None:
    work = [1e6, 2e6, 4e6]
    cost = ComputeCost.fitted(work, [0.01 + 1e-9 * w for w in work])
    assert (cost.fixed, cost.rate) == (pytest.approx(0.01), pytest.approx(1e-9))
    assert ComputeCost.fitted(work, [1e-9 * w - 5e-4 for w in work]).fixed == 0  # superlinear: no negative start
    flat = ComputeCost.fitted(work, [0.02, 0.02, 0.02])
    assert (flat.fixed, flat.rate) == (pytest.approx(0.02), pytest.approx(0, abs=1e-12))
    assert ComputeCost.fitted(work, [0.03, 0.02, 0.01]).rate == 0
    assert ComputeCost.fitted(work[:1], [0.01]) == ComputeCost(0.0, pytest.approx(1e-8))


def test_seconds_are_compute_and_messages() -> None:
    case = sharded_cases()["window 129"]
    assert ComputeCost(0.5, 1e-9).seconds(case, 8192, 4) == pytest.approx(0.5 + 1e-9 * case.work(8192) / 4)
    link = Link({"all_to_all": 1e-3, "all_reduce": 1e-2}, {"all_to_all": 1e9, "all_reduce": 1e8}, copy=1e7)
    seconds = link.seconds({"all_to_all": 3, "all_reduce": 1}, {"all_to_all": 1e6, "all_reduce": 2e6})
    assert seconds == pytest.approx(3e-3 + 1e-2 + 1e-3 + 2e-2 + 3e6 / 1e7)
    cluster = Link.stated(25e9, 1e-5, 1e10, 1024)
    assert cluster.latency == pytest.approx({"all_to_all": 1e-5, "all_gather": 1e-4, "all_reduce": 2e-4})
    assert set(cluster.bandwidth.values()) == {25e9}


def test_projections() -> None:
    cases = {name: sharded_cases()[name] for name in ("softmax, heads", "softmax, ring", "projected 128")}
    costs = dict.fromkeys(cases, ComputeCost(0.0, 1e-9))
    link = {"copy": 1e10}
    runs: dict[int, Any] = {1: {"link": link}}
    for size in (2, 4):
        runs[size] = {"link": {"latency": {"all_to_all": 1.0}, "bandwidth": {"all_to_all": 1e30}, "copy": 1e30}}
        for name, case in cases.items():
            runs[size][name] = {
                "received": case.received(1024, size),
                "calls": {"all_to_all": 3 * (size - 1)},  # as of a ring
                "bytes": {"all_to_all": 3 * case.received(1024, size)},
            }
            # what it takes beyond its work and its collectives: a fifth of a second
            busy = 0.2 + 3.0 * (size - 1) + 1e-9 * case.work(128) / size
            runs[size][name]["short"] = {**runs[size][name], "n": 128, "busy": busy}
    rows = projected_times(cases, costs, runs, [10_000_000], [2, 1024], 25e9, 20e-6)
    found = {(x.name, x.ranks): x for x in rows}
    assert math.isnan(found["softmax, heads", 1024].seconds)  # there are four heads
    ring = found["softmax, ring", 1024]
    received = 4 * HEADS * 2 * WIDTH * 10_000_000 * 1023 / 1024
    assert ring.communication == pytest.approx(3 * received * (1 / 25e9 + 1 / 1e10) + 3 * 1023 * 20e-6)
    work = 1e-9 * cases["softmax, ring"].work(10_000_000)
    assert ring.seconds == pytest.approx(0.2 + work / 1024 + ring.communication)
    two = found["softmax, ring", 2]
    assert two.seconds == pytest.approx(0.2 + work / 2 + two.communication)


def test_two_processes_receive_what_the_formulas_say() -> None:
    names, cases = ["window 129", "efficient"], sharded_cases()
    found = run_sharded(sharded_cases, 2, repeats=1, shrink=16, names=names)
    assert found.keys() == {"link", *names}
    for name in names:
        assert found[name]["n"] == 512
        assert found[name]["received"] == cases[name].received(512, 2)
        assert found[name]["busy"] > 0
        assert found[name]["short"]["n"] == 256
    for kind in ("all_to_all", "all_gather", "all_reduce"):
        assert 1e-6 < found["link"]["latency"][kind] < 1
        assert found["link"]["bandwidth"][kind] > 1e6
    # keys and values of a halo come as one, and what every rank is about to do; backward their gradients go back
    assert found["window 129"]["calls"] == {"all_to_all": 2, "all_gather": 1, "all_reduce": 0}
    assert found["window 129"]["bytes"]["all_to_all"] == cases["window 129"].received(512, 2)
    # forward the state and its sums, backward the gradient of the state
    assert found["efficient"]["calls"] == {"all_to_all": 0, "all_gather": 1, "all_reduce": 3}
    assert found["efficient"]["bytes"]["all_reduce"] > 1.9 * cases["efficient"].received(512, 2)


def test_one_process_exchanges_nothing() -> None:
    """It calls the builder, for the whole sequence and for the lengths of slices."""
    found = run_sharded(sharded_cases, 1, repeats=1, shrink=16, names=["window 129", "near_far 64"])
    assert found["window 129"]["calls"] == {"all_to_all": 0, "all_gather": 1, "all_reduce": 0}
    assert [n for n, _ in found["near_far 64"]["alone"]] == [512, 256, 128]


def canned(make: Any, size: int, *, names: list[str] | None = None, **settings: Any) -> dict[str, Any]:
    """A machine that computes 1e9 multiply-adds a second and sends nothing."""
    kinds = ("all_to_all", "all_gather", "all_reduce")
    link = {"latency": dict.fromkeys(kinds, 0.0), "bandwidth": dict.fromkeys(kinds, 1e30), "copy": 1e30}
    found: dict[str, Any] = {"link": link}
    for name, case in make().items():
        if names is None or name in names:
            seconds = case.work(case.n) / 1e9 / size
            found[name] = {"n": case.n, "seconds": seconds, "spread": 0.0, "busy": seconds, "received": 0.0}
            found[name] |= {"calls": dict.fromkeys(kinds, 3), "bytes": dict.fromkeys(kinds, 0.0)}
            found[name]["alone"] = [[n, case.work(n) / 1e9] for n in (case.n, case.n // 2)]
            short = case.n // 32
            found[name]["short"] = {**found[name], "n": short, "busy": case.work(short) / 1e9 / size}
    return found


def test_what_is_predicted_is_compared_with_what_is_measured() -> None:
    runs = {size: canned(sharded_cases, size) for size in (1, 2, 4)}
    rows = compared(sharded_cases(), fitted_costs(sharded_cases(), runs[1]), runs)
    assert len(rows) == 3 * len(sharded_cases())
    for row in rows:
        assert row.ratio == pytest.approx(1, rel=0.01)
    runs[2]["link"]["latency"]["all_gather"] = 1.0
    rows = compared(sharded_cases(), fitted_costs(sharded_cases(), runs[1]), runs)
    assert all(row.predicted > 3 if row.ranks == 2 else row.ratio == pytest.approx(1, rel=0.01) for row in rows)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sharded_runs, "run_sharded", canned)
    few = ["--operators", "softmax, heads", "efficient", "--tokens", "1000000", "--ranks", "4", "64", "--latency", "0"]
    assert main(["bench", "ranks", *few]) == 0
    printed = capsys.readouterr().out
    assert "predicted" in printed
    assert "ratio" in printed
    assert "1e+06, 64" in printed
    assert main(["bench", "ranks", *few, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {(x["name"], x["ranks"]) for x in facts["rows"]} == {
        (name, ranks) for name in ("softmax, heads", "efficient") for ranks in (1, 2, 4)
    }
    assert [x["seconds"] for x in facts["projected"] if x["name"] == "softmax, heads"][1] is None
    assert facts["stated"] == {"bandwidth": 25e9, "latency": 0.0}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--operators", "nothing"], "there is no operator 'nothing'; there are softmax, ring"),
        (["--ranks", "1"], "--ranks is 1; it must be at least 2"),
        (["--bandwidth", "0"], "--bandwidth is 0; it must be a finite number of at least 1e-06"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "ranks", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
