"""Take away what a run needs: disk space, permission, its directory, file descriptors, memory.

A run must end with one sentence and exit code 2, or succeed; its files must be whole; and when the fault is gone, the
same command must give the result of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.checks import Trial, check_files, check_planted, check_sentence, plant, tree
from tests.faults.kills import Reference, finish
from tests.faults.server import Ended, Server
from tests.faults.subjects import Subject

NOBODY = 65534
ERRORS = {"no space left": errno.ENOSPC, "input/output error": errno.EIO, "permission denied": errno.EACCES}


@dataclass(frozen=True)
class DiskFault:
    """One way in which the file system or the machine fails a run of `subject`."""

    subject: Subject
    fault: str  # what the table calls it
    request: Mapping[str, Any] = field(default_factory=dict)  # of Server.start
    size: int | None = None  # bytes of the file system in which the command works
    before: str = ""  # name of a function in PREPARE
    detail: str = ""


def can_mount() -> str | None:
    """Why a small file system cannot be mounted here, or None."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    with tempfile.TemporaryDirectory() as directory:
        try:
            with small_disk(Path(directory) / "disk", 4096):
                return None
        except (OSError, subprocess.CalledProcessError):
            return "mounting a small file system is not permitted here"


@contextlib.contextmanager
def small_disk(directory: Path, size: int | None) -> Iterator[None]:
    """`directory` as a file system of `size` bytes; its content is copied back when it is taken away."""
    directory.mkdir(parents=True, exist_ok=True)
    if size is None:
        yield
        return
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True, capture_output=True
    )
    kept = directory.with_name(directory.name + "-kept")
    try:
        yield
        shutil.copytree(directory, kept, symlinks=True)
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
    shutil.copytree(kept, directory, symlinks=True, dirs_exist_ok=True)


def _a_file_in_the_way(directory: Path, subject: Subject) -> None:
    (directory / subject.target).write_bytes(b"not yours\n")


def _a_dangling_link(directory: Path, subject: Subject) -> None:
    (directory / subject.target).symlink_to("nowhere/at/all")


def _a_directory_in_the_way(directory: Path, subject: Subject) -> None:
    (directory / subject.target).mkdir()


def _read_only(directory: Path, subject: Subject) -> None:
    target = directory / subject.target
    if not target.suffix:
        target.mkdir(exist_ok=True)
        target.chmod(0o555)
    directory.chmod(0o555)


PREPARE = {
    "a file in the way": _a_file_in_the_way,
    "a dangling link": _a_dangling_link,
    "a directory in the way": _a_directory_in_the_way,
    "read-only directory": _read_only,
}


def draw_disk_faults(
    subjects: Sequence[Subject],
    references: Mapping[str, Reference],
    sizes: Mapping[str, int],
    each: int,
    rng: random.Random,
    *,
    mount: bool,
) -> Iterator[DiskFault]:
    """About `each` failing calls, disk sizes and limits per command, and every obstacle once.

    sizes   bytes that the result of each command takes
    """
    for subject in subjects:
        writes, size = references[subject.name].writes, sizes[subject.name]
        for limit in (6, 9, 14):
            yield DiskFault(
                subject, "file descriptors", {"limits": {"RLIMIT_NOFILE": limit}}, detail=f"{limit} allowed"
            )
        for more in (1, 24):
            limits = {"RLIMIT_AS": more << 20}
            yield DiskFault(subject, "memory", {"limits": limits}, detail=f"{more} MB more")
        if not writes:
            continue
        for at in sorted(rng.sample(range(1, writes + 1), min(each, writes))):
            name = rng.choice(sorted(ERRORS))
            yield DiskFault(subject, name, {"at": at, "do": f"errno {ERRORS[name]}"}, detail=f"at write {at}")
        fractions = [rng.uniform(0.02, 1.0) for _ in range(max(1, each // 2))]
        for fraction in fractions:
            limit = max(1, int(fraction * size))
            yield DiskFault(
                subject, "file size limit", {"limits": {"RLIMIT_FSIZE": limit // 2}}, detail=f"{limit // 2} B"
            )
            if mount:
                pages = len(subject.planted) + max(2, int(fraction * size) // 4096)  # the user's files must fit
                yield DiskFault(subject, "full disk", size=pages * 4096, detail=f"{pages} pages")
        user = {"user": NOBODY} if os.geteuid() == 0 else {}
        yield DiskFault(subject, "read-only directory", user, before="read-only directory")
        directory = not Path(subject.target).suffix
        obstacles = (
            ("a file in the way", "a dangling link") if directory else ("a directory in the way", "a dangling link")
        )
        for obstacle in obstacles:
            yield DiskFault(subject, obstacle, before=obstacle)
        if directory:
            for at in sorted(rng.sample(range(1, writes + 1), min(max(1, each // 3), writes))):
                request = {"at": at, "do": f"remove {subject.target}"}
                yield DiskFault(subject, "directory removed", request, detail=f"at write {at}")


def disk_once(server: Server, directory: Path, session: Path, fault: DiskFault, reference: Reference) -> Trial:
    """Run into the fault, look at what is left, take the fault away, and finish."""
    subject = fault.subject
    trial = Trial(fault.fault, subject.name, fault.detail)
    logs = directory.with_name(directory.name + "-logs")
    obstructed = bool(fault.before)
    with small_disk(directory, fault.size):
        if not obstructed:
            plant(directory, subject)
        else:
            PREPARE[fault.before](directory, subject)
        before = _state(directory)
        ended = server.run(subject.command(session), directory, logs=logs, **subject.request(session), **fault.request)
    _check_end(trial, ended)
    trial.reached = ended.code != 0
    if obstructed:
        _take_away(trial, directory, subject, before, reference, ended)
        return trial
    if fault.fault == "directory removed":
        plant(directory, subject)  # they went with it
    check_planted(trial, directory, subject)
    # a file that could not be removed stays, and the next run removes it
    check_files(trial, directory, subject, reference.files, temporaries="at" in fault.request)
    finish(server, directory, session, subject, reference, trial)
    return trial


def _check_end(trial: Trial, ended: Ended) -> None:
    if "not enough memory" in ended.err or "DefaultCPUAllocator" in ended.err:
        return  # torch's own message
    if trial.fault == "memory":  # other packages warn before we can say anything
        ended = replace(ended, err="".join(ended.err.splitlines(keepends=True)[-1:]))
    check_sentence(trial, ended, codes={0, 2})


def _take_away(
    trial: Trial, directory: Path, subject: Subject, before: dict[str, Any], reference: Reference, ended: Ended
) -> None:
    """What stood in the way is as it was, and nothing else has appeared; or the run went around it and succeeded."""
    for path in (directory, directory / subject.target):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    after = _state(directory)
    changed = {name for name in before if after.get(name) != before[name]}
    if ended.code == 0:
        changed -= {subject.target}  # a directory that was filled, a link that was followed
    if changed:
        trial.broken("lost", f"{sorted(changed)} changed")
    if ended.code != 0 and set(after) - set(before):
        trial.broken("leftover", f"{sorted(set(after) - set(before))[:5]}")


def _state(directory: Path) -> dict[str, Any]:
    """Path -> what it is."""
    found: dict[str, Any] = {}
    for path in directory.rglob("*"):
        name, mode = str(path.relative_to(directory)), path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[name] = ("link", os.readlink(path))
        else:
            found[name] = "directory" if path.is_dir() else path.read_bytes()
    return found


def result_size(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in tree(directory))
