"""Files under their final name are complete and of one run, and only files that headwise wrote are replaced."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise import output_directory
from headwise.errors import InputError
from headwise.output_directory import MARKER, PARTIAL, STAGED, OutputDirectory
from headwise.outputs import (
    append_line,
    atomic,
    json_text,
    new_file,
    partial_results,
    read_lines,
    write_json,
    write_text,
)

NAMES = ("report.html", "report.json", "figures/a.svg", "figures/b.svg")


def write_run(path: Path, text: str, *, names: tuple[str, ...] = NAMES, **options: bool) -> None:
    with OutputDirectory(path, command="examine", names=NAMES, **options) as out:
        out.key = text
        for name in names:
            out.write_text(name, f"{name} of {text}")


def contents(path: Path) -> dict[str, str]:
    """What a user sees: every file that is not hidden."""
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {file.relative_to(path).as_posix(): file.read_text() for file in files}


def of_run(text: str, names: tuple[str, ...] = NAMES) -> dict[str, str]:
    return {name: f"{name} of {text}" for name in names}


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


def test_a_run_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> None:
        with OutputDirectory(tmp_path / "new" / "out", command="examine") as out:
            out.write_text("report.html", "page")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert os.listdir(tmp_path) == []  # directories made for the run are gone too
    write_run(tmp_path / "new" / "out", "one")
    assert contents(tmp_path / "new" / "out") == of_run("one")
    assert {file.name for file in (tmp_path / "new" / "out").iterdir()} == {
        MARKER,
        "report.html",
        "report.json",
        "figures",
    }


def test_our_own_results_are_replaced_only_with_force(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    with pytest.raises(InputError, match=r"holds results of `headwise examine` \(report.html\); use --force"):
        write_run(tmp_path, "two")
    assert contents(tmp_path) == of_run("one")
    write_run(tmp_path, "two", names=NAMES[:3], force=True)  # without figures/b.svg, which is then removed
    assert contents(tmp_path) == of_run("two", NAMES[:3])


@pytest.mark.parametrize("name", ["report.html", "figures/a.svg"])
def test_files_of_the_user_are_never_replaced(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    (tmp_path / "figures").mkdir(exist_ok=True)
    (tmp_path / "figures" / "thesis.pdf").write_text("mine too")
    with pytest.raises(InputError, match=rf"{name} was not written by headwise"):
        write_run(tmp_path, "one", force=True)
    file.unlink()
    write_run(tmp_path, "one")
    write_run(tmp_path, "two", force=True)
    assert contents(tmp_path) == {**of_run("two"), "figures/thesis.pdf": "mine too"}


def test_edited_results_are_never_replaced(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    (tmp_path / "report.json").write_text("edited")
    with pytest.raises(InputError, match=r"report.json has been changed since headwise wrote it"):
        write_run(tmp_path, "two", force=True)
    assert contents(tmp_path) == {**of_run("one"), "report.json": "edited"}
    (tmp_path / "figures" / "b.svg").write_text("edited")
    (tmp_path / "report.json").unlink()
    with pytest.raises(InputError, match=r"b.svg has been changed"):
        write_run(tmp_path, "two", names=NAMES[:3], force=True)


def test_a_file_that_appears_during_the_run_is_kept(tmp_path: Path) -> None:
    def run() -> None:
        with OutputDirectory(tmp_path, command="examine", names=NAMES) as out:
            out.write_text("report.html", "ours")
            (tmp_path / "report.html").write_text("mine")

    with pytest.raises(InputError, match="was not written by headwise"):
        run()
    assert contents(tmp_path) == {"report.html": "mine"}


def test_an_exclusive_directory_holds_nothing_else(tmp_path: Path) -> None:
    def run(text: str, name: str = "config.json", **options: bool) -> None:
        with OutputDirectory(tmp_path / "out", command="rewrite", exclusive=True, **options) as out:
            (out.staged / name).write_text(text)

    run("one", "shard-1")
    with pytest.raises(InputError, match=r"exists already and holds results of `headwise rewrite` \(shard-1\)"):
        run("two")
    run("two", force=True)
    assert contents(tmp_path / "out") == {"config.json": "two"}  # the shard of the earlier run is gone
    (tmp_path / "out" / "pytorch_model.bin").write_text("mine")
    with pytest.raises(InputError, match=r"exists already and holds pytorch_model.bin, which headwise did not write"):
        run("three", force=True)


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("killed", [False, True])
def test_an_interruption_while_files_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, killed: bool
) -> None:
    """Ctrl-C leaves the old set or the new one; a kill leaves what the next run that opens the directory completes."""
    write_run(tmp_path, "old")
    left, real = [steps], Path.replace

    def replace(self: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0 and (killed or left[0] == -1):
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with contextlib.suppress(KeyboardInterrupt):
            write_run(tmp_path, "new", force=True)
    if not killed:
        assert contents(tmp_path) in (of_run("old"), of_run("new"))
    with pytest.raises(InputError, match="use --force"):
        write_run(tmp_path, "third")
    assert contents(tmp_path) in (of_run("old"), of_run("new"))
    assert not (tmp_path / STAGED).exists()
    write_run(tmp_path, "fourth", force=True)
    assert contents(tmp_path) == of_run("fourth")


def test_a_set_that_cannot_be_completed_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, "old")
    marker = json.loads((tmp_path / MARKER).read_text())
    entry = {**marker["files"]["report.html"], "sha256": "0" * 64}
    (tmp_path / MARKER).write_text(json.dumps({**marker, "publishing": {"report.html": entry}, "stale": []}))
    with pytest.raises(InputError, match=r"was killed while it wrote its results, and report.html is missing"):
        write_run(tmp_path, "new")
    write_run(tmp_path, "new", force=True)
    assert contents(tmp_path) == of_run("new")


@pytest.mark.parametrize(
    "marker",
    ["", "[]", '{"schema": 1, "files": 3}', '{"schema": 1, "files": {"report.html": {}}}', "[" * 10000, "\udcff"],
)
def test_with_a_damaged_marker_no_file_counts_as_ours(tmp_path: Path, marker: str) -> None:
    write_run(tmp_path, "one")
    (tmp_path / MARKER).write_bytes(marker.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"report.html was not written by headwise"):
        write_run(tmp_path, "two", force=True)
    assert contents(tmp_path) == of_run("one")


def test_a_marker_cannot_name_files_outside(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    write_run(tmp_path / "out", "one")
    marker = json.loads((tmp_path / "out" / MARKER).read_text())
    entry = {**output_directory._contents(tmp_path / "mine"), "command": "examine", "key": ""}
    marker["files"]["../mine"] = marker["files"][str(tmp_path / "mine")] = entry
    marker |= {"publishing": {"report.html": marker["files"]["report.html"]}, "stale": ["../mine"]}
    (tmp_path / "out" / MARKER).write_text(json.dumps(marker))
    write_run(tmp_path / "out", "two", force=True)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    with (
        OutputDirectory(tmp_path, command="plan"),
        pytest.raises(InputError, match=rf"is being written by `headwise plan` \(process {os.getpid()} on .*, since"),
        OutputDirectory(tmp_path, command="examine"),
    ):
        pass
    with OutputDirectory(tmp_path, command="examine"):  # released
        pass
    assert os.listdir(tmp_path) == []


HOLD = """
import sys, time
from headwise.output_directory import OutputDirectory
with OutputDirectory(sys.argv[1], command="plan"):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("has_flock", [True, False])
def test_the_lock_of_a_killed_run_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_flock: bool) -> None:
    code = HOLD if has_flock else "import headwise.locks; headwise.locks.fcntl = None\n" + HOLD
    if not has_flock:
        monkeypatch.setattr("headwise.locks.fcntl", None)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(InputError, match=f"process {process.pid}"), OutputDirectory(tmp_path, command="examine"):
            pass
        process.kill()
    write_run(tmp_path, "one")
    assert contents(tmp_path) == of_run("one")
    assert not (tmp_path / ".headwise.lock").exists()


