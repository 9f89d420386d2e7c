"""Read JSON that anybody may have written, and check it against a declared schema before it is used.

    PERSON = fields({"name": string(), "age": whole(0, 200)}, optional={"friends": list_of(string())})
    read_json(Path("person.json"), PERSON, "a person")

returns the value, or raises an InputError that names the file, the field, what is expected there and what it holds:
`person.json: friends/3 must be a string, but is 7`.  NaN, infinities, duplicate names, lone surrogates, integers beyond
64 bits, deep nesting and huge files are refused for every schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError

LARGEST_FILE = 256 << 20  # bytes
DEEPEST = 64
DIGITS = 18

Schema = Callable[[Any], None]
"""A function that raises Mismatch for a value that is not allowed."""


class Mismatch(Exception):
    """A value that is not allowed; `path` leads to it from the outermost value."""

    def __init__(self, problem: str, *path: object) -> None:
        super().__init__(problem)
        self.problem, self.path = problem, path

    def under(self, name: object) -> Mismatch:
        return Mismatch(self.problem, name, *self.path)

    def __str__(self) -> str:
        return f"{'/'.join(map(str, self.path)) or 'the whole'} {self.problem}"


def read_json(path: Path, schema: Schema, what: str, *, foreign: bool = False) -> Any:
    """The value in a file; `what` says in error messages which file should have been named.

    With `foreign`, NaN and Infinity pass, which are not JSON but stand in files that other Python programs write.
    """
    try:
        if not path.is_file():  # a pipe would block
            raise InputError(f"cannot read {path}: {'not a file' if path.exists() else 'no such file'}; name {what}")
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise InputError(f"{path} has {size >> 20} MB, more than {LARGEST_FILE >> 20}; name {what}")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; name {what}") from error
    return parse_json(content, schema, str(path), foreign=foreign)


def parse_json(content: bytes | str, schema: Schema, where: str, *, foreign: bool = False) -> Any:
    """The value that JSON text describes; `where` begins error messages, `foreign` is as in `read_json`."""
    hooks = {} if foreign else {"parse_int": _integer, "parse_float": _finite, "parse_constant": _constant}
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_object, **hooks)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a surrogate pair
        _check_depth(value)
    except UnicodeError as error:
        raise InputError(f"{where} is not UTF-8 text ({error})") from error
    except RecursionError as error:
        raise InputError(f"{where} is nested more than {DEEPEST} levels deep") from error
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error})") from error
    validate(value, schema, where)
    return value


def validate(value: Any, schema: Schema, where: str) -> None:
    """Raise InputError unless the schema allows `value`, which came out of a JSON file; `where` begins the message."""
    try:
        schema(value)
    except Mismatch as error:
        raise InputError(f"{where}: {error}") from error


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits; at most {DIGITS} are read")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return float(text)


def _constant(text: str) -> float:
    raise ValueError(f"JSON has no {text}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inside = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [x for items in inside for x in items if isinstance(x, dict | list)]
        if not level:
            return
    raise RecursionError


# ---- schemas ----


def anything(value: Any) -> None:
    """Any value."""


def string(allowed: Collection[str] = ()) -> Schema:
    """Text; one of `allowed` if given."""

    def check(value: Any) -> None:
        if not isinstance(value, str):
            raise Mismatch(f"must be a string, but is {_shown(value)}")
        if allowed and value not in allowed:
            raise Mismatch(f"must be {' or '.join(map(_shown, allowed))}, but is {_shown(value)}")

    return check


def boolean(value: Any) -> None:
    """true or false"""
    if not isinstance(value, bool):
        raise Mismatch(f"must be true or false, but is {_shown(value)}")


def number(least: float = -math.inf, most: float = math.inf) -> Schema:
    """A finite number from `least` to `most`."""

    def check(value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Mismatch(f"must be a number, but is {_shown(value)}")
        if not least <= value <= most:
            raise Mismatch(f"must be {_between(least, most)}, but is {value}")

    return check


def whole(least: float = -math.inf, most: float = math.inf) -> Schema:
    """An integer from `least` to `most`."""
    in_range = number(least, most)

    def check(value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise Mismatch(f"must be a whole number, but is {_shown(value)}")
        in_range(value)

    return check


def version(number: int, advice: str) -> Schema:
    """The number of a file format; `advice` says what to do about a file of another."""

    def check(value: Any) -> None:
        if value != number or isinstance(value, bool):
            raise Mismatch(f"{_shown(value)} is not {number}, which this version of headwise reads; {advice}")

    return check


def nullable(schema: Schema) -> Schema:
    """null, or what `schema` allows."""
    return lambda value: None if value is None else schema(value)


def list_of(item: Schema, *, empty: bool = True) -> Schema:
    """[item, item, ...]; with at least one item unless `empty`."""

    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise Mismatch(f"must be a list, but is {_shown(value)}")
        if not value and not empty:
            raise Mismatch("must have at least one entry, but is empty")
        _check_each(enumerate(value), item)

    return check


def map_of(item: Schema) -> Schema:
    """{any name: item}"""

    def check(value: Any) -> None:
        _check_object(value)
        _check_each(value.items(), item)

    return check


def fields(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, more: bool = False
) -> Schema:
    """{name: what its schema allows}

    `more` lets fields pass that are not declared, for files that only programs write: newer versions add some.  In a
    file that people edit, an unknown field is a mistyped one.
    """
    known = {**required, **(optional or {})}

    def check(value: Any) -> None:
        _check_object(value)
        for name, schema in known.items():
            if name in value:
                _check_each([(name, value[name])], schema)
            elif name in required:
                raise Mismatch("is missing", name)
        for name in value:
            if not more and name not in known:
                raise Mismatch(f"is not a field; there are {', '.join(known)}", name)

    return check


def _check_each(items: Any, schema: Schema) -> None:
    for name, value in items:
        try:
            schema(value)
        except Mismatch as error:
            raise error.under(name) from None


def _check_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise Mismatch(f"must be an object with named fields, but is {_shown(value)}")


def _between(least: float, most: float) -> str:
    if math.isinf(most):
        return f"at least {least}"
    return f"at most {most}" if math.isinf(least) else f"between {least} and {most}"


def _shown(value: Any) -> str:
    """A value of JSON in an error message, shortened."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object with named fields"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
