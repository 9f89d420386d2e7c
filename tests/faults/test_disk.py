"""A run that lacks space, permission, descriptors or its directory says so in one sentence and leaves whole files."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.disk import NOBODY, DiskFault, can_mount, disk_once
from tests.faults.subjects import SUBJECTS

CONVERT, REWRITE, TOUR = (SUBJECTS[name] for name in ("convert", "rewrite", "tour"))
AS_NOBODY = {"user": NOBODY} if os.geteuid() == 0 else {}


@pytest.mark.parametrize(
    "fault",
    [
        DiskFault(TOUR, "no space left", {"at": 2, "do": f"errno {errno.ENOSPC}"}),
        DiskFault(TOUR, "a file in the way", before="a file in the way"),
        DiskFault(REWRITE, "file size limit", {"limits": {"RLIMIT_FSIZE": 2_000}}),
        DiskFault(CONVERT, "file size limit", {"limits": {"RLIMIT_FSIZE": 2_000}}),
        DiskFault(REWRITE, "read-only directory", AS_NOBODY, before="read-only directory"),
        DiskFault(REWRITE, "file descriptors", {"limits": {"RLIMIT_NOFILE": 5}}),
    ],
    ids=lambda fault: f"{fault.subject.name}: {fault.fault}",
)
def test_one_sentence_and_whole_files(server, session, references, tmp_path: Path, fault: DiskFault) -> None:
    trial = disk_once(server, tmp_path / "trial", session, fault, references[fault.subject.name])
    assert trial.reached
    assert trial.problems == []


def test_failing_writes(server, session, references, tmp_path: Path) -> None:
    trials = []
    for at in (1, 3, 5, 7, 9):
        fault = DiskFault(REWRITE, "input/output error", {"at": at, "do": f"errno {errno.EIO}"})
        trials.append(disk_once(server, tmp_path / str(at), session, fault, references["rewrite"]))
    assert [problem for trial in trials for problem in trial.problems] == []
    assert sum(trial.reached for trial in trials) >= 2


def test_a_full_disk(server, session, references, tmp_path: Path) -> None:
    why = can_mount()
    if why:
        pytest.skip(why)
    for pages in (2, 5):
        fault = DiskFault(REWRITE, "full disk", size=pages * 4096)
        trial = disk_once(server, tmp_path / str(pages), session, fault, references["rewrite"])
        assert trial.reached
        assert trial.problems == []


@pytest.mark.slow
def test_every_command(tmp_path: Path, report: Callable) -> None:
    campaign = Campaign(tmp_path, list(SUBJECTS.values()), jobs=1, say=print)
    try:
        report(campaign.run(campaign.disk(6, random.Random("0 disk"))))
    finally:
        campaign.close()