def test_a_lock_file_of_the_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".headwise.lock").write_text("my notes")
    with pytest.raises(InputError, match="not a lock file of headwise"):
        write_run(tmp_path, "one")
    assert (tmp_path / ".headwise.lock").read_text() == "my notes"


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file: it is a file; choose another directory"):
        write_run(tmp_path / "file", "one")
    with pytest.raises(InputError, match=r"cannot write to .*file/below: Not a directory"):
        write_run(tmp_path / "file" / "below", "one")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "figures").write_text("")
    with pytest.raises(InputError, match=r"figures is not a directory"):
        write_run(tmp_path / "out", "one", force=True)
    (tmp_path / "other" / "report.html").mkdir(parents=True)
    with pytest.raises(InputError, match=r"report.html was not written by headwise"):
        write_run(tmp_path / "other", "one", force=True)


def test_symbolic_links_are_followed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")  # does not exist yet
    write_run(tmp_path / "link", "one")
    write_run(tmp_path / "link", "two", force=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == of_run("two")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="loop"):
        write_run(tmp_path / "loop", "one")
    (tmp_path / "real" / "report.html").rename(tmp_path / "elsewhere.html")
    (tmp_path / "real" / "report.html").symlink_to(tmp_path / "elsewhere.html")
    with pytest.raises(InputError, match=r"report.html has been changed"):
        write_run(tmp_path / "real", "three", force=True)


