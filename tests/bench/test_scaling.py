"""The arithmetic and plumbing of the benchmarks; no test asserts a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import headwise
from headwise.bench import CASES, ScalingJob, Timing, in_turns, load_scaling, measure_scaling, scaling_jobs
from headwise.bench.cases import RECURRENT, factored_with
from headwise.bench.clock import timing
from headwise.bench.worker import memory, times
from headwise.cli.bench_command import run
from headwise.cli.main import main
from headwise.errors import HeadwiseError, InputError
from headwise.theory.complexity import exponent


def test_bench_is_an_attribute_of_the_package() -> None:
    assert headwise.bench.measure_scaling is measure_scaling  # pyright: ignore[reportAttributeAccessIssue]


def test_exponents_and_their_intervals() -> None:
    n = [256, 512, 1024, 2048]
    exact = exponent(n, [1e-6 * x**1.5 for x in n])
    assert exact.value == pytest.approx(1.5)
    assert exact.half_width == pytest.approx(0, abs=1e-9)
    # a wobble of 2^(+-0.1) around a line of slope one: residuals (+, -, -, +) leave the slope as it is
    wobbly = exponent(n, [x * 2**w for x, w in zip(n, (0.1, -0.1, -0.1, 0.1), strict=True)])
    assert wobbly.value == pytest.approx(1.0)
    assert wobbly.half_width == pytest.approx(4.303 * math.sqrt(0.04 / 2 / 5))
    assert math.isnan(exponent(n[:2], [1.0, 2.0]).half_width)
    assert math.isnan(exponent(n[:1], [1.0]).value)


def test_work_is_done_in_turns() -> None:
    calls: list[str] = []
    measured = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert set(measured) == {"a", "b"}
    in_turns({"a": lambda: calls.append("c")}, rounds=100, seconds=0)
    assert calls.count("c") == 2
    assert timing([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(3.0, 2.0)


@pytest.mark.parametrize("name", [*CASES, RECURRENT])
def test_every_row_can_be_measured(name: str) -> None:
    job = {"name": name, "heads": 2, "width": 8}
    _, result = times([{**job, "n": 32}, {**job, "n": 64}], rounds=1, seconds=0)
    assert result["multiply_adds"] > 0
    assert result["forward"] > 0
    assert result["forward_backward"] > 0
    assert result["depth"] >= 1
    assert (result["depth"] == 64) == (name == RECURRENT)
    assert set(memory({**job, "n": 64})) == {"forward_mb", "forward_backward_mb"}


def test_counted_operations_grow_as_claimed() -> None:
    """The exponents of counted multiply-adds, which no other process disturbs, between 4096 and 65536 positions."""
    n = [4096, 16384, 65536]
    for case in CASES.values():
        if case.name in ("softmax", "nystrom 256"):  # at width 4 its r^3 for the pseudo-inverse dominates
            continue
        counts = []
        for length in n:
            q = torch.zeros(1, 1, length, 4)
            counts.append(float(case.build(length)(q, q).cost(4).multiply_adds))
        # blocks of 64 queries meet bands of sqrt n keys and 63 more: strided comes near 1.5 from below
        slack = 0.15 if case.name == "strided" else 0.1
        assert abs(exponent(n, counts).value - case.exponent) <= slack, case.name


def test_slots_do_not_matter_unless_the_projection_is_dense() -> None:
    q = torch.zeros(1, 1, 4096, 64)
    for kind, flat in (("pooling", True), ("CountSketch", True), ("dense", False)):
        few, many = (factored_with(kind, r, 4096)(q, q).cost(64).multiply_adds for r in (64, 512))
        assert (many < 1.15 * few) == flat
    with pytest.raises(InputError, match="no projection 'sparse'; there are pooling, CountSketch and dense"):
        factored_with("sparse", 8, 64)


def test_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def fake(group: list[ScalingJob], rounds: int, seconds: float) -> list[dict[str, float]]:
        made.extend(job.n for job in group)
        return [{"forward": float(job.n), "forward_backward": 2.0 * job.n, "multiply_adds": 1.0} for job in group]

    monkeypatch.setattr("headwise.bench.scaling._times", fake)
    monkeypatch.setattr("headwise.bench.scaling._memory", lambda job: {"forward_backward_mb": 1.0})
    jobs = scaling_jobs(["efficient", "window 128"], [64, 128, 256], ranks=False)
    store = tmp_path / "store.jsonl"
    measure_scaling(jobs[:3], store)
    with store.open("a") as file:
        file.write('["{\\"name\\": \\"eff')  # the last line of an interrupted run
    progress: list[tuple[str, int, int | None]] = []
    whole = measure_scaling(jobs, store, lambda *step: progress.append(step))
    assert made == [64, 128, 256, 64, 128, 256]  # each operator once
    assert progress == [("measuring", 3, 6), ("measuring", 6, 6)]
    assert whole.curve("efficient", "forward") == ([64, 128, 256], [64.0, 128.0, 256.0])
    assert whole.exponent("efficient", "forward").value == pytest.approx(1.0)
    assert load_scaling(store) == whole


def test_an_interrupted_run_prints_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(group: list[ScalingJob], rounds: int, seconds: float) -> list[dict[str, float]]:
        if group[0].name == "efficient":
            raise KeyboardInterrupt
        numbers = {"forward_backward": 2.0, "multiply_adds": 1.0, "depth": 1.0}
        return [{"forward": 0.25 * (1 + (job.name == "softmax")), **numbers} for job in group]

    monkeypatch.setattr("headwise.bench.scaling._times", fake)
    monkeypatch.setattr("headwise.bench.scaling._memory", lambda job: {"forward_backward_mb": 1.0})
    command = ["bench", "scaling", "--n", "64", "128", "-o", str(tmp_path), "--operators"]
    command += ["softmax", "window 128", "efficient"]
    assert main(command) == 130
    shown = capsys.readouterr().out
    assert "2.00 (128)" in shown  # softmax takes twice as long as the window
    assert "efficient" not in shown
    assert "give the same command to continue" in shown
    assert not (tmp_path / "scaling.json").exists()
    assert main([*command[:-1], "--json"]) == 0  # measured already
    assert json.loads(capsys.readouterr().out)["complete"]


def test_a_failure_names_the_operator() -> None:
    with pytest.raises(HeadwiseError, match="no operator 'nothing'"):
        scaling_jobs(["nothing"], [64], ranks=False)
    with pytest.raises(HeadwiseError, match=r"bench: efficient at n = 0 failed: "):
        measure_scaling([ScalingJob("efficient", 0)])


def test_modules_in_the_current_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring process must not import a resource.py that lies in the directory where the command was started."""
    (tmp_path / "resource.py").write_text("raise SystemExit('imported from the current directory')")
    monkeypatch.chdir(tmp_path)
    (result,) = measure_scaling([ScalingJob("efficient", 16)], rounds=1, seconds=0).results.values()
    assert result["forward"] > 0


