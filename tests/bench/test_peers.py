"""Layers compared with those of other packages; no test asserts a time."""

from __future__ import annotations

import json

import pytest

from headwise.bench import compare_layers
from headwise.cli.bench_command import run
from headwise.errors import InputError
from headwise.outputs import json_text


def test_a_named_peer_is_compared_with_ours() -> None:
    rows, failed = compare_layers(16, names=["torch.nn.MultiheadAttention"], rounds=1, seconds=0)
    assert not failed
    assert [row.name for row in rows] == ["softmax", "torch.nn.MultiheadAttention"]
    ours, theirs = rows
    assert theirs.against == "softmax"
    assert theirs.ratios == pytest.approx(theirs.times.over(ours.times))
    forward = json.loads(json_text(theirs.to_dict()))["times"]["forward"]
    assert forward == {"median": theirs.times.forward.median, "spread": None}  # one round has no spread


def test_our_layers_are_compared_with_softmax() -> None:
    rows, _ = compare_layers(64, names=["softmax", "efficient"], rounds=1, seconds=0)
    softmax, efficient = rows
    assert efficient.ratios == pytest.approx(softmax.times.over(efficient.times))
    with pytest.raises(InputError, match="no layer 'unknown'; there are softmax"):
        compare_layers(64, names=["unknown"])


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="--rounds is 0; it must be at least 1"):
        run(["peers", "--rounds", "0"])
    assert run(["peers", "--quick", "--n", "16", "--rounds", "1", "--layers", "torch.nn.MultiheadAttention"]) == 0
    assert "  torch.nn.MultiheadAttention" in capsys.readouterr().out
