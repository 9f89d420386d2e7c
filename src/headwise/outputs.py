"""Write files so that a file under its final name is complete: a temporary name, flushed to disk, and renamed.

`new_file` is for commands that write one file, `output_directory.OutputDirectory` for those that write several.  Errors
of the file system become an `InputError` that names the path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError, shown

TEMPORARY = ".headwise-"
"""Between the name of a file and the process that writes it, in the name of its temporary file."""

PARTIAL_NAMES = re.compile(r"\.?(key|batch-\d+|part-[0-9a-f]+)(\.headwise-\d+)?(\.pt)?")


@contextlib.contextmanager
def new_file(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary path that becomes the file `path` when the block ends without an exception.

    An existing file is refused before the block runs, unless `force`; the target of a symbolic link is written, not the
    link.
    """
    path = followed(Path(path).expanduser())
    if path.is_dir():
        raise InputError(f"{shown(path)} is a directory; name a file to write")
    if os.path.lexists(path) and not force:
        raise InputError(f"{shown(path)} exists already; use --force to replace it, or name another file")
    with atomic(path) as temporary:
        yield temporary
        if os.path.lexists(path) and not force:
            raise InputError(f"{shown(path)} was written by another process meanwhile; name another file")


@contextlib.contextmanager
def atomic(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary path with the same suffix; it becomes `path` when the block ends without an exception.

    Without `flush` the file may be damaged by a power failure, which is enough for partial results.
    """
    path = path.expanduser()
    temporary = path.with_name(f".{path.stem}{TEMPORARY}{os.getpid()}{path.suffix}")
    made: list[Path] = []
    try:
        with writing(path):
            made = make_directories(path.parent)
            remove_abandoned(path)
            temporary.touch()  # fails now, not after the work, if the directory cannot be written
        yield temporary
        with writing(path):
            if flush:
                flush_to_disk(temporary)
            temporary.replace(path)
            if flush:
                flush_to_disk(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if made and not path.exists():
            with contextlib.suppress(OSError):
                for folder in reversed(made):
                    folder.rmdir()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system, also those of torch and safetensors, into an InputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {shown(path)}: {error.strerror or error}") from error
    except Exception as error:  # torch raises RuntimeError, safetensors a class of its own
        reason = str(error).splitlines()[0] if str(error) else ""
        if "I/O error" in reason:
            raise InputError(f"cannot write {shown(path)}: {reason.partition('I/O error: ')[2]}") from error
        if "inline_container" in reason or "PytorchStreamWriter" in reason:
            raise InputError(f"cannot write {shown(path)}: the file is incomplete; the disk may be full") from error
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary, writing(path):
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    write_text(path, json_text(value, indent=indent))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON; NaN and infinities, which JSON does not have, become null, and strings are `valid_text`."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def partial_results(path: Path, key: str) -> Path:
    """A directory for partial results of the run with this `key`; refused if it holds those of another run."""
    mark = path / "key"
    try:
        # listed before the key is read: another process of the same run writes the key first
        found = path.is_dir() and any(PARTIAL_NAMES.fullmatch(file.name) for file in path.glob("[!.]*"))
        written = mark.read_bytes() if mark.exists() else None
    except OSError as error:
        raise InputError(f"cannot read {shown(path)}: {error.strerror or error}") from error
    if written != key.encode() and (found or written is not None):
        raise InputError(
            f"{shown(path)} holds partial results of another model, other inputs or other settings, or of another "
            "version; name another directory, or start over without them"
        )
    if written is None:
        write_text(mark, key)
    return path


def append_line(path: Path, key: str, value: Any) -> None:
    """Append one [key, value, checksum] record to a JSON-lines file, on a new line even if the last was cut off."""
    record = json.dumps([key, value])
    with writing(path), path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(f'{record[:-1]}, "{_checksum(record)}"]\n'.encode())


def read_lines(path: Path) -> dict[str, Any]:
    """The records of `append_line`, the last one of a key counts; lines that are cut off or damaged are skipped."""
    records: dict[str, Any] = {}
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise InputError(f"cannot read {shown(path)}: {error.strerror or error}") from error
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            key, value, checksum = json.loads(line)
            if checksum == _checksum(json.dumps([key, value])):
                records[str(key)] = value
    return records


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` whose process has ended."""
    before, after = f".{path.stem}{TEMPORARY}", path.suffix
    for file in path.parent.iterdir():
        pid = file.name.removeprefix(before).removesuffix(after)
        if file.name == f"{before}{pid}{after}" and pid.isdecimal() and not file.is_dir():
            try:
                os.kill(int(pid), 0)
            except (ProcessLookupError, OverflowError):
                file.unlink(missing_ok=True)
            except OSError:  # a process of another user
                continue


def followed(path: Path) -> Path:
    """The target of `path` if that is a symbolic link, otherwise `path` as it was written."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InputError(f"cannot follow the symbolic link {shown(path)}; name another path") from error


def make_directories(path: Path) -> list[Path]:
    """Make `path` and what is missing above it; returns those that were made, outermost first."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    made = []
    for folder in reversed(missing):
        try:
            folder.mkdir()
            made.append(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    return made


def flush_to_disk(path: Path) -> None:
    """fsync a file or a directory; systems that cannot do so for a directory do not need it."""
    is_directory = path.is_dir()
    descriptor = os.open(path, os.O_RDONLY if is_directory or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError:
        if not is_directory:
            raise
    finally:
        os.close(descriptor)


def valid_text(text: str) -> str:
    """`text` with bytes of a file name that are not UTF-8 written as escapes, so that it can be encoded.

    >>> valid_text("caf\\udce9")
    'caf\\\\udce9'
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {valid_text(key) if isinstance(key, str) else key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
