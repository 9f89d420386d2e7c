"""The command: its facts, its files, and what is left when it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwise.cli import grow_command as grow
from headwise.errors import InputError

QUICK = ["--steps", "48", "--every", "40", "--keys", "16"]


def test_json_and_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grow.run([*QUICK, "--json", "--out", str(tmp_path / "new")]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "new" / "grow.json").read_text())
    assert printed["moments"] == written
    assert [m["step"] for m in written] == [0, 10, 20, 30, 40, 48]
    asked = [m for m in written if m["event"] is not None]
    assert [m["step"] for m in asked] == [40]
    assert len(asked[0]["bottlenecks"]) == 2
    assert (tmp_path / "new" / "widths.png").stat().st_size > 5000
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"grow.json", "widths.png"}


def test_the_table_names_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert grow.run(["--steps", "4", "--every", "4", "--keys", "16"]) == 0
    printed = capsys.readouterr().out
    assert "key widths over training" in printed
    assert "2 2" in printed


def test_an_interrupted_run_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import headwise.growth.training as library

    real = library.train_and_grow

    def interrupted(*args: Any, **options: Any) -> Any:
        for moment in real(*args, **options):
            yield moment
            if moment.step == 20:
                raise KeyboardInterrupt

    monkeypatch.setattr(library, "train_and_grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow.run([*QUICK, "--out", str(tmp_path)])
    assert [m["step"] for m in json.loads((tmp_path / "grow.json").read_text())] == [0, 10, 20]
    assert {p.name for p in tmp_path.iterdir()} == {"grow.json", "widths.png"}


def test_bad_options_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made a directory"):
        grow.run(["--out", str(tmp_path / "file")])
    with pytest.raises(InputError, match="must be at least 1"):
        grow.run(["--steps", "0"])


def test_stretches_of_one_width_meet_where_the_head_grew() -> None:
    assert grow._spells([0, 10, 20, 30], [2, 2, 4, 4]) == [(0, 20, 2), (20, 30, 4)]
    assert grow._spells([0, 5], [3, 3]) == [(0, 5, 3)]
    assert grow._spells([0], [3]) == [(0, 0, 3)]