@pytest.mark.slow
def test_scaling_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["-o", str(tmp_path), "--operators", "efficient", "window 128", "--n", "64", "128"]
    assert run(["scaling", "--quick", *out]) == 0
    shown = capsys.readouterr().out
    assert "efficient" in shown
    assert (tmp_path / "scaling.svg").exists()
    saved = json.loads((tmp_path / "scaling.json").read_text())
    assert len(saved["rows"]) == 4
    assert set(saved["exponents"]) == {"efficient", "window 128"}


def test_bad_options(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .* choose another directory"):
        run(["scaling", "--quick", "-o", str(tmp_path / "file")])
    with pytest.raises(InputError, match="--n is 1; it must be at least 2"):
        run(["scaling", "--n", "1", "-o", str(tmp_path)])


@pytest.mark.parametrize("changed", ["rounds", "seconds", "together", "threads", "headwise", "torch", "machine"])
def test_results_under_other_conditions_are_measured_again(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def fake(group: list[ScalingJob], rounds: int, seconds: float) -> list[dict[str, float]]:
        made.extend(job.n for job in group)
        return [{"forward": float(len(made))} for _ in group]

    monkeypatch.setattr("headwise.bench.scaling._times", fake)
    monkeypatch.setattr("headwise.bench.scaling._memory", lambda job: {})
    jobs, store = [ScalingJob("efficient", 64)], tmp_path / "store.jsonl"
    for _ in range(2):
        measure_scaling(jobs, store, rounds=2, seconds=1.0)
    assert made == [64]
    options = {"rounds": 3} if changed == "rounds" else {"seconds": 2.0} if changed == "seconds" else {}
    if changed in ("threads", "headwise", "torch", "machine"):
        name = {
            "threads": "torch.get_num_threads",
            "headwise": "headwise.bench.kept.__version__",
            "torch": "torch.__version__",
            "machine": "headwise.bench.kept._processor",
        }[changed]
        monkeypatch.setattr(name, (lambda: 77) if changed in ("threads", "machine") else "0.0.1")
    measure_scaling(jobs, store, **{"rounds": 2, "seconds": 1.0, **options}, together=changed == "together")
    assert made == [64, 64]
    assert load_scaling(store).results[jobs[0]]["forward"] == 2.0


def test_a_file_of_the_user_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "scaling.jsonl").write_text("my notes\n")
    with pytest.raises(InputError, match=r"scaling.jsonl is not a file of measurements"):
        measure_scaling([ScalingJob("efficient", 64)], tmp_path / "scaling.jsonl")
    assert (tmp_path / "scaling.jsonl").read_text() == "my notes\n"
