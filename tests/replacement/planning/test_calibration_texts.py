"""The calibration set, and texts cut evenly from files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from headwise.errors import InputError
from headwise.models.load import SAMPLES, load_model
from headwise.replacement.planning.calibration_texts import (
    calibration_texts,
    numbers,
    piece_starts,
    plan_lengths,
    read_kinds,
    records,
    texts_by_kind,
)


def test_the_kinds_are_not_alike() -> None:
    texts = calibration_texts()
    assert texts.keys() == {"prose", "code", "manual", "languages", "records", "numbers", "markup"}
    assert all(len(text) > 9000 for text in texts.values())
    words = [set(text.split()) for text in texts.values()]
    assert all(len(a & b) < 0.5 * len(a) for a in words for b in words if a is not b)


def test_records_are_reproducible_and_repeat_names_far_apart() -> None:
    text = records(400)
    assert text == records(400) != records(400, seed=1)
    session = next(word for word in text.split() if word.startswith("session=")).removeprefix("session=")
    assert text.rindex(session) - text.index(session) > 10_000


def test_each_file_is_a_kind_and_one_file_is_cut(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.txt").write_text(f"{name} " * 50)
    (tmp_path / "other.txt").write_text("0123456789" * 10)
    two = [tmp_path / "a" / "same.txt", tmp_path / "other.txt"]
    assert list(read_kinds(two)) == ["same.txt", "other.txt"]
    assert len(read_kinds([two[0], tmp_path / "b" / "same.txt"])) == 2
    parts = read_kinds(two[1:])
    assert list(parts) == [f"other.txt, part {i}" for i in range(1, 6)]
    assert "".join(parts.values()) == "0123456789" * 10


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip(SAMPLES["minilm"].module)
    return load_model("minilm")


def test_pieces_are_spread_over_each_file_at_every_length(minilm) -> None:
    assert plan_lengths(minilm.model, 64) == (16, 32, 64)
    text = " ".join(f"{i}" for i in range(1000))
    found = texts_by_kind(minilm, {"numbers": text, "short": "one two three four " * 15}, (16, 64), texts=2)
    assert [batch["input_ids"].shape for batch in found["numbers"]] == [(1, 16), (1, 16), (1, 64), (1, 64)]
    decoded = minilm.preprocessor(__import__("transformers").AutoTokenizer)
    first, last = (decoded.decode(found["numbers"][i]["input_ids"][0], skip_special_tokens=True) for i in (2, 3))
    assert first.startswith("0 1 2")
    assert last.endswith("998 999")
    # too short for two pieces of 64
    assert [batch["input_ids"].shape[1] for batch in found["short"]] == [16, 16]
    with pytest.raises(InputError, match="512 positions, but --length is 9999"):
        texts_by_kind(minilm, {"numbers": text}, (9999,), texts=2)
    with pytest.raises(InputError, match="cannot be cut into 2 pieces"):
        texts_by_kind(minilm, {"empty": "one"}, (16,), texts=2)


def test_short_sources_give_fewer_pieces_that_hardly_overlap(minilm) -> None:
    """A source of 300 tokens: two pieces may share a fifth, and half as much is too short for two."""
    text = " ".join(["word"] * 300)
    found = texts_by_kind(minilm, {"words": text}, (32, 128, 256), texts=24)
    lengths = [batch["input_ids"].shape[1] for batch in found["words"]]
    assert lengths == [32] * 12 + [128] * 2
    assert piece_starts(300, 126, 24) == [0, 174]
    assert piece_starts(300, 160, 24) == [0, 140]
    assert piece_starts(300, 100, 2) == [0, 200]
    starts = piece_starts(1000, 90, 24)
    assert min(b - a for a, b in pairwise(starts)) >= 0.8 * 90 - 1


def test_numbers_are_reproducible_rows_of_six_values() -> None:
    text = numbers(50)
    assert text == numbers(50) != numbers(50, seed=1)
    assert {line.count(",") for line in text.splitlines()} == {5}
    assert text.splitlines()[1].startswith("2023-01-01 00:00,ST-")
