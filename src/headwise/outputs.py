"""Write results so that a file or directory under its final name is always complete.

Everything is written under a temporary name beside its destination, flushed to disk, and renamed.  An interruption
leaves the previous file or none.  Errors of the file system become an `InputError` that names the path.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path with the same suffix; it becomes `path` when the block ends without an exception."""
    path = path.expanduser()
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with _named(path):
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary, _named(path):
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    write_text(path, json_text(value, indent=indent))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path`, new or empty, when the block ends without an exception."""
    path = path.expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; name a new directory")
    temporary = path.parent / f".{path.name}-{os.getpid()}"
    with _named(path.parent):
        temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def writable_directory(path: Path) -> Path:
    """Create `path` and check that a file can be written in it, so that a long run does not fail at its end."""
    path = path.expanduser()
    probe = path / f".headwise-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror or error}; choose another directory") from error
    return path


def partial_results(path: Path, key: str) -> Path:
    """A directory for partial results of the run with this `key`; refused if it holds those of another run."""
    mark = path / "key"
    if mark.exists() and mark.read_text(encoding="utf-8") != key:
        raise InputError(
            f"{path} holds partial results of another model, other inputs or other settings; "
            "name another directory, or start over"
        )
    with _named(path):
        path.mkdir(parents=True, exist_ok=True)
    write_text(mark, key)
    return path


def append_line(path: Path, key: str, value: Any) -> None:
    """Append one [key, value] record to a JSON-lines file, on a new line even if an interruption cut off the last."""
    with _named(path), path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(json.dumps([key, value]).encode() + b"\n")


def read_lines(path: Path) -> dict[str, Any]:
    """The records of `append_line`, the last one of a key counts; a last line cut off by an interruption is skipped."""
    records: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                key, value = json.loads(line)
            except ValueError:
                continue
            records[key] = value
    return records


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an error of the file system into an InputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
