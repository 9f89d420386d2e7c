"""The benchmark's own arithmetic and plumbing; no test asserts a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from headwise.bench import peers
from headwise.bench.cases import ENTRIES, RECURRENT, factored_with
from headwise.bench.clock import Timing, in_turns, timing
from headwise.bench.fidelity import fidelity, random_heads
from headwise.bench.scaling import Job, Scaling, collect, jobs, load
from headwise.bench.worker import memory, times
from headwise.cli.bench_command import run
from headwise.errors import HeadwiseError, InputError
from headwise.theory.complexity import exponent


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
    found = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert set(found) == {"a", "b"}
    assert in_turns({"a": lambda: calls.append("c")}, rounds=100, seconds=0)["a"].median >= 0
    assert calls.count("c") == 2
    assert timing([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(3.0, 2.0)


@pytest.mark.parametrize("name", [*ENTRIES, RECURRENT])
def test_every_row_can_be_measured(name: str) -> None:
    job = {"name": name, "heads": 2, "width": 8}
    _, result = times([{**job, "n": 32}, {**job, "n": 64}], rounds=1, seconds=0)
    assert result["multiply_adds"] > 0
    assert result["forward"] > 0
    assert result["both"] > 0
    assert result["depth"] >= 1
    assert (result["depth"] == 64) == (name == RECURRENT)
    assert memory({**job, "n": 64})["both_mb"] >= 0


def test_counted_operations_grow_as_claimed() -> None:
    """The exponents of counted multiply-adds, which no other process disturbs, between 4096 and 65536 positions."""
    n = [4096, 16384, 65536]
    for entry in ENTRIES.values():
        if entry.name in ("exact", "nystrom 256"):  # the latter's r^3 for the pseudo-inverse hides the rest at width 4
            continue
        counts = []
        for length in n:
            q = torch.zeros(1, 1, length, 4)
            counts.append(float(entry.build(length)(q, q).cost(4).multiply_adds))
        # blocks of 64 queries meet bands of sqrt n keys and 63 more: strided comes near 1.5 from below
        slack = 0.15 if entry.name == "strided" else 0.1
        assert abs(exponent(n, counts).value - entry.exponent) <= slack, entry.name


def test_slots_do_not_matter_unless_the_projection_is_dense() -> None:
    q = torch.zeros(1, 1, 4096, 64)
    for kind, flat in (("pooling", True), ("CountSketch", True), ("dense", False)):
        few, many = (factored_with(kind, r, 4096)(q, q).cost(64).multiply_adds for r in (64, 512))
        assert (many < 1.15 * few) == flat
    with pytest.raises(InputError, match="pooling, CountSketch and dense"):
        factored_with("sparse", 8, 64)


def test_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def fake(group: list[Job], rounds: int, seconds: float):
        made.extend(job.n for job in group)
        return [{"forward": float(job.n), "both": 2.0 * job.n, "multiply_adds": 1.0} for job in group]

    monkeypatch.setattr("headwise.bench.scaling._times", fake)
    monkeypatch.setattr("headwise.bench.scaling._memory", lambda job: {"both_mb": 1.0})
    todo = jobs(["efficient", "window 128"], [64, 128, 256], ranks=False)
    store = tmp_path / "store.jsonl"
    collect(todo[:3], store)
    with store.open("a") as file:
        file.write('{"job": {"name": "eff')  # the last line of an interrupted run
    seen: list[int] = []
    whole = collect(todo, store, seen.append)
    assert made == [64, 128, 256, 64, 128, 256]  # each operator once
    assert seen == [1, 2, 3, 4, 5, 6]
    assert whole.curve("efficient", "forward") == ([64, 128, 256], [64.0, 128.0, 256.0])
    assert whole.exponent("efficient", "forward").value == pytest.approx(1.0)
    assert len(load(store)) == 6


def test_a_failure_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeadwiseError, match="no operator 'nothing'"):
        jobs(["nothing"], [64], ranks=False)
    with pytest.raises(HeadwiseError, match=r"bench: efficient at n = 0 failed: "):
        collect([Job("efficient", 0)])


def test_fidelity_of_what_is_nearly_exact() -> None:
    q, k, v = random_heads(64, heads=2, width=8)
    rows, refused = fidelity(q, k, v)
    assert not refused
    errors = {row.name: row.error for row in rows}
    assert set(errors) == set(ENTRIES) - {"exact"}
    assert errors["window 128"] < 0.6
    assert errors["hashed"] < 1e-5  # one chunk of 64 is everything
    assert all(row.worst >= row.error * 0.99 for row in rows)
    assert [row.cost for row in rows] == sorted(row.cost for row in rows)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fidelity", "--quick", "--n", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == {}
    assert run(["fidelity", "--n", "64"]) == 0
    assert "hashed" in capsys.readouterr().out
    torch.save({"q": torch.zeros(1, 1, 8, 2), "k": torch.zeros(1, 1, 8, 2)}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="needs a dictionary of tensors q, k and v"):
        run(["fidelity", "--tensors", str(tmp_path / "x.pt")])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .* choose another directory"):
        run(["scaling", "--quick", "-o", str(tmp_path / "file")])
    with pytest.raises(InputError, match="--rounds must be at least 1, but is 0"):
        run(["peers", "--rounds", "0"])
    with pytest.raises(InputError, match="--n must be at least 2, but is 1"):
        run(["scaling", "--n", "1", "-o", str(tmp_path)])


def test_a_peer_that_is_named_runs_against_ours_and_what_is_unknown_is_no_number() -> None:
    rows, failed = peers.compare(16, names=["torch.nn.MultiheadAttention"], rounds=1, seconds=0)
    assert not failed
    assert [row.name for row in rows] == ["exact", "torch.nn.MultiheadAttention"]
    assert rows[1].ratio_both > 0
    found = rows[1].to_dict()
    assert found["forward"] == {"median": rows[1].forward.median, "spread": None}  # one round has no spread
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
def test_scaling_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["-o", str(tmp_path), "--operators", "efficient", "window 128", "--n", "64", "128"]
    assert run(["scaling", "--quick", *out]) == 0
    shown = capsys.readouterr().out
    assert "efficient" in shown
    assert (tmp_path / "scaling.svg").exists()
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert len(found["rows"]) == 4
    assert set(found["exponents"]) == {"efficient", "window 128"}
    assert isinstance(Scaling(), Scaling)


@pytest.mark.slow
def test_peers_command(capsys: pytest.CaptureFixture[str]) -> None:
    rows, failed = peers.compare(64, names=["exact", "torch.nn.MultiheadAttention", "efficient"], rounds=1, seconds=0)
    assert not failed
    assert [row.name for row in rows] == ["exact", "efficient", "torch.nn.MultiheadAttention"]
    assert rows[2].against == "exact"
    assert rows[2].ratio_forward == pytest.approx(rows[2].forward.median / rows[0].forward.median)
    with pytest.raises(InputError, match="'nobody' is not among"):
        peers.compare(64, names=["nobody"])
