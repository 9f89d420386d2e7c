"""`--resume`: equal results after an interruption; damaged files are measured again, those of another run refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.cli.main import main
from headwise.errors import InputError
from headwise.examination import Examination
from headwise.replacement.kinds import Choice
from tests.faults import small_models

BRIEF = {"evaluations": 2, "objective": "multiply-adds"}
CHOICES = [Choice("window", {"width": 5}), Choice("projected", {"rank": 4})]


def factory(name: str) -> str:
    return f"python:tests.faults.small_models:{name}"


class Stop(BaseException):
    """An interruption."""


def examined(name: str, partial: Path, *, stop: int | None = None, **options: Any) -> Examination:
    model, batches = getattr(small_models, name)()

    def progress(what: str, done: int, total: int | None) -> None:
        if done == stop:
            raise Stop

    return headwise.examine(model, batches, partial_results=partial, progress=progress, **options)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Partial results of three of seven texts."""
    partial = tmp_path_factory.mktemp("examine") / "partial"
    with pytest.raises(Stop):
        examined("one", partial, stop=3)
    assert sorted(file.name for file in partial.iterdir()) == [*(f"batch-00000{i}.pt" for i in range(3)), "key"]
    return partial


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return examined("one", tmp_path_factory.mktemp("whole") / "partial").to_json()


@pytest.mark.parametrize(
    "name, options",
    [
        ("two", {}),
        ("other_text", {}),
        ("other_model", {}),
        ("one", {"seed": 1}),
        ("one", {"spectra_every": 2}),
        ("one", {"block_bytes": 1 << 18}),
    ],
)
def test_another_run_is_refused(name: str, options: dict[str, int], interrupted: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in interrupted.iterdir()}
    with pytest.raises(InputError, match="another model, other inputs or other settings, or of another version"):
        examined(name, interrupted, **options)
    assert {file: file.stat().st_mtime_ns for file in interrupted.iterdir()} == before


@pytest.mark.parametrize("package", ["headwise", "torch"])
def test_another_version_is_refused(package: str, interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{package}.__version__", "0.0.1")
    with pytest.raises(InputError, match="or of another version"):
        examined("one", interrupted)


def test_batches_that_are_generated_are_compared_one_by_one(interrupted: Path, tmp_path: Path) -> None:
    """The key cannot hold batches that are not there yet: each file says which one it is for."""
    model, batches = small_models.one()

    def stop(what: str, done: int, total: int | None) -> None:
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        headwise.examine(model, iter(batches), partial_results=tmp_path, progress=stop)
    with pytest.raises(InputError, match=r"batch-000001.pt is a partial result of another model, other inputs"):
        headwise.examine(model, iter([batches[0], batches[2], *batches]), partial_results=tmp_path)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    """Change one number of a tensor; torch does not notice."""
    saved = torch.load(file, weights_only=True)
    tensor = next(x for x in saved["value"][0].values() if isinstance(x, torch.Tensor))
    tensor.view(-1)[-1] += 1
    torch.save(saved, file)


def other_type(file: Path) -> None:
    torch.save([1, 2], file)


def other_text(file: Path) -> None:
    file.write_text("not a tensor at all")


def other_rows(file: Path) -> None:
    """Whole, of this run, but not what the program wrote."""
    from headwise.models.partial_files import save_partial

    save_partial(file, torch.load(file, weights_only=True)["run"], [{"sites": 3}])


DAMAGES = [truncate, empty, flip, other_type, other_text, other_rows]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_batch_is_measured_again_with_a_note(
    damage: Callable[[Path], None],
    interrupted: Path,
    whole: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    partial = tmp_path / "partial"
    shutil.copytree(interrupted, partial)
    damage(partial / "batch-000001.pt")
    with caplog.at_level(logging.WARNING, "headwise"):
        assert examined("one", partial).to_json() == whole
    (note,) = caplog.messages
    assert "batch-000001.pt is damaged" in note
    assert note.endswith("and is measured again")


def test_a_batch_of_another_run_is_refused(interrupted: Path, tmp_path: Path) -> None:
    """Copied by hand between two directories, or in another order."""
    partial = tmp_path / "partial"
    shutil.copytree(interrupted, partial)
    shutil.copy(partial / "batch-000000.pt", partial / "batch-000001.pt")
    with pytest.raises(InputError, match=r"batch-000001.pt is a partial result of another model, other inputs or"):
        examined("one", partial)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 64])
