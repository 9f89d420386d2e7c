"""JSON is refused with the file and the field named, whatever is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headwise.errors import InputError
from headwise.reading import (
    LARGEST_FILE,
    anything,
    boolean,
    fields,
    list_of,
    map_of,
    nullable,
    number,
    parse_json,
    read_json,
    string,
    validate,
    version,
    whole,
)

PLACE = fields(
    {"schema": version(2, "write it again"), "name": string(), "heads": whole(1, 64), "rows": list_of(number(0))},
    {"kind": string(("a", "b")), "causal": boolean, "best": nullable(number(most=1)), "extra": map_of(whole())},
)
GOOD = {"schema": 2, "name": "x", "heads": 4, "rows": [1, 0.5], "best": None, "extra": {"y": 3}, "causal": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 7}, "place.json: name must be a string, but is 7"),
        ({"heads": True}, "heads must be a whole number, but is true"),
        ({"heads": 4.0}, "heads must be a whole number, but is 4.0"),
        ({"heads": 65}, "heads must be between 1 and 64, but is 65"),
        ({"rows": {}}, "rows must be a list, but is an object with named fields"),
        ({"rows": [1, 2, -1]}, "rows/2 must be at least 0, but is -1"),
        ({"rows": [None]}, "rows/0 must be a number, but is null"),
        ({"kind": "c"}, 'kind must be "a" or "b", but is "c"'),
        ({"causal": 1}, "causal must be true or false, but is 1"),
        ({"best": 2}, "best must be at most 1, but is 2"),
        ({"extra": []}, "extra must be an object with named fields, but is a list of 0"),
        ({"extra": {"y": "z" * 99}}, 'extra/y must be a whole number, but is "zzz'),
        ({"schema": 1}, "schema 1 is not 2, which this version of headwise reads; write it again"),
        ({"schema": True}, "schema true is not 2"),
        ({"nmae": "x"}, "nmae is not a field; there are schema, name, heads, rows, kind"),
    ],
)
def test_the_field_is_named(change: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        validate({**GOOD, **change}, PLACE, "place.json")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["schema", "name", "heads", "rows"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"place.json: {name} is missing"):
        validate({key: value for key, value in GOOD.items() if key != name}, PLACE, "place.json")


def test_what_is_allowed_is_returned() -> None:
    assert parse_json(json.dumps(GOOD), PLACE, "place.json") == GOOD
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), PLACE, "place.json") == GOOD  # Windows' editors
    assert parse_json('["\\ud83d\\ude00"]', anything, "x") == ["\U0001f600"]
    validate({"a": 1, "b": 2}, fields({"a": whole()}, more=True), "x")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "JSON has no NaN"),
        (b"[-Infinity]", "JSON has no -Infinity"),
        (b"[1e999]", "1e999 is too large"),
        (b"[" + b"9" * 400 + b"]", "a whole number of 400 digits"),
        (b"[" + b"9" * 9999 + b"]", "a whole number of 9999 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "the field 'a' is given twice"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 levels deep"),
        (b"[" * 100_000, "nested more than 64 levels deep"),
        (b'{"a":' * 100_000, "nested more than 64 levels deep"),
        (b'["\\ud800"]', "not UTF-8 text"),
        (b'{"\\udfff": 1}', "not UTF-8 text"),
        (b'["\xff\xfe"]', "not UTF-8 text"),
        (json.dumps(GOOD).encode("utf-16"), "not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n\x00", "not UTF-8 text"),
    ],
)
def test_text_that_is_not_the_json_we_read(content: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(content, anything, "place.json")
    assert str(caught.value).startswith("place.json is")
    assert said in str(caught.value)


def test_the_nesting_that_is_allowed() -> None:
    parse_json("[" * 64 + "]" * 64, anything, "x")


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "not a file"), (tmp_path / "x", "no such file"), (tmp_path / "y" / "z", "no such")):
        with pytest.raises(InputError, match=rf"cannot read .*{said}.*; name a place"):
            read_json(path, anything, "a place")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a file"):
        read_json(tmp_path / "pipe", anything, "a place")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # sparse
    with pytest.raises(InputError, match="has 256 MB, more than 256"):
        read_json(tmp_path / "huge", anything, "a place")
