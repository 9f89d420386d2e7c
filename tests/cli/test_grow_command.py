"""`headwise grow`: its output, its files, and what an interruption leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwise.cli.widths import grow_command as grow
from headwise.errors import InputError

QUICK = ["--steps", "48", "--every", "40", "--keys", "16"]


def test_json_and_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grow.run([*QUICK, "--json", "--out", str(tmp_path / "new")]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "new" / "grow.json").read_text())
    assert printed["snapshots"] == written
    assert [s["step"] for s in written] == [0, 10, 20, 30, 40, 48]
    events = [s for s in written if s["event"] is not None]
    assert [s["step"] for s in events] == [40]
    assert len(events[0]["scores"]) == 2
    assert (tmp_path / "new" / "widths.png").stat().st_size > 5000
    assert {p.name for p in (tmp_path / "new").iterdir()} == {".headwise.json", "grow.json", "widths.png"}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert grow.run(["--steps", "4", "--every", "4", "--keys", "16"]) == 0
    printed = capsys.readouterr().out
    assert "Key widths over training" in printed
    assert "2 2" in printed


def test_an_interrupted_run_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import headwise.growth.demo as library

    real = library.train_and_grow

    def interrupted(*args: Any, **options: Any) -> Any:
        for snapshot in real(*args, **options):
            yield snapshot
            if snapshot.step == 20:
                raise KeyboardInterrupt

    monkeypatch.setattr(library, "train_and_grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow.run([*QUICK, "--out", str(tmp_path)])
    assert [s["step"] for s in json.loads((tmp_path / "grow.json").read_text())] == [0, 10, 20]
    assert {p.name for p in tmp_path.iterdir()} == {".headwise.json", "grow.json", "widths.png"}


def test_bad_options(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*file"):
        grow.run(["--out", str(tmp_path / "file")])
    with pytest.raises(InputError, match="--steps is 0; it must be at least 1"):
        grow.run(["--steps", "0"])


def test_a_stretch_ends_where_the_next_begins() -> None:
    assert grow.stretches([0, 10, 20, 30], [2, 2, 4, 4]) == [(0, 20, 2), (20, 30, 4)]
    assert grow.stretches([0, 5], [3, 3]) == [(0, 5, 3)]
    assert grow.stretches([0], [3]) == [(0, 0, 3)]
