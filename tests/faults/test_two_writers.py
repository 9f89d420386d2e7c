"""Two processes that write one directory: one wins, the other is refused and told who writes, nothing is mixed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WORKER = """
import contextlib, io, json, sys, time
import headwise.examination, headwise.replacement
from headwise.cli.main import main
for line in sys.stdin:
    moment, argv = json.loads(line)
    out, err = io.StringIO(), io.StringIO()
    time.sleep(max(0, moment - time.time()))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
MODELS = [f"python:tests.faults.small_models:{name}" for name in ("one", "two")]
REFUSED = r"headwise \w+: .*out is being written by `headwise (\w+)` \(process (\d+) on \S+, since \S+\); wait for it, "


class Outcome(NamedTuple):
    """How a command in a process ended."""

    pid: int
    code: int
    out: str
    err: str


class Writers:
    """Processes that have imported everything and run commands at the same moment."""

    def __init__(self, count: int) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER]
        self.processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]

    def race(self, commands: list[list[str]]) -> list[Outcome]:
        self._send([["tour", "--side", "0"]] * len(commands))  # refused at once: both are ready
        return self._send(commands)

    def _send(self, commands: list[list[str]]) -> list[Outcome]:
        moment = time.time() + 0.1
        for process, command in zip(self.processes, commands, strict=True):
            print(json.dumps([moment, command]), file=process.stdin, flush=True)
        return [Outcome(process.pid, *json.loads(process.stdout.readline())) for process in self.processes]  # type: ignore[union-attr]

    def close(self) -> None:
        for process in self.processes:
            process.communicate()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    started = Writers(2)
    yield started
    started.close()


def examine(model: str, out: Path) -> list[str]:
    return ["examine", model, "-o", str(out), "--quiet", "--force", "--no-ablations"]


def plan(model: str, out: Path) -> list[str]:
    return ["plan", model, "-o", str(out), "--objective", "multiply-adds", "--quiet", "--force", "--json"]


def check(out: Path, done: list[Outcome], kinds: list[str]) -> None:
    assert sorted(outcome.code for outcome in done) == [0, 2], [outcome.err for outcome in done]
    winner = next(i for i, outcome in enumerate(done) if outcome.code == 0)
    loser = done[1 - winner]
    refused = re.match(REFUSED, loser.err)
    assert refused, loser.err
    assert loser.err.count("\n") == 1
    assert refused.groups() == (kinds[winner], str(done[winner].pid))
    assert not loser.out
    hidden = {file.name for file in out.iterdir() if file.name.startswith(".")}
    assert hidden == {".headwise.json"}
    files = json.loads((out / ".headwise.json").read_text())["files"]
    assert len({entry["key"] for entry in files.values() if entry["command"] == kinds[winner]}) == 1
    if kinds[winner] == "examine":
        facts = json.loads((out / "report.json").read_text())
        assert facts["provenance"]["command"].split()[2] == MODELS[winner]
        assert facts["provenance"]["run"] == files["report.html"]["key"]
        assert facts["provenance"]["run"] in (out / "report.html").read_text()
    else:
        facts = json.loads((out / "plan.json").read_text())
        assert facts["provenance"]["command"].split()[2] == MODELS[winner]
        assert facts["provenance"]["run"] == files["plan.json"]["key"]


KINDS = [["examine", "examine"], ["plan", "plan"], ["examine", "plan"]]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids="x".join)
def test_twenty_starts_of_two_writers(tmp_path: Path, kinds: list[str], writers: Writers) -> None:
    out = tmp_path / "out"
    for _ in range(20):
        commands = [{"examine": examine, "plan": plan}[k](model, out) for k, model in zip(kinds, MODELS, strict=True)]
        check(out, writers.race(commands), kinds)


LOCK = """
import os, sys, time
from headwise.errors import InputError
from headwise.output_directory import OutputDirectory
if sys.argv[2] == "creation":
    import headwise.locks
    headwise.locks.fcntl = None
while not os.path.exists(sys.argv[1] + "-go"):
    time.sleep(0.0005)
try:
    with OutputDirectory(sys.argv[1], command="examine") as out:
        out.write_text("a", str(os.getpid()))
        time.sleep(1)
except InputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("way, stale", [("flock", False), ("flock", True), ("creation", True)])
def test_of_many_writers_one_wins(tmp_path: Path, way: str, stale: bool) -> None:
    """Also over the lock file of a process that has been killed."""
    out = tmp_path / "out"
    if stale:
        out.mkdir()
        owner = {"headwise": "plan", "pid": 2**22 + 1, "host": os.uname().nodename, "since": "then"}
        (out / ".headwise.lock").write_text(json.dumps(owner))
    command = [sys.executable, "-c", LOCK, str(out), way]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    subprocess.run([sys.executable, "-c", "import headwise.outputs"], check=True)  # as long as the others need to start
    Path(f"{out}-go").touch()
    printed = [process.communicate(timeout=60)[0] for process in started]
    codes = [process.returncode for process in started]
    assert sorted(codes) == [0] + [2] * 4
    winner = started[codes.index(0)].pid
    assert (out / "a").read_text() == str(winner)
    for code, text in zip(codes, printed, strict=True):
        assert code == 0 or f"by `headwise examine` (process {winner} on " in text
