"""Speed ratios: their arithmetic, resumption and missing packages; no test asserts a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import speed_ratios
from benchmarks.speed_ratios import SQUARE, RatioGroup, ratio_rows

from headwise.bench import Scaling, ScalingJob, Times, Timing
from headwise.bench.peers import OURS, PEERS
from headwise.errors import InputError


def times(forward: float, forward_backward: float) -> Times:
    return Times(Timing(forward, 0.0), Timing(forward_backward, 0.0))


def test_every_name_is_known() -> None:
    for group in speed_ratios.GROUPS:
        for name in group.work:
            kind, _, what = name.partition(": ")
            assert what in {*OURS, *PEERS} if kind == "layer" else kind in ("attention", "product"), name
        for ratio in speed_ratios.expected_ratios(group):
            assert {ratio.slow, ratio.fast} <= set(group.work)
    assert len({group.key for group in speed_ratios.GROUPS}) == len(speed_ratios.GROUPS)


def test_a_ratio_is_the_slow_time_over_the_fast_one() -> None:
    group = next(group for group in speed_ratios.GROUPS if group.name == "linear cost")
    result = {"layer: softmax": times(24.0, 60.0), "layer: efficient": times(2.0, 3.0)}
    rows = {row.what: row for row in ratio_rows({group.key: result}, [group])}
    row = rows["layer: efficient against softmax"]
    assert (row.forward, row.forward_backward, row.expected) == (12.0, 20.0, ">= 12 and 15")
    assert row.as_expected is True
    slower = ratio_rows({group.key: {**result, "layer: softmax": times(24.0, 44.0)}}, [group])
    assert slower[0].as_expected is False  # 44 / 3 is less than 15
    missing = rows["layer: efficient against performer-pytorch"]
    assert (missing.forward, missing.forward_backward, missing.as_expected) == (None, None, None)


def test_the_peak_rate_counts_two_products_forward_and_six_with_backward() -> None:
    group = RatioGroup("peak rate", 1000, ("product: square", "product: two", "attention: factored identity"))
    rate = 1e11
    operations = 4 * 8 * 1000 * 64 * 64
    result = {
        group.work[0]: times(2 * SQUARE**3 / rate, 1.0),
        group.work[1]: times(operations / rate, 1.0),
        group.work[2]: times(4 * operations / rate, 6 * operations / rate),
    }
    best, products = speed_ratios.peak_rate_rows(group, result)
    assert best.forward == pytest.approx(0.25)
    assert best.forward_backward == pytest.approx(0.5)
    assert best.as_expected is False
    assert products.forward == pytest.approx(0.25)
    assert "100 GFLOP/s" in best.what


def test_exponents_are_compared_with_expected_ones() -> None:
    n = [1024, 2048, 4096, 8192]
    slopes = {"softmax": 2.0, "strided": 1.7, "hashed": 1.19, "efficient": 1.0}
    measured = ("forward", "forward_backward", "forward_mb", "forward_backward_mb")
    results = {ScalingJob(name, x): dict.fromkeys(measured, x**slope) for name, slope in slopes.items() for x in n}
    assert {row.what: row.as_expected for row in speed_ratios.exponent_rows(Scaling(results))} == {
        "exponent of time, softmax": True,
        "exponent of time, strided": False,
        "exponent of time, hashed": True,
        "exponent of time, efficient": True,
        "exponent of memory, efficient": True,
    }


def test_a_group_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def fake(group: RatioGroup, **options: float) -> speed_ratios.Result:
        made.append(group.key)
        return {name: times(1.0, 2.0) for name in group.work}

    monkeypatch.setattr(speed_ratios, "measure", fake)
    store, groups = tmp_path / "ratios.jsonl", [RatioGroup("a", 8, ("x", "y")), RatioGroup("b", 8, ("x",))]
    speed_ratios.collect(groups[:1], store)
    with store.open("a") as file:
        file.write('["b at')  # an interrupted run
    first, second = (speed_ratios.collect(groups, store) for _ in range(2))
    assert made == ["a at 8", "b at 8"]
    assert first == second
    assert first["a at 8"]["y"].forward_backward == Timing(2.0, 0.0)


@pytest.mark.parametrize("name", ["layer: efficient", "layer: LinformerAttention 256", "attention: fixed, not causal"])
def test_named_work_runs(name: str) -> None:
    result = speed_ratios.measure(RatioGroup("one", 32, (name,)), rounds=1, seconds=0)
    assert result[name].forward.median > 0
    assert result[name].forward_backward.median > 0


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert speed_ratios.calls_of("layer: linformer", 32) is None


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no group 'nothing'; there are linear cost"):
        speed_ratios.main(["--only", "nothing", "-o", str(tmp_path)])
    for _ in range(2):  # the second time from the file
        speed_ratios.main(["--quick", "--only", "hashed", "-o", str(tmp_path)])
        assert "attention: hashed" in capsys.readouterr().out
