"""`headwise plan` from its arguments to its files, on a factory's small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli.main import main
from headwise.replacement import Plan
from tests.models.tiny_tokenizer import tokenizer_of, words
from tests.replacement.install.test_other_families import made

transformers = pytest.importorskip("transformers")

FACTORY = """
import torch
from tests.models.tiny_models import ALL

def build():
    torch.manual_seed(0)
    model, _ = ALL["bert"]()
    batches = [{"input_ids": torch.randint(99, (1, 24))} for _ in range(%d)]
    return model, batches
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "small_model.py").write_text(FACTORY % 7)
    (tmp_path / "few_texts.py").write_text(FACTORY % 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "python:small_model:build"


def test_a_table_a_figure_and_a_plan(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan"
    assert main(["plan", factory, "--tolerance", "0.1", "-o", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "attention cost (seconds) against drift" in text
    assert "by kind of text and length" in text
    assert "Beyond 24 tokens the rewritten model runs exact attention." in text
    assert "cache" not in text  # an encoder has none
    plan = Plan.load(out)
    assert plan.tolerance == 0.1
    assert (out / "trade-off.svg").read_text().count("<svg") == 1
    assert not (out / ".unfinished").exists()
    assert main(["plan", factory, "--json", "--objective", "multiply-adds", "-o", str(out), "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["measure"] == "cosine"


def test_bad_input_is_one_message_and_no_plan(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none"
    for arguments, said in (
        (["python:few_texts:build"], "at least 4 batches"),
        ([factory, "--length", "9999"], "--length would have no effect"),
        ([factory, "--objective", "money"], "invalid choice"),
        ([factory, "--tolerance", "-1"], "--tolerance is -1; it must be a finite number"),
        ([factory, "--tolerance", "5"], "1 - cos, is at most 2"),
    ):
        assert main(["plan", *arguments, "-o", str(out)]) == 2
        assert said in capsys.readouterr().err
        assert not (out / "plan.json").exists()


def test_a_refused_run_leaves_no_directory(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", factory, "--tolerance", "-1", "-o", str(tmp_path / "out")]) == 2
    assert "tolerance" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_decoder_with_an_output_embedding_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its drift is in nats, the plan is for its body, and the rewritten model is compared with it."""
    model, directory = made("GPTNeoXForCausalLM")[0], tmp_path / "model"
    model.save_pretrained(directory)
    tokenizer_of(99).save_pretrained(directory)
    files = []
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(words(400, i))
        files.append(str(tmp_path / f"{i}.txt"))
    given = ["--text", *files, "--texts", "2", "--length", "32", "--tolerance", "2", "--objective", "memory"]
    assert main(["plan", str(directory), *given, "-o", str(tmp_path / "plan")]) == 0
    plan = Plan.load(tmp_path / "plan")
    assert "The key-value cache would keep" in " ".join(capsys.readouterr().out.split())
    assert plan.measure == "loss"
    assert plan.model["class"] == "GPTNeoXModel"
    assert list(plan.sites) == ["layers.0.attention", "layers.1.attention"]
    assert plan.point is not None
    assert plan.point.largest > 0
    plan.check(transformers.GPTNeoXModel.from_pretrained(directory))
    new = tmp_path / "new"
    assert main(["rewrite", str(directory), "--plan", str(tmp_path / "plan"), "--no-trial", "-o", str(new)]) == 0
    assert main(["compare", str(directory), str(new), "--text", files[0], "--length", "32"]) == 0
    assert "drift (loss)" in capsys.readouterr().out
