"""Progress: a function that is told how far it is, or bars and lines on standard error with the time left."""

from __future__ import annotations

import pytest
import torch

import headwise
from headwise.errors import InputError
from headwise.progress import bar, bars, in_words, lines, reported

LAYER = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
BATCHES = [torch.randn(2, 6, 8), torch.randn(2, 6, 8)]


def test_a_function_is_told_what_is_done() -> None:
    told: list[tuple[str, int, int | None]] = []
    examined = headwise.examine(
        LAYER, BATCHES, importance=True, ablations=True, progress=lambda *step: told.append(step)
    )
    assert told[:3] == [("measuring heads", done, 2) for done in range(3)]
    assert told[-1] == ("switching skips and MLPs off", 0, None)
    assert ("replacing each head by its mean", 4, 4) in told
    assert len(examined.records) == 2


def test_of_batches_that_are_generated_the_total_is_not_known() -> None:
    told: list[tuple[str, int, int | None]] = []
    headwise.examine(LAYER, iter(BATCHES), progress=lambda *step: told.append(step))
    assert told == [("measuring heads", done, None) for done in range(3)]


def test_true_shows_bars_and_false_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    headwise.examine(LAYER, BATCHES, progress=True)
    assert "measuring heads" in capsys.readouterr().err
    for silent in (False, None):
        headwise.examine(LAYER, BATCHES, progress=silent)
    assert capsys.readouterr().err == ""


def test_anything_else_is_refused_before_the_work() -> None:
    with pytest.raises(InputError, match="progress is a str; give True for bars on standard error, or a function"):
        headwise.examine(LAYER, BATCHES, progress="yes")  # pyright: ignore[reportArgumentType]


def test_another_piece_of_work_gets_a_bar_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with bars() as progress:
        progress("first", 1, 2)
        progress("second", 0, None)
    said = capsys.readouterr().err
    assert said.index("first") < said.index("second")


def test_an_error_of_the_work_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), reported(True):
        raise ZeroDivisionError


def test_a_progress_bar_shows_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with bar("runs[exp] [/x]", 2) as advance:
        advance(1)
    assert "runs[exp] [/x]" in capsys.readouterr().err


def test_progress_that_is_piped_is_a_line_now_and_then(capsys: pytest.CaptureFixture) -> None:
    now = 0.0
    advance = lines("measuring heads", 100, clock=lambda: now)
    for done in range(1, 101):
        now = 0.5 * done
        advance(done)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "measuring heads: 4 of 100, about 48 s left"
    assert said[1] == "measuring heads: 24 of 100, about 38 s left"
    assert len(said) == 5


def test_short_work_is_silent(capsys: pytest.CaptureFixture) -> None:
    for total in (3, None):
        with bar("loading", total) as advance:
            for done in range(4):
                advance(done)
    advance = lines("work", 3, clock=iter([0.0, *[100.0] * 9]).__next__)
    advance(3)  # over: there is nothing left to wait for
    with bar("work", 3, quiet=True) as silent:
        silent(1)
    assert capsys.readouterr().err == ""


def test_times_in_words() -> None:
    assert [in_words(x) for x in (0.2, 59, 119, 3600, 3660)] == ["1 s", "59 s", "2 min", "1 h 0 min", "1 h 1 min"]
