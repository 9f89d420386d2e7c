"""A file under its final name is complete, whatever happens while it is written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from headwise.errors import InputError
from headwise.outputs import (
    append_line,
    atomic,
    json_text,
    new_directory,
    partial_results,
    read_lines,
    write_json,
    write_text,
)


def test_an_interrupted_write_leaves_the_previous_file(tmp_path: Path) -> None:
    file = tmp_path / "result.txt"
    write_text(file, "first")

    def interrupted() -> None:
        with atomic(file) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1.0, math.nan, (math.inf,)]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1.0, None, [None]]}
    assert json_text(math.nan) == "null"


def test_errors_of_the_file_system_name_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file/below/a.txt"):
        write_text(tmp_path / "file" / "below" / "a.txt", "")


def test_a_new_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> None:
        with new_directory(tmp_path / "out") as directory:
            (directory / "a").write_text("1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert os.listdir(tmp_path) == []
    with new_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("1")
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(InputError, match="exists already"), new_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "a").read_text() == "1"


def test_partial_results_of_another_run_are_refused(tmp_path: Path) -> None:
    partial_results(tmp_path / "work", "one")
    partial_results(tmp_path / "work", "one")
    with pytest.raises(InputError, match="another model"):
        partial_results(tmp_path / "work", "two")


def test_a_line_cut_off_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    append_line(file, "a", 1)
    append_line(file, "a", [2, None])
    with file.open("a") as out:
        out.write('["b", ')
    assert read_lines(file) == {"a": [2, None]}
    append_line(file, "c", 3)  # on a line of its own
    assert read_lines(file) == {"a": [2, None], "c": 3}
