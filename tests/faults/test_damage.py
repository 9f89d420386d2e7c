"""A damaged file leads to one sentence or to the right answer, never to another answer."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.damage import MUTATIONS, REPLACEMENTS, Damage, Target, damage_once
from tests.faults.subjects import SUBJECTS, printed

COMMAND = ("rewrite", "{session}/bert", "--plan", "plan/out", "-o", "out", "--json")


@pytest.mark.parametrize("mutation", [*MUTATIONS, *REPLACEMENTS])
@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors"])
def test_a_damaged_plan(server, session, references, tmp_path: Path, name: str, mutation: str) -> None:
    source = session / "with-plan" / "plan"
    if not source.exists():
        shutil.copytree(session / "plan", source)
    rewrite = SUBJECTS["rewrite"]
    target = Target(name, "with-plan", f"plan/out/{name}", COMMAND, rewrite.numbers, editable=name == "plan.json")
    damage = Damage(target, mutation, seed=1)
    expected = references["rewrite"].numbers
    assert damage_once(server, tmp_path, session, damage, expected).problems == []


@pytest.mark.parametrize("mutation", ["one bit", "truncated", "missing"])
def test_damaged_weights_of_a_rewritten_model(server, session, references, tmp_path: Path, mutation: str) -> None:
    references["rewrite"]
    command = ("compare", "{session}/bert", "out", "--random-tokens", "24", "--texts", "2", "--json")
    undamaged = server.run([part.format(session=session) for part in command], session / "whole" / "rewrite")
    assert undamaged.code == 0
    expected = printed(tmp_path, undamaged.out)
    target = Target("weights", "whole/rewrite", "out/model.safetensors", command, printed, editable=False)
    trial = damage_once(server, tmp_path, session, Damage(target, mutation, seed=2), expected)
    assert trial.problems == []


@pytest.mark.slow
def test_every_file_that_is_read_back(tmp_path: Path, report: Callable) -> None:
    campaign = Campaign(tmp_path, list(SUBJECTS.values()), jobs=1, say=print)
    try:
        report(campaign.run(campaign.damage(26, random.Random("0 damage"))))
    finally:
        campaign.close()
