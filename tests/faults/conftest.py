"""One warm server and a few tiny models for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.checks import Trial
from tests.faults.kills import Reference, uninterrupted
from tests.faults.server import Server
from tests.faults.subjects import SUBJECTS, write_models


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    with Server() as warm:
        yield warm


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a plan written without a search."""
    from transformers import BertModel

    from tests.cli.test_rewrite_command import SOME, plan_of

    directory = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    write_models(directory)
    model = BertModel.from_pretrained(directory / "bert").eval()
    batch = {"input_ids": torch.randint(64, (1, 24))}
    plan_of(model, batch, length=24, choices=SOME[1:3]).save(directory / "plan" / "out")
    return directory


class References:
    """Uninterrupted runs, made when they are first asked for."""

    def __init__(self, server: Server, session: Path) -> None:
        self._server, self._session = server, session
        self._made: dict[str, Reference] = {}

    def __getitem__(self, name: str) -> Reference:
        if name not in self._made:
            directory = self._session / "whole" / name
            self._made[name] = uninterrupted(self._server, directory, self._session, SUBJECTS[name])
        return self._made[name]


@pytest.fixture(scope="session")
def references(server: Server, session: Path) -> References:
    return References(server, session)


@pytest.fixture
def report() -> Callable[[list[Trial]], None]:
    """Fail with everything that broke."""

    def check(trials: list[Trial]) -> None:
        assert sum(trial.reached for trial in trials) > 0.6 * len(trials)
        broken = [f"{x.command}, {x.fault}, {x.detail}: {problem}" for x in trials for problem in x.problems]
        assert broken == []

    return check
