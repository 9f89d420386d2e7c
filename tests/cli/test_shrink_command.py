"""`headwise shrink`: its files, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli.main import main
from headwise.errors import InputError
from tests.growth.test_transformers_growth import bert, llama

transformers = pytest.importorskip("transformers")
TOKENS = ("--random-tokens", "12", "--texts", "4")


def test_a_narrowed_model_is_written_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "model")
    out = tmp_path / "new"
    assert main(["shrink", str(tmp_path / "model"), *TOKENS, "--json", "-o", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "shrink.json").read_text())
    assert printed["key_cache_saved"] >= 0.5
    assert printed["measure"] == "nats per token"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    widths = {name: after for name, (_, after) in printed["widths"].items()}
    assert {name: model.get_submodule(name).headwise_widths.width for name in widths} == widths


def test_a_narrowed_model_whose_weights_were_damaged_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert().save_pretrained(tmp_path / "model")
    out = tmp_path / "new"
    assert main(["shrink", str(tmp_path / "model"), *TOKENS, "-o", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "shrink.json",
        ".headwise.json",
    }
    file = out / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"model.safetensors has been changed since headwise wrote it; make it again"):
        transformers.AutoModel.from_pretrained(out)
    capsys.readouterr()
    assert main(["examine", str(out), *TOKENS, "-o", str(tmp_path / "report")]) == 2
    assert "model.safetensors has been changed since headwise wrote it" in capsys.readouterr().err


def test_the_table_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert().save_pretrained(tmp_path / "model")
    line = ["shrink", str(tmp_path / "model"), *TOKENS, "-o", str(tmp_path / "new")]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "encoder.layer.0.attention.self" in printed
    assert "% saved" in printed
    assert main(line) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*line[:-1], str(tmp_path / "other"), "--keep", "1.5"]) == 2
    assert "--keep is a share above 0 and at most 1, but is 1.5" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
