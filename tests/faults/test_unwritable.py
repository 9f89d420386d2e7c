"""A full disk or a place that cannot be written: one sentence that names the path, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headwise.cli.main import main
from headwise.errors import InputError
from headwise.models.partial_files import load_partial, save_partial
from headwise.output_directory import OutputDirectory
from headwise.outputs import new_file, write_bytes, writing


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may exceed 20 kB: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if not sys.platform.startswith("linux") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.usefixtures("small_files")
def test_the_previous_file_stays_when_a_write_fails(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_bytes(file, b"old")
    with pytest.raises(InputError, match=r"cannot write .*a.bin: File too large"):
        write_bytes(file, bytes(50_000))
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_a_failing_write_of_a_library_is_a_sentence(tmp_path: Path, library: str) -> None:
    file = tmp_path / "out.pt"

    def write() -> None:
        with new_file(file) as temporary, writing(file):
            if library == "torch":
                torch.save(torch.zeros(20_000), temporary)
            else:
                from safetensors.torch import save_file

                save_file({"x": torch.zeros(20_000)}, temporary)

    with pytest.raises(InputError, match=r"cannot write .*out.pt: (File too large|.*the disk may be full)"):
        write()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_files")
def test_partial_results_that_cannot_be_written(tmp_path: Path) -> None:
    save_partial(tmp_path / "fit-1.pt", "run", [torch.zeros(10)])
    with pytest.raises(InputError, match=r"cannot write .*fit-2.pt"):
        save_partial(tmp_path / "fit-2.pt", "run", [torch.zeros(20_000)])
    assert load_partial(tmp_path / "fit-1.pt", "run") is not None
    assert os.listdir(tmp_path) == ["fit-1.pt"]


@pytest.mark.usefixtures("small_files")
def test_a_report_that_does_not_fit_leaves_the_earlier_one(tmp_path: Path) -> None:
    def write(size: int, *, force: bool = False) -> None:
        with OutputDirectory(tmp_path, command="examine", names=["report.html"], force=force) as out:
            out.write_text("report.json", "1" * 10)
            out.write_text("report.html", "1" * size)

    write(10)
    with pytest.raises(InputError, match=r"cannot write .*report.html: File too large"):
        write(50_000, force=True)
    assert (tmp_path / "report.html").read_text() == "1" * 10
    assert {file.name for file in tmp_path.iterdir()} == {".headwise.json", "report.html", "report.json"}


@pytest.mark.slow
def test_a_full_disk(full_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factory = "python:tests.faults.small_models:one"
    out, arguments = full_disk / "out", ["examine", factory, "--quiet", "--no-ablations", "-o", str(full_disk / "out")]
    assert main(["tour", "--side", "4", "--out", str(full_disk)]) == 0
    (full_disk / "filler").write_bytes(bytes((1 << 20) - (200 << 10)))
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "cannot write" in said
    assert said.count("\n") == 1
    assert not (out / "report.html").exists()
    (full_disk / "filler").unlink()
    assert main([*arguments, "--resume"]) == 0
    assert json.loads((out / "report.json").read_text())["inputs"]["texts"] == 7


@pytest.mark.parametrize(
    "command", ["examine", "plan", "rewrite", "grow", "tour", "bench", "figures", "verify", "convert"]
)
def test_every_command_refuses_a_place_it_cannot_write_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.models.load.load_model", lambda *args, **options: pytest.fail("the work began"))
    model = "python:tests.faults.small_models:one"
    blocked = "/proc/headwise/out"
    arguments = {
        "examine": ["examine", model, "-o", blocked],
        "plan": ["plan", model, "-o", blocked],
        "rewrite": ["rewrite", model, "--plan", str(tmp_path), "-o", blocked],
        "grow": ["grow", "-o", blocked],
        "tour": ["tour", "--out", blocked],
        "bench": ["bench", "scaling", "-o", blocked],
        "figures": ["verify", "--figures", blocked],
        "verify": ["verify", "-o", blocked],
        "convert": ["convert", model, "-o", f"{blocked}.pt"],
    }[command]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"cannot write{'' if command in ('verify', 'convert') else ' to'} /proc/headwise/out" in said
    assert said.count("\n") == 1
