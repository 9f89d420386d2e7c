"""`headwise convert` writes a program or a state dict, prints a table or JSON, and rejects bad arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from headwise.cli.convert_command import run
from headwise.convolution import convert, with_content
from headwise.errors import InputError
from tests.convolution.test_conversion import small_cnn

FACTORY = "python:tests.convolution.test_conversion:small_cnn"


def test_a_factory_to_a_state_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([FACTORY, "-o", str(tmp_path / "out.pt")]) == 0
    text = capsys.readouterr().out
    assert "3 convolutions are now attention" in text
    assert "whole model" in text
    other, _ = convert(small_cnn())
    other.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert run([FACTORY, "-o", str(tmp_path / "content.pt"), "--content", "25"]) == 0
    other, _ = convert(small_cnn(), with_content(25))
    other.load_state_dict(torch.load(tmp_path / "content.pt"))


def test_a_program_to_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = small_cnn().eval(), torch.randn(1, 3, 8, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "in.pt2")
    assert run([str(tmp_path / "in.pt2"), "-o", str(tmp_path / "out.pt2"), "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["largest_change"] < 1e-5
    assert len(receipt["parts"]) == 3
    torch.testing.assert_close(torch.export.load(tmp_path / "out.pt2").module()(x), model(x))


@pytest.mark.parametrize("heads", ["--soft", "--content"])
def test_a_factory_to_a_program(heads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.pt2"
    assert run([FACTORY, "-o", str(out), "--input", "1,3,8,8", heads, "25"]) == 0
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(torch.export.load(out).module()(x), small_cnn().eval()(x), rtol=1e-4, atol=1e-5)
    assert "written to" in capsys.readouterr().out


def upsampler() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 1, 3), nn.ConvTranspose1d(1, 1, 3))


def test_what_is_left_is_printed_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["python:tests.cli.test_convert_command:upsampler", "-o", str(tmp_path / "out.pt")]) == 1
    assert "not converted: 1: a transposed convolution" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.pt2", "-o", "out.pt2"], "nowhere.pt2 is not a file"),
        (["pyproject.toml", "-o", "out.pt"], "must be a .pt2 file or python:module:factory"),
        (["python:nowhere:f", "-o", "out.pt"], "cannot import 'nowhere'"),
        (["python:os:getcwd", "-o", "out.pt"], "python:os:getcwd: the factory returned str"),
        ([FACTORY, "-o", "out.onnx"], r"OUT must end in .pt or .pt2"),
        ([FACTORY, "-o", "out.pt2"], "add --input"),
        ([FACTORY, "-o", "out.pt2", "--input", "1,x"], "sizes such as"),
        ([FACTORY, "-o", "out.pt", "--soft", "0"], "alpha must be a positive number"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "junk.pt2").write_bytes(b"junk")
    with pytest.raises(InputError, match="is not an exported program"):
        run([str(tmp_path / "junk.pt2"), "-o", str(tmp_path / "out.pt2")])


def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match=r"out.pt exists already; use --force"):
        run([FACTORY, "-o", str(out)])
    assert out.read_bytes() == b"mine"
    assert run([FACTORY, "-o", str(out), "--force"]) == 0
    assert out.stat().st_size > 4
