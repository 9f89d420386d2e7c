"""The distance of every operator from softmax attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headwise.bench import CASES, measure_fidelity
from headwise.bench.fidelity import measured_fidelity, random_heads
from headwise.bench.kept import Kept
from headwise.cli.bench_command import run
from headwise.errors import InputError
from headwise.operators import softmax


def test_distance_from_softmax() -> None:
    q, k, v = random_heads(64, heads=2, width=8)
    rows, refused = measure_fidelity([(q, k, v)])
    assert not refused
    errors = {row.name: row.error for row in rows}
    assert set(errors) == set(CASES) - {"softmax"}
    assert errors["window 128"] < 0.6
    assert errors["hashed"] < 1e-5  # one chunk of 64 holds all keys
    assert all(row.worst >= row.error * 0.99 for row in rows)
    assert [row.cost for row in rows] == sorted(row.cost for row in rows)


def test_several_layers_are_averaged() -> None:
    layers = [random_heads(32, heads=2, width=8, seed=seed) for seed in range(2)]
    singles = [{row.name: row for row in measure_fidelity([layer])[0]} for layer in layers]
    rows, _ = measure_fidelity(layers)
    for row in rows:
        assert row.error == pytest.approx((singles[0][row.name].error + singles[1][row.name].error) / 2)
        assert row.worst == max(single[row.name].worst for single in singles)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fidelity", "--quick", "--n", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == {}
    assert run(["fidelity", "--n", "64"]) == 0
    assert "hashed" in capsys.readouterr().out
    torch.save({"q": torch.zeros(1, 1, 8, 2), "k": torch.zeros(1, 1, 8, 2)}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="must be a dictionary of tensors q, k and v"):
        run(["fidelity", "--tensors", str(tmp_path / "x.pt")])
    (tmp_path / "x.py").write_text("print(1)")
    with pytest.raises(InputError, match=r"x\.py was not saved by torch.save"):
        run(["fidelity", "--tensors", str(tmp_path / "x.py")])


def test_what_is_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [random_heads(32, heads=2, width=8, seed=seed) for seed in range(2)]
    kept = Kept(tmp_path / "fidelity.jsonl", {})

    def interrupt(what: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_fidelity(layers, kept=kept, progress=interrupt)
    assert measured_fidelity(layers, kept) == measure_fidelity(layers[:1])
    whole = measure_fidelity(layers)
    built: list[object] = []
    monkeypatch.setattr(
        "headwise.bench.fidelity.softmax", lambda q, k, **mask: built.append(q) or softmax(q, k, **mask)
    )
    assert measure_fidelity(layers, kept=Kept(tmp_path / "fidelity.jsonl", {})) == whole
    assert len(built) == 2  # exact attention of the second layer alone, causal and not
    out = ["fidelity", "--n", "64", "-o", str(tmp_path / "out")]
    assert run(out) == 0
    assert json.loads((tmp_path / "out" / "fidelity.json").read_text())["complete"]
    with pytest.raises(InputError, match="use --force"):
        run(out)
