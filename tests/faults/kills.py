"""Kill every long command at random moments, then finish the work and compare it with an uninterrupted run."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.faults.checks import Trial, check_files, check_planted, check_sentence, plant, tree
from tests.faults.server import ONE_THREAD, QUIET, ROOT, SIGNALS, Ended, Server
from tests.faults.subjects import Subject

CODES = {"kill": 137, "term": 143, "int": 130}


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its result, files, duration and number of file-system calls that write."""

    numbers: Any
    files: set[str]
    seconds: float
    writes: int


def uninterrupted(server: Server, directory: Path, session: Path, subject: Subject) -> Reference:
    plant(directory, subject)
    ended = server.run(subject.command(session), directory, **subject.request(session))
    assert ended.code == 0, f"{subject.name} ended with {ended.code}: {ended.err}"
    files = tree(directory) - set(subject.planted)
    return Reference(subject.numbers(directory, ended.out), files, ended.seconds, ended.writes)


@dataclass(frozen=True)
class Kill:
    """One interruption.

    moment   "0.37": after that fraction of the run's time; "write 12": at the 12th file-system call that writes;
             "write 12 + 0.001": so many seconds after it
    over     the directory holds the finished result of another run, which is being replaced
    """

    subject: Subject
    signal: str
    moment: str
    over: bool = False
    cold: bool = False  # a new interpreter instead of a fork

    def __str__(self) -> str:
        return f"SIG{self.signal.upper()} at {self.moment}" + ", over another result" * self.over + ", cold" * self.cold


def draw_kills(
    subjects: Sequence[Subject], references: Mapping[str, Reference], count: int, rng: random.Random
) -> Iterator[Kill]:
    """`count` kills: signals in turn, half of the moments spread over the time, half at the calls that write."""
    whole = sum(subject.share for subject in subjects)
    for subject in subjects:
        signals = itertools.cycle(rng.sample(sorted(SIGNALS), 3))
        for index in range(max(1, round(count * subject.share / whole))):
            moment = draw_moment(index, references[subject.name].writes, rng)
            yield Kill(subject, next(signals), moment, over=bool(subject.other) and index % 8 == 5)


def draw_moment(index: int, writes: int, rng: random.Random, until: float = 1.0) -> str:
    """A moment in the first part `until` of the run."""
    if index % 2 == 0 or not writes:
        return f"{rng.uniform(0.02, 0.98) * until:.3f}"
    at = rng.randint(1, max(1, int(writes * until)))
    return f"write {at}" if index % 4 == 1 else f"write {at} + {rng.uniform(0, 0.004):.4f}"


def earlier(kill: Kill, reference: Reference, attempt: int) -> Kill:
    """The same kind of kill in an earlier part of the run: on a busy machine runs do not take as long as before."""
    rng = random.Random(f"{kill.subject.name} {kill} {attempt}")
    index = 0 if kill.cold or not kill.moment.startswith("write") else 3 if "+" in kill.moment else 1
    return replace(kill, moment=draw_moment(index, reference.writes, rng, until=0.6**attempt))


def kill_once(server: Server, directory: Path, session: Path, kill: Kill, reference: Reference) -> Trial:
    """Interrupt a run, look at what it left, finish it, and compare."""
    subject = kill.subject
    trial = Trial(f"SIG{kill.signal.upper()}", subject.name, str(kill))
    plant(directory, subject)
    before: dict[str, bytes] = {}
    extra: tuple[str, ...] = ()
    if kill.over:
        extra = ("--force",)
        shutil.copytree(session / "earlier" / subject.name / "out", directory / "out", dirs_exist_ok=True)
        before = {name: (directory / name).read_bytes() for name in tree(directory)}
    command = subject.command(session, *extra)
    ended = (_kill_cold if kill.cold else _kill_warm)(server, directory, session, command, kill, reference, trial)
    if ended.code == 0:
        trial.reached = False
    else:
        check_sentence(trial, ended, codes={CODES[kill.signal]})
    check_planted(trial, directory, subject)
    check_files(trial, directory, subject, reference.files, temporaries=kill.signal == "kill")
    if kill.over:
        _check_not_mixed(trial, directory, session / "whole" / subject.name, reference, before)
    finish(server, directory, session, subject, reference, trial, force=kill.over)
    return trial


