"""The model of what attention on many processes costs: its arithmetic, what it is fitted to, and its command."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headwise.bench import sharded_runs
from headwise.bench.sharded_cases import HEADS, WIDTH, sharded_cases
from headwise.bench.sharded_cost import ComputeCost, Link, communication, compared, fitted_costs, projected_times
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
    case, link = sharded_cases()["window 129"], Link(1e9, 1e-3)
    cost = ComputeCost(0.5, 1e-9)
    halo = 4 * HEADS * 2 * WIDTH * 128  # bytes, causal: from one side
    travelling = 3 * halo / 1e9 + 3 * case.messages(4) * 1e-3
    assert communication(case, 8192, 4, link) == pytest.approx(travelling)
    assert communication(case, 8192, 1, link) == 0
    alone = 0.5 + 1e-9 * case.work(8192) / 4
    assert cost.seconds(case, 8192, 4, link) == pytest.approx(alone + travelling)
    assert cost.seconds(case, 8192, 4, link, cores=2) == pytest.approx(2 * alone + travelling)
    assert cost.seconds(case, 8192, 4, link, cores=8) == pytest.approx(alone + travelling)


def test_projections() -> None:
    cases = {name: sharded_cases()[name] for name in ("softmax, heads", "softmax, ring", "projected 128")}
    costs = dict.fromkeys(cases, ComputeCost(0.0, 1e-9))
    found = {(x.name, x.ranks): x for x in projected_times(cases, costs, [10_000_000], [2, 1024], Link())}
    assert math.isnan(found["softmax, heads", 1024].seconds)  # there are four heads
    ring = found["softmax, ring", 1024]
    received = 4 * HEADS * 2 * WIDTH * 10_000_000 * 1023 / 1024
    assert ring.communication == pytest.approx(3 * received / 25e9 + 3 * 1023 * 20e-6)
    assert ring.seconds > ring.communication
    assert found["softmax, ring", 2].seconds > 400 * (ring.seconds - ring.communication)


def test_two_processes_receive_what_the_formulas_say() -> None:
    names, cases = ["window 129", "efficient"], sharded_cases()
    found = run_sharded(sharded_cases, 2, repeats=1, shrink=16, names=names)
    assert found.keys() == {"link", *names}
    for name in names:
        assert found[name]["n"] == 512
        assert found[name]["received"] == cases[name].received(512, 2)
        assert found[name]["busy"] > 0


def canned(make: Any, size: int, *, names: list[str] | None = None, **settings: Any) -> dict[str, Any]:
    """A machine that computes 1e9 multiply-adds a second and sends nothing."""
    found: dict[str, Any] = {"link": {"latency": 0.0, "bandwidth": 1e30}}
    for name, case in make().items():
        if names is None or name in names:
            seconds = case.work(case.n) / 1e9 / size
            found[name] = {"n": case.n, "seconds": seconds, "spread": 0.0, "busy": seconds, "received": 0.0}
            found[name]["alone"] = [[n, case.work(n) / 1e9] for n in (case.n, case.n // 2)]
    return found


def test_what_is_predicted_is_compared_with_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.bench.sharded_cost.cores", lambda: 2)
    runs = {size: canned(sharded_cases, size) for size in (1, 2, 4)}
    rows = compared(sharded_cases(), fitted_costs(sharded_cases(), runs[1]), runs)
    assert len(rows) == 3 * len(sharded_cases())
    for row in rows:  # with four processes on two cores it would take twice as long as it says
        assert row.ratio == pytest.approx(2 if row.ranks == 4 else 1, rel=0.01)


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