@pytest.mark.parametrize("name", ["runs[exp]", "with spaces", "two\nlines", "[/x]", "$\\frac$", "ünï", "\udcff"])
def test_any_name_of_a_directory(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / name, "one")
    write_run(tmp_path / name, "two", force=True)
    assert contents(tmp_path / name) == of_run("two")
    with pytest.raises(InputError) as error:
        write_run(tmp_path / name, "three")
    assert "\n" not in str(error.value)
    str(error.value).encode()


def test_a_directory_that_cannot_be_written() -> None:
    with pytest.raises(InputError, match=r"cannot write to /proc/headwise/out: .*; choose another directory"):
        write_run(Path("/proc/headwise/out"), "one")


def test_partial_results_of_the_user_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "chapter.tex").write_text("mine")
    with pytest.raises(InputError, match=r"chapter.tex was not written by headwise"):
        write_run(tmp_path, "one")
    assert (tmp_path / PARTIAL / "chapter.tex").read_text() == "mine"


def test_a_new_file(tmp_path: Path) -> None:
    file, link = tmp_path / "deep" / "a.pt", tmp_path / "link.pt"
    with new_file(file) as temporary:
        temporary.write_text("1")
    with pytest.raises(InputError, match=r"a.pt exists already; use --force"), new_file(file):
        pytest.fail("refused before the work begins")
    link.symlink_to(file)
    with new_file(link, force=True) as temporary:
        temporary.write_text("2")
    assert link.is_symlink()
    assert file.read_text() == "2"
    assert os.listdir(tmp_path / "deep") == ["a.pt"]
    with pytest.raises(InputError, match=r"deep is a directory"), new_file(tmp_path / "deep", force=True):
        pass

    def failing() -> None:
        with new_file(tmp_path / "other" / "a.pt"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert not (tmp_path / "other").exists()


def test_partial_results_of_another_run_are_refused(tmp_path: Path) -> None:
    partial_results(tmp_path / "work", "one")
    partial_results(tmp_path / "work", "one")
    with pytest.raises(InputError, match="another model"):
        partial_results(tmp_path / "work", "two")
    (tmp_path / "work" / "key").write_bytes(b"\xff\x00")
    with pytest.raises(InputError, match="another model"):
        partial_results(tmp_path / "work", "one")
    (tmp_path / "work" / "key").unlink()
    (tmp_path / "work" / "batch-000000.pt").write_bytes(b"")  # a result without a key
    with pytest.raises(InputError, match="another model"):
        partial_results(tmp_path / "work", "one")


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    append_line(file, "a", 1)
    append_line(file, "a", [2, None])
    good = file.read_bytes()
    with file.open("ab") as out:
        out.write(good.replace(b"[2", b"[3") + b'\xff\xfe\n7\n["a", 9]\n[["a"], 9, "x"]\n{"a": 1}\n["b", ')
    assert read_lines(file) == {"a": 1}  # the last line that is whole
    append_line(file, "c", 3)  # on a line of its own
    assert read_lines(file) == {"a": 1, "c": 3}


def test_temporary_files_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the largest process id of Linux
    for name in (f".a.headwise-{dead}.json", f".b.headwise-{dead}.json", f".a-{dead}.json", ".a.headwise-x.json"):
        (tmp_path / name).write_text("")
    write_json(tmp_path / "a.json", 1)
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["a.json", f".b.headwise-{dead}.json", f".a-{dead}.json", ".a.headwise-x.json"]
    )


def test_files_are_removed_although_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree(path: Path) -> None:  # it lists the directory, which takes a descriptor
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with contextlib.suppress(KeyboardInterrupt), OutputDirectory(tmp_path / "out", command="examine") as out:
        out.write_text("figures/a.svg", "a")
        monkeypatch.setattr("shutil.rmtree", rmtree)
        raise KeyboardInterrupt
    assert [x for x in tmp_path.rglob("*") if x.is_file()] == []


def test_the_marker_of_a_run_that_was_killed_while_writing_it_is_not_foreign(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = out / f"..headwise.headwise-{process.pid}.json"
    left.touch()
    with OutputDirectory(out, command="rewrite", exclusive=True) as directory:
        (directory.staged / "model.bin").write_bytes(b"x")
    assert not left.exists()
