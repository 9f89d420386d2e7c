"""`headwise compare`: the change is found where it was made, and bad files are sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headwise.cli.main import main
from headwise.examination import examine, write_report
from tests.models.tiny_models import ALL, sharpen


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The same model before and after its second layer's queries of head 3 were made ten times larger."""
    model = sharpen(ALL["bert"]()[0])
    batches = [{"input_ids": torch.randint(99, (1, 40))} for _ in range(3)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_report(examine(model, batches, spectra_every=1), tmp_path / name)
        with torch.no_grad():
            model.encoder.layer[1].attention.self.query.weight[24:].mul_(10)
    return tmp_path / "a", tmp_path / "b"


def test_the_changed_head_moves_most(pair: tuple[Path, Path], capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", str(pair[0]), str(pair[1] / "report.json"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    first, second = facts["heads"][:2]
    assert (first["layer"], first["head"]) == ("encoder.layer.1.attention.self", 3)
    assert first["z"] > 3
    assert second["z"] < 1e-3  # no other head was touched
    assert main(["compare", *map(str, pair)]) == 0
    printed = capsys.readouterr().out
    assert "heads in both" in printed
    assert "in pairs of the same text" in printed
    assert "differ" not in printed


def test_one_text_and_another_length_are_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = sharpen(ALL["bert"]()[0])
    for n in (40, 24):
        (tmp_path / str(n)).mkdir()
        write_report(examine(model, [{"input_ids": torch.randint(99, (1, n))}]), tmp_path / str(n))
    paths = [str(tmp_path / "40"), str(tmp_path / "24")]
    assert main(["compare", *paths]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("These examinations differ in more than the model")
    assert "length: 40 and 24 tokens" in printed
    assert "* judged on texts of other lengths" in printed
    assert "one text on a side shows no spread" in printed
    assert main(["compare", *paths, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=lambda x: pytest.fail(f"{x} in the JSON"))
    assert facts["differs"] == ["length: 40 and 24 tokens"]
    assert {head["z"] for head in facts["heads"]} == {None}
    assert {head["same_length"] for head in facts["heads"]} == {False}


def test_bad_files(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def refused(second: Path) -> str:
        assert main(["compare", str(pair[0]), str(second)]) == 2
        return capsys.readouterr().err

    assert "compare two directories that examine wrote, or two models" in refused(tmp_path / "nowhere")
    file = tmp_path / "x.json"
    file.write_text("{")
    assert "not JSON" in refused(file)
    file.write_text("{}")
    assert "schema is missing" in refused(file)
    facts = json.loads((pair[0] / "report.json").read_text())
    file.write_text(json.dumps({**facts, "schema": 99}))
    assert "schema 99 is not" in refused(file)
    file.write_text(json.dumps({**facts, "records": []}))
    assert "records must have at least one entry" in refused(file)
    file.write_text(json.dumps({**facts, "model": {**facts["model"], "name": 3}}))
    assert "model/name must be a string, but is 3" in refused(file)
    for record in facts["records"]:
        record["layer"] = "other"
    file.write_text(json.dumps(facts))
    assert "share no head" in refused(file)


def test_two_models(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A model, itself, and itself rewritten: no drift, and some."""
    from headwise.models.fingerprint import weights_hash
    from headwise.replacement import Choice, Plan, rewrite
    from tests.replacement.plans import describe

    model, batch = ALL["bert"]()
    model = sharpen(model).eval()
    sites = describe(model, batch)
    about = {"class": "BertModel", "name": "tiny", "fingerprint": weights_hash(model), "sites": sites}
    uniform = {name: [Choice("uniform")] * site["heads"] for name, site in sites.items()}
    model.save_pretrained(tmp_path / "old")
    rewrite(model, Plan(about, 40, uniform))[0].save_pretrained(tmp_path / "new")
    options = ["--random-tokens", "40", "--texts", "3", "--json"]
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "old"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["drift"] == pytest.approx(0.0, abs=1e-12)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["drift"] > 1e-9
    assert facts["operators"] == {"uniform": 8}
    assert len(facts["drifts"]) == 3
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options[:-1]]) == 0
    assert "mean drift" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "other")]) == 2
    assert "other has no config.json" in capsys.readouterr().err
