"""Targets as ratios: arithmetic, what is asked of whom, resumption and absent packages; no test asserts a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from headwise.bench import races, targets
from headwise.bench.clock import Timing
from headwise.bench.peers import OURS, PEERS
from headwise.bench.races import Race, Times
from headwise.bench.scaling import Job, Scaling
from headwise.cli.bench_command import run
from headwise.errors import InputError


def times(forward: float, both: float) -> Times:
    return Times(Timing(forward, 0.0), Timing(both, 0.0))


def test_every_runner_has_a_name_that_is_known() -> None:
    layers = {*OURS, *(peer.name for peer in PEERS)}
    for race in targets.RACES:
        for name in race.runners:
            kind, _, what = name.partition(": ")
            assert what in layers if kind == "layer" else kind in ("attention", "product"), name
        for target in targets.targets(race):
            assert {target.slow, target.fast} <= set(race.runners)
    assert len({race.key for race in targets.RACES}) == len(targets.RACES)


def test_a_ratio_is_the_slow_time_over_the_fast_one() -> None:
    race = next(race for race in targets.RACES if race.name == "linear cost")
    result = {"layer: exact": times(24.0, 60.0), "layer: efficient": times(2.0, 3.0)}
    found = {row.what: row for row in targets.rows({race.key: result}, [race])}
    row = found["layer: efficient against exact"]
    assert (row.forward, row.both, row.asked, row.met) == (12.0, 20.0, ">= 12 and 15", True)
    late = targets.rows({race.key: {**result, "layer: exact": times(24.0, 44.0)}}, [race])
    assert late[0].met is False  # 44 / 3 is less than 15
    absent = found["layer: efficient against performer-pytorch"]
    assert (absent.forward, absent.both, absent.met) == (None, None, None)


def test_the_roof_counts_two_products_forward_and_six_with_backward() -> None:
    race = Race("roof", 1000, ("product: square", "product: two", "attention: factored identity"))
    rate = 1e11
    work = 4 * 8 * 1000 * 64 * 64
    result = {
        race.runners[0]: times(2 * races.SQUARE**3 / rate, 1.0),
        race.runners[1]: times(work / rate, 1.0),
        race.runners[2]: times(4 * work / rate, 6 * work / rate),
    }
    best, own = targets.roof(race, {race.key: result})
    assert best.forward == pytest.approx(0.25)
    assert best.both == pytest.approx(0.5)
    assert best.met is False
    assert own.forward == pytest.approx(0.25)
    assert "100 GFLOP/s" in best.what


def test_exponents_are_held_against_what_was_asked() -> None:
    def measured(power: float) -> dict[str, float]:
        return dict.fromkeys(("forward", "both", "forward_mb", "both_mb"), power)

    n = [1024, 2048, 4096, 8192]
    slopes = {"exact": 2.0, "strided": 1.7, "hashed": 1.19, "efficient": 1.0}
    results = {
        Job(name, x): {what: x**power for what, power in measured(slope).items()}
        for name, slope in slopes.items()
        for x in n
    }
    met = {row.what: row.met for row in targets.exponent_rows(Scaling(results))}
    assert met == {
        "exponent of time, exact": True,
        "exponent of time, strided": False,
        "exponent of time, hashed": True,
        "exponent of time, efficient": True,
        "exponent of memory, efficient": True,
    }


def test_a_race_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def fake(race: Race, **options: float) -> races.Result:
        made.append(race.key)
        return {name: times(1.0, 2.0) for name in race.runners}

    monkeypatch.setattr(races, "run", fake)
    store, todo = tmp_path / "races.jsonl", [Race("a", 8, ("x", "y")), Race("b", 8, ("x",))]
    races.collect(todo[:1], store, lambda count: None)
    with store.open("a") as file:
        file.write('{"race": "b at')  # an interrupted run
    seen: list[int] = []
    found = races.collect(todo, store, seen.append)
    assert made == ["a at 8", "b at 8"]
    assert seen == [1, 2]
    assert found["a at 8"]["y"].both == Timing(2.0, 0.0)
    assert set(races.load(store)) == {"a at 8", "b at 8"}


@pytest.mark.parametrize("name", ["layer: efficient", "layer: shortened 256", "attention: fixed, both ways"])
def test_runners_run(name: str) -> None:
    found = races.run(Race("one", 32, (name,)), rounds=1, seconds=0)
    assert found[name].forward.median > 0
    assert found[name].both.median > 0


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert races.runner("layer: linformer", 32) is None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no comparison 'nothing'; there are linear cost"):
        run(["targets", "--only", "nothing", "-o", str(tmp_path)])
    assert run(["targets", "--quick", "--only", "hashed", "-o", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows
    assert all(math.isfinite(row["forward"]) for row in rows)
    assert run(["targets", "--quick", "--only", "hashed", "-o", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "hashed" in shown
    assert "no exponents: run `headwise bench scaling" in shown
