"""`headwise monitor`: alarms and layers on the terminal, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli.main import main
from headwise.examination.monitor import History
from tests.examination.monitor.test_history_page import written


def test_alarms_and_layers_within_eighty_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written().save(tmp_path / "history.json")
    assert main(["monitor", str(path), "-o", str(tmp_path / "page")]) == 0
    out = capsys.readouterr().out
    assert "Net: 12 measurements of 12 heads, steps 0 to 110" in out
    assert "step 70, logit growth in layers.1.attn head 2: the largest score is 6" in out
    assert "layers.2" in out
    assert max(len(line) for line in out.splitlines() if "page" not in line) <= 80
    assert (tmp_path / "page" / "history.html").is_file()
    assert History.load(tmp_path / "page" / "history.json").steps == written().steps


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written().save(tmp_path / "history.json")
    assert main(["monitor", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written().to_dict()


def test_an_empty_history_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = History("Net").save(tmp_path / "history.json")
    assert main(["monitor", str(path)]) == 2
    assert "holds no measurement" in capsys.readouterr().err