def test_a_damaged_key_is_refused(content: bytes, interrupted: Path, tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    shutil.copytree(interrupted, partial)
    (partial / "key").write_bytes(content)
    with pytest.raises(InputError, match="start over without them"):
        examined("one", partial)


def planned(name: str, partial: Path, *, stop: float = 2.0, **options: Any) -> dict[str, Any]:
    model, batches = getattr(small_models, name)()

    def progress(what: str, done: int, total: int | None) -> None:
        if total is not None and done >= stop * total:
            raise Stop

    options = {"tolerance": 0.1, "choices": CHOICES, **BRIEF, **options}
    plan = headwise.plan(model, batches, partial_results=partial, progress=progress, **options).to_dict()
    del plan["timing"]
    return plan


@pytest.fixture(scope="module")
def interrupted_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    partial = tmp_path_factory.mktemp("plan") / "partial"
    with pytest.raises(Stop):
        planned("one", partial, stop=0.95)
    assert len(list(partial.glob("part-*.pt"))) > 5
    return partial


@pytest.fixture(scope="module")
def whole_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return planned("one", tmp_path_factory.mktemp("whole plan") / "partial")


@pytest.mark.parametrize(
    "name, options", [("other_text", {}), ("other_model", {}), ("one", {"seed": 1}), ("one", {"choices": CHOICES[:1]})]
)
def test_the_plan_of_another_run_is_refused(name: str, options: dict[str, int], interrupted_plan: Path) -> None:
    with pytest.raises(InputError, match="another model, other inputs or other settings, or of another version"):
        planned(name, interrupted_plan, **options)


@pytest.mark.parametrize("damage", [None, truncate, other_type])
def test_a_damaged_part_is_computed_again(
    damage: Callable[[Path], None] | None,
    interrupted_plan: Path,
    whole_plan: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    partial = tmp_path / "partial"
    shutil.copytree(interrupted_plan, partial)
    if damage is not None:
        damage(sorted(partial.glob("part-*.pt"))[0])
    with caplog.at_level(logging.WARNING, "headwise"):
        assert planned("one", partial) == whole_plan
    assert len(caplog.messages) == (damage is not None)


def test_the_command_refuses_another_text_and_finished_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs[exp] 1"
    arguments = ["-o", str(out), "--quiet", "--no-ablations"]

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.examination.report.page.draw", interrupt)
    assert main(["examine", factory("one"), *arguments]) == 130
    assert len(list((out / ".unfinished").glob("batch-*.pt"))) == 7
    capsys.readouterr()
    for name in ("other_text", "other_model"):
        assert main(["examine", factory(name), *arguments, "--resume"]) == 2
        assert "another model, other inputs or other settings" in capsys.readouterr().err
    monkeypatch.setattr("headwise.examination.report.page.draw", lambda examination: {"kinds.svg": b"<svg/>"})
    assert main(["examine", factory("one"), *arguments, "--resume"]) == 0
    assert not (out / ".unfinished").exists()
    page, facts = (out / "report.html").read_text(), json.loads((out / "report.json").read_text())
    assert facts["provenance"]["run"] in page
    capsys.readouterr()
    assert main(["examine", factory("two"), *arguments]) == 2
    assert "holds results of `headwise examine` (report.html); use --force to replace them" in capsys.readouterr().err
    assert (out / "report.html").read_text() == page
    assert main(["examine", factory("two"), *arguments, "--force"]) == 0
    assert (out / "report.html").read_text() != page
