"""Layers compared with those of other packages; no test asserts a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from headwise.bench import compare_layers
from headwise.cli.bench_command import run
from headwise.cli.main import main
from headwise.errors import InputError
from headwise.outputs import json_text


def test_a_named_peer_is_compared_with_ours() -> None:
    rows, failed = compare_layers(16, names=["torch.nn.MultiheadAttention"], rounds=1, seconds=0)
    assert not failed
    assert [row.name for row in rows] == ["softmax", "torch.nn.MultiheadAttention"]
    ours, theirs = rows
    assert theirs.against == "softmax"
    assert theirs.ratios == pytest.approx(theirs.times.over(ours.times))
    forward = json.loads(json_text(asdict(theirs)))["times"]["forward"]
    assert forward == {"median": theirs.times.forward.median, "spread": None}  # one round has no spread


def test_our_layers_are_compared_with_softmax() -> None:
    rows, _ = compare_layers(64, names=["softmax", "efficient"], rounds=1, seconds=0)
    softmax, efficient = rows
    assert efficient.ratios == pytest.approx(softmax.times.over(efficient.times))
    with pytest.raises(InputError, match="no layer 'unknown'; there are softmax"):
        compare_layers(64, names=["unknown"])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="--rounds is 0; it must be at least 1"):
        run(["peers", "--rounds", "0"])
    with pytest.raises(InputError, match="no layer 'unknown'"):
        run(["peers", "--layers", "unknown", "-o", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
    command = ["peers", "--quick", "--n", "16", "--rounds", "1", "--layers", "torch.nn.MultiheadAttention"]
    assert run([*command, "-o", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "  torch.nn.MultiheadAttention" in shown
    assert "forward, s" in shown
    assert json.loads((tmp_path / "peers.json").read_text())["complete"]


class Layers:
    """Layers that take no time and are interrupted at some call."""

    def __init__(self, stop: int) -> None:
        self.stop, self.calls = stop, list[str]()

    def __call__(self, name: str, n: int) -> tuple[Callable[[], None], Callable[[], None]]:
        def call() -> None:
            if len(self.calls) == self.stop:
                raise KeyboardInterrupt
            self.calls.append(name)

        return call, call


def test_an_interrupted_run_is_printed_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "peers", "--quick", "--n", "16", "32", "--rounds", "3", "--layers", "softmax", "efficient"]
    command += ["-o", str(tmp_path)]
    # a pass of two layers is one warm-up and three rounds: 8 calls; this is the second round with backward at n = 16
    first, second = Layers(8 + 5), Layers(1000)
    monkeypatch.setattr("headwise.bench.peers.layer_calls", first)
    assert main(command) == 130
    shown = capsys.readouterr().out
    assert "n = 16" in shown
    assert "n = 32" not in shown
    assert f"kept in {tmp_path / 'peers.jsonl'}: give the same command to continue" in shown
    assert not (tmp_path / "peers.json").exists()
    monkeypatch.setattr("headwise.bench.peers.layer_calls", second)
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["complete"]
    assert [(row["name"], row["n"]) for row in report["rows"]] == [
        (name, n) for n in (16, 32) for name in ("softmax", "efficient")
    ]
    # 3 of 6 measurements with backward at n = 16 were left, and a warm-up; then everything at n = 32
    assert len(second.calls) == 2 + 3 + 16
    third = Layers(0)
    monkeypatch.setattr("headwise.bench.peers.layer_calls", third)
    assert main([*command, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main([*command, "--fresh"]) == 130  # measures again, so it calls a layer
    assert "give the same command without --fresh, to continue" in capsys.readouterr().out


def test_an_interrupted_run_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headwise.bench.peers.layer_calls", Layers(3))
    command = ["bench", "peers", "--quick", "--n", "16", "--layers", "softmax", "efficient", "-o", str(tmp_path)]
    assert main([*command, "--json"]) == 130
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["name"] == "softmax"
    assert row["times"]["forward"]["median"] is not None
    assert row["times"]["forward_backward"]["median"] is None