def _kill_warm(
    server: Server,
    directory: Path,
    session: Path,
    command: list[str],
    kill: Kill,
    reference: Reference,
    trial: Trial,
) -> Ended:
    request = kill.subject.request(session)
    if not kill.moment.startswith("write"):
        run = server.start(command, directory, **request)
        time.sleep(max(0.003, float(kill.moment) * reference.seconds - (time.monotonic() - run.began)))
        run.signal(kill.signal, whole_group=kill.signal == "int")
    elif "+" in kill.moment:
        at, _, delay = kill.moment.removeprefix("write ").partition(" + ")
        run = server.start(command, directory, at=int(at), do="tell", **request)
        if run.told(10 * reference.seconds + 5):
            time.sleep(float(delay))
            run.signal(kill.signal, whole_group=kill.signal == "int")
    else:
        run = server.start(command, directory, at=int(kill.moment.removeprefix("write ")), do=kill.signal, **request)
    ended = run.wait()
    if run.processes_left() and kill.signal != "kill":
        trial.broken("leftover", "a process of the run goes on")
    return ended


COLD = "from headwise.__main__ import start; print('started', flush=True); raise SystemExit(start())"


def _kill_cold(
    server: Server,
    directory: Path,
    session: Path,
    command: list[str],
    kill: Kill,
    reference: Reference,
    trial: Trial,
) -> Ended:
    """A new interpreter; the fraction is of ten seconds from the first line of the command: imports are hit too."""
    environment = {**os.environ, **ONE_THREAD, **QUIET, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", COLD, *command],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(float(kill.moment) * 10)
        process.send_signal(SIGNALS[kill.signal])
        out, err = process.communicate(timeout=600)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Ended(code, out, err, time.monotonic() - began, 0)


def _check_not_mixed(
    trial: Trial, directory: Path, whole: Path, reference: Reference, before: Mapping[str, bytes]
) -> None:
    """The results under final names are all of the earlier run or all of this one, or the marker says what is missing.

    Files that are the same in both runs tell nothing.
    """
    results = {name for name in reference.files if not any(part.startswith(".") for part in Path(name).parts)}
    results -= {name for name in results if before.get(name) == _content(whole / name)}
    old = {name for name in results if name in before and _content(directory / name) == before[name]}
    new = {name for name in results if (directory / name).exists()} - old
    marker = directory / "out" / ".headwise.json"
    begun = marker.exists() and json.loads(marker.read_text()).get("publishing")
    if old and new and not begun:
        trial.broken("mixed", f"{sorted(old)} are of the earlier run, {sorted(new)} of the interrupted one")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def finish(
    server: Server,
    directory: Path,
    session: Path,
    subject: Subject,
    reference: Reference,
    trial: Trial,
    *,
    force: bool = False,
) -> None:
    """Finish the work as a user would, and require the result and the files of the uninterrupted run.

    A run that had written everything before it was interrupted refuses to be repeated: that is its result.
    """
    extra = ("--force",) if force else subject.again
    request = subject.request(session)
    ended = server.run(subject.command(session, *extra), directory, **request)
    if ended.code == 2 and not force and "--force" in ended.err:
        ended = server.run(subject.command(session, "--force"), directory, **request)
    if ended.code != 0:
        trial.broken("stuck", f"exit code {ended.code}: {ended.err.strip()[-300:]!r}")
        return
    try:
        numbers = subject.numbers(directory, ended.out)
    except Exception as error:
        trial.broken("different", f"{type(error).__name__}: {error}")
        return
    if numbers != reference.numbers:
        trial.broken("different", "the result is not that of the uninterrupted run")
    left = tree(directory) - reference.files - set(subject.planted)
    if left:
        trial.broken("leftover", f"after finishing: {sorted(left)[:5]}")
    missing = reference.files - tree(directory)
    if missing:
        trial.broken("different", f"missing after finishing: {sorted(missing)[:5]}")
    check_planted(trial, directory, subject)
