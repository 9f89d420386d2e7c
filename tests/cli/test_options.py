"""Options that several commands share, and the tables they print."""

from __future__ import annotations

import argparse

import pytest

from headwise.cli.options import add_inputs, add_json, add_model, add_output, check_at_least, is_quiet, make_inputs
from headwise.cli.tables import make_table
from headwise.errors import InputError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_model(made)
    add_inputs(made, texts=16)
    add_output(made, default="somewhere")
    add_json(made)
    return made


def test_the_default_model_is_the_sample() -> None:
    options = parser().parse_args([])
    assert options.model == "minilm"
    assert options.out.name == "somewhere"
    assert not is_quiet(options)
    assert is_quiet(parser().parse_args(["--quiet"]))


def test_only_one_source_of_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["--text", "a.txt", "--random-tokens", "8"])
    assert "not allowed with" in capsys.readouterr().err


def test_an_option_below_its_minimum_is_named() -> None:
    options = parser().parse_args(["--texts", "0"])
    with pytest.raises(InputError, match="--texts is 0; it must be at least 1"):
        check_at_least(options, length=4, texts=1)


def test_a_factory_brings_its_own_batches() -> None:
    torch = pytest.importorskip("torch")
    from headwise.models.load import LoadedModel

    loaded = LoadedModel(torch.nn.Identity(), "identity", "python:a:b", batches=iter(torch.arange(9)))
    inputs = make_inputs(parser().parse_args(["--texts", "3"]), loaded)
    assert list(inputs.batches) == [0, 1, 2]


def test_a_table_shows_brackets_and_never_cuts_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = [("a name with [brackets] that is long enough to be wrapped", "12345678901234567890")]
    Console(width=50).print(make_table("title", ("name", "number"), rows, bold=-1))
    printed = capsys.readouterr().out
    assert "[brackets]" in printed
    assert "12345678901234567890" in printed
