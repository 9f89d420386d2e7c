"""A run that is killed leaves whole files or none, and can be finished with the same result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.kills import Kill, kill_once
from tests.faults.subjects import SUBJECTS

EXAMINE, REWRITE = "examine a factory", "rewrite"


@pytest.mark.parametrize(
    "name, signal, moment",
    [
        (REWRITE, "kill", "write 9 + 0.001"),
        (REWRITE, "term", "write 12"),
        (REWRITE, "int", "0.500"),
        (EXAMINE, "int", "0.500"),
        (EXAMINE, "kill", "write 30"),
    ],
)
def test_a_killed_run_can_be_finished(server, session, references, tmp_path, name, signal, moment) -> None:
    kill = Kill(SUBJECTS[name], signal, moment)
    assert kill_once(server, tmp_path, session, kill, references[name]).problems == []


def test_an_interruption_after_the_last_write_comes_too_late(server, tmp_path: Path) -> None:
    """Nothing is left to stop: the run has succeeded, and says so."""
    ended = server.run(["models", "--json"], tmp_path, at="end", do="int")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)


def test_a_result_that_is_being_replaced_is_never_mixed(server, session, references, tmp_path: Path) -> None:
    subject = SUBJECTS[EXAMINE]
    earlier = session / "earlier" / EXAMINE
    assert server.run(subject.command(session, *subject.other), earlier).code == 0
    at = references[EXAMINE].writes - 6  # among the last files
    kill = Kill(subject, "kill", f"write {at}", over=True)
    assert kill_once(server, tmp_path, session, kill, references[EXAMINE]).problems == []


@pytest.mark.slow
def test_every_command_at_random_moments(tmp_path: Path, report: Callable) -> None:
    campaign = Campaign(tmp_path, list(SUBJECTS.values()), jobs=1, say=print)
    try:
        report(campaign.run(campaign.kills(320, random.Random("0 kills"))))
    finally:
        campaign.close()
