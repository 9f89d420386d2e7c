"""`headwise tour`: known facts, in the terminal, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli.main import main


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict:
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["tour", "--side", "8", "--json", "--out", str(tmp_path_factory.mktemp("tour"))]) == 0
    return json.loads(printed.getvalue())


def test_the_mean_has_one_singular_value_and_the_shift_only_ones(facts: dict) -> None:
    mean, softmax, shift = facts["operators"]
    assert mean["singular_values"][:2] == pytest.approx([1, 0], abs=1e-6)
    assert mean["effective_rank"] == pytest.approx(1, abs=1e-4)
    assert shift["singular_values"] == pytest.approx([1] * 32)
    assert shift["effective_rank"] == pytest.approx(64)
    assert 1 < softmax["effective_rank"] < 64


def test_costs_and_claims(facts: dict) -> None:
    mean, softmax, shift = facts["operators"]
    assert shift["multiply_adds"] == 0 < mean["multiply_adds"] < softmax["multiply_adds"]
    assert "orthogonal" in shift["claims"]
    assert all("stochastic" in stop["claims"] for stop in facts["operators"])


def test_symmetries_are_those_of_the_theory(facts: dict) -> None:
    verdicts = [
        (report["module"], report["group"].partition("(")[0], report["verdict"]) for report in facts["symmetries"]
    ]
    assert verdicts == [
        ("MultiHead", "permutations", "ROUNDING"),
        ("Conv2d", "permutations", "BROKEN"),
        ("Conv2d", "translations", "BORDER ONLY"),
    ]


def test_the_picture_is_a_png(facts: dict) -> None:
    assert Path(facts["picture"]).read_bytes().startswith(b"\x89PNG")


def test_the_terminal_shows_the_same(facts: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "--side", "8"]) == 0
    out = capsys.readouterr().out
    for stop in facts["operators"]:
        assert stop["name"] in out
        assert f"{stop['multiply_adds']:,}" in out
    assert "BORDER ONLY" in out


@pytest.mark.parametrize("side, bound", [("3", "at least 4"), ("49", "at most 48")])
def test_a_grid_out_of_range_is_refused(side: str, bound: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "--side", side]) == 2
    assert capsys.readouterr().err == f"headwise tour: --side is {side}; it must be {bound}\n"


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["tour", "--side", "4", "--out", str(tmp_path / "file" / "deep")]) == 2
    assert "cannot write" in (error := capsys.readouterr().err)
    assert "deep: Not a directory" in error
