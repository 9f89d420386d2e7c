"""Tables fit the terminal and lose nothing."""

from __future__ import annotations

import random
import re

import pytest

from headwise.cli.tables import NARROWEST, print_table, print_text, wrapped

NAMES = [f"text_model.encoder.layers.{i}.self_attention.attention" for i in range(12)]


def printed(capsys: pytest.CaptureFixture, width: int, monkeypatch: pytest.MonkeyPatch, *args, **kwargs) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    capsys.readouterr()
    print_table(*args, **kwargs)
    return capsys.readouterr().out.splitlines()


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def column(table: list[str], start: int, end: int) -> str:
    return squeezed("".join(line[start:end] for line in table))


@pytest.mark.parametrize("width", [80, 100, 60])
def test_a_table_fits_and_the_name_of_every_layer_is_whole(
    width: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "attends near and far, by content; rank 64 would lose 22% of its output"
    rows = [(name, str(i), "low rank 2/16", f"{400 + i}", "84.2%", sentence) for i, name in enumerate(NAMES)]
    headings = ("layer", "head", "kind", "eff. rank", "rank-64 error", "what it does")
    table = printed(capsys, width, monkeypatch, "Heads", headings, rows, words=("layer", "kind", "what it does"))
    assert max(map(len, table)) <= width
    start = next(i for i, line in enumerate(table) if "──" in line) + 1
    head = next(line for line in table if "layer" in line)
    assert column(table[start:], 0, head.index("head") - 3) == "".join(NAMES)
    for part in ("84.2%", "411", "400"):
        assert sum(part in line for line in table) == (12 if part == "84.2%" else 1)  # numbers are never broken
    assert sum(line.count("…") for line in table) == 0


def test_nothing_is_lost_in_any_table(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    letters = "abcdefg./_- é→漢"
    for _ in range(150):
        columns = draw.randint(1, 7)
        headings = tuple(f"h{i} {'x' * draw.randint(0, 6)}" for i in range(columns))
        rows = [["".join(draw.choices(letters, k=draw.randint(0, 30))) for _ in headings] for _ in range(4)]
        words = headings[: draw.randint(1, columns)]
        table = printed(capsys, draw.randint(20, 120), monkeypatch, None, headings, rows, words=words)
        wanted, found = squeezed("".join(map("".join, [headings, *rows]))), squeezed("".join(table)).replace("─", "")
        assert sorted(found) == sorted(wanted)


def test_a_terminal_that_is_too_narrow_gets_long_lines_and_not_single_letters(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(NAMES[11], *["123456789"] * 6)]
    table = printed(capsys, 40, monkeypatch, None, ("layer", *"abcdef"), rows)
    assert sum(line.count("123456789") for line in table) == 6
    assert column(table[2:], 0, NARROWEST + 3) == NAMES[11]


@pytest.mark.parametrize(
    "text, width, expected",
    [
        ("encoder.layer.0.attention", 14, "encoder.layer.\n0.attention"),
        ("16/16 texts", 6, "16/16\ntexts"),
        ("a longword", 4, "a\nlong\nword"),
        ("two\nlines", 9, "two\nlines"),
        ("", 5, ""),
    ],
)
def test_words_are_broken_where_names_have_joints(text: str, width: int, expected: str) -> None:
    assert wrapped(text, width) == expected


def test_sentences_are_indented(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_text("one two three four five six", indent="    ", first=" 1. ")
    assert capsys.readouterr().out == " 1. one two three\n    four five six\n"
