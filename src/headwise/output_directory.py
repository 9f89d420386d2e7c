"""A directory that one run writes: locked against other runs, published as a whole, replacing only our own files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, final

from headwise.errors import InputError, shown
from headwise.locks import NAME as LOCK
from headwise.locks import DirectoryLock
from headwise.outputs import (
    PARTIAL_NAMES,
    flush_to_disk,
    followed,
    json_text,
    make_directories,
    remove_abandoned,
    write_json,
    writing,
)

MARKER, STAGED, PARTIAL = ".headwise.json", ".headwise.new", ".unfinished"
SCHEMA = 1
LAST = ("plan.json", "config.json", "report.json", "report.html")
"""Files that readers open first are renamed last, in this order."""


@final
class OutputDirectory:
    """The directory that one run writes, locked against other runs.

        with OutputDirectory(path, command="examine", names=["report.html"], force=False) as out:
            out.write_text("report.html", page)

    Files are collected in a hidden directory and renamed together when the block ends without an exception; a marker
    (.headwise.json) lists the name, size, SHA-256, command and run key of each file that was written here.  A file that
    is not in the marker, or has been changed since, is never replaced or deleted.  Those that are in it are replaced
    with `force`.  A run killed between two renames is completed by the next one that opens the directory.

    names      files the run will write, so that a conflict is reported before the work begins
    force      replace the files of an earlier run of the same command
    resume     keep the partial results of an interrupted run
    exclusive  refuse a directory that holds anything else
    """

    def __init__(
        self,
        path: str | Path,
        *,
        command: str,
        names: Iterable[str] = (),
        force: bool = False,
        resume: bool = False,
        exclusive: bool = False,
    ) -> None:
        self.path, self.command, self.names = Path(path).expanduser(), command, tuple(names)
        self.force, self.resume, self.exclusive = force, resume, exclusive
        self.key = ""
        """Key of the run, for the marker."""
        self._written: list[str] = []
        self._begun = False  # the marker may say that files are being renamed
        self._files: dict[str, dict[str, Any]] = {}  # of the marker

    def __enter__(self) -> Self:
        self.path = followed(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"cannot write to {shown(self.path)}: it is a file; choose another directory")
        self._lock, self._made = DirectoryLock(self.path, self.command), list[Path]()
        self._open()
        try:
            with writing(self.path):
                self._recover()
                self._check_names(self.names)
                _remove_tree(self.path / STAGED)
                if not self.resume:
                    self._discard_partial()
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        problem = OSError()
        for _ in range(3):
            try:
                self._made = make_directories(self.path)
                self._lock.acquire()
                return
            except FileNotFoundError as error:  # removed by a run that failed, after it was made here
                problem = error
            except OSError as error:
                problem = error
                break
            except InputError:
                self._remove_empty()
                raise
        self._remove_empty()
        reason = problem.strerror or problem
        raise InputError(f"cannot write to {shown(self.path)}: {reason}; choose another directory") from problem

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.publish()
                self._discard_partial()
        finally:
            self._close()

    @property
    def partial(self) -> Path:
        """The directory for partial results, which are removed when the run is finished."""
        return self.path / PARTIAL

    @contextlib.contextmanager
    def atomic(self, name: str) -> Iterator[Path]:
        """A path to write to; the file is `name` in the directory when the run is finished."""
        staged = self.staged / name
        with writing(self.path / name):
            staged.parent.mkdir(parents=True, exist_ok=True)
            yield staged
            flush_to_disk(staged)
        if name not in self._written:
            self._written.append(name)

    @property
    def staged(self) -> Path:
        """A directory for files of any name, which are published with the others."""
        path = self.path / STAGED
        with writing(path):
            path.mkdir(exist_ok=True)
        return path

    def write_bytes(self, name: str, content: bytes) -> Path:
        """Write the file; returns the path it will have."""
        with self.atomic(name) as staged:
            staged.write_bytes(content)
        return self.path / name

    def write_text(self, name: str, text: str) -> Path:
        return self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any, *, indent: int | None = 1) -> Path:
        return self.write_text(name, json_text(value, indent=indent))

    def publish(self) -> None:
        """Give all files written so far their final names."""
        staged = self.path / STAGED
        if not staged.is_dir():
            return
        found = sorted(file.relative_to(staged).as_posix() for file in staged.rglob("*") if file.is_file())
        order = sorted({**dict.fromkeys(self._written), **dict.fromkeys(found)}, key=_rank)
        with writing(self.path):
            entries = {}
            for name in order:
                if name not in self._written:
                    flush_to_disk(staged / name)
                entries[name] = {**_contents(staged / name), "command": self.command, "key": self.key}
            self._check_names(entries, force=True)
            own = [name for name, entry in self._files.items() if entry["command"] == self.command]
            stale = [name for name in own if name not in entries and (self.exclusive or name in self.names)]
            self._begun = True
            try:
                self._write_marker(publishing=entries, stale=stale)
                self._rename_all(entries, stale)
            except BaseException:  # interrupted after the first step: complete the others first
                if _read_marker(self.path / MARKER)["publishing"]:
                    self._rename_all(entries, stale)
                raise
        self._begun = False
        self._written.clear()

    def _rename_all(self, entries: Mapping[str, dict[str, Any]], stale: Iterable[str]) -> None:
        """Idempotent, so that an interrupted call is completed by another."""
        folders = {self.path}
        for name in entries:
            source, file = self.path / STAGED / name, self.path / name
            if source.exists():
                folders.update(make_directories(file.parent), [file.parent])
                source.replace(file)
        for name in stale:
            if self._is_unchanged(name):
                (self.path / name).unlink()
                with contextlib.suppress(OSError):
                    (self.path / name).parent.rmdir()
            self._files.pop(name, None)
        for folder in folders:
            flush_to_disk(folder)
        self._files |= entries
        self._write_marker()
        _remove_tree(self.path / STAGED)

    def _recover(self) -> None:
        """Read the marker, and complete what a killed run has begun to rename."""
        marker = _read_marker(self.path / MARKER)
        self._files, begun = marker["files"], marker["publishing"]
        lost = []
        for name, entry in begun.items():
            staged, file = self.path / STAGED / name, self.path / name
            is_staged = staged.is_file() and _same(staged, entry)
            if is_staged and (not os.path.lexists(file) or self._is_unchanged(name) or _same(file, entry)):
                continue
            if not _same(file, entry):
                lost.append(name)
        if not begun:
            return
        kept = {name: entry for name, entry in begun.items() if name not in lost}
        self._rename_all(kept, marker["stale"])
        if lost and not self.force:
            raise InputError(
                f"{shown(self.path)}: a run was killed while it wrote its results, and {shown(lost[0])} is missing; "
                "use --force to make them again"
            )

    def _check_names(self, names: Iterable[str], *, force: bool | None = None) -> None:
        """Raise InputError unless every file may be written."""
        names, force = list(names), self.force if force is None else force
        for name in names:
            file = self.path / name
            for folder in file.relative_to(self.path).parents:
                above = self.path / folder
                if os.path.lexists(above) and not above.is_dir():
                    raise InputError(f"{shown(above)} is not a directory; move it away, or name another directory")
            if os.path.lexists(file) and not self._is_unchanged(name):
                known = name in self._files
                reason = "has been changed since headwise wrote it" if known else "was not written by headwise"
                raise InputError(f"{shown(file)} {reason} and is not replaced; move it away, or name another directory")
        if self.exclusive:
            self._check_exclusive()
        old = [name for name in names if os.path.lexists(self.path / name)]
        if self.exclusive:
            old = [name for name in self._files if os.path.lexists(self.path / name)]
        if old and not force:
            command = self._files[old[0]]["command"]
            raise InputError(
                f"{shown(self.path)} exists already and holds results of `headwise {command}` ({shown(old[0])}); use "
                "--force to replace them, or name another directory"
            )

    def _check_exclusive(self) -> None:
        remove_abandoned(self.path / MARKER)
        ours = {LOCK, MARKER, STAGED, PARTIAL, *self._files}
        ours |= {folder.as_posix() for name in self._files for folder in Path(name).parents}
        for file in sorted(self.path.rglob("*")):
            name = file.relative_to(self.path).as_posix()
            if name not in ours and name.partition("/")[0] not in (STAGED, PARTIAL):
                raise InputError(
                    f"{shown(self.path)} exists already and holds {shown(name)}, which headwise did not write; name a "
                    "new directory"
                )

    def _is_unchanged(self, name: str) -> bool:
        """Whether the file is the one that the marker lists."""
        return name in self._files and _same(self.path / name, self._files[name])

    def _write_marker(self, publishing: Mapping[str, Any] | None = None, stale: Iterable[str] = ()) -> None:
        begun = {} if publishing is None else {"publishing": dict(publishing), "stale": list(stale)}
        write_json(self.path / MARKER, {"schema": SCHEMA, "files": self._files, **begun})

    def _discard_partial(self) -> None:
        """Remove partial results; a file that is none of ours is refused."""
        path = self.path / PARTIAL
        if not os.path.lexists(path):
            return
        if path.is_symlink() or not path.is_dir():
            raise InputError(f"{shown(path)} was not written by headwise; name another directory")
        for file in path.iterdir():
            if not PARTIAL_NAMES.fullmatch(file.name) or file.is_dir():
                raise InputError(f"{shown(file)} was not written by headwise; move it away")
        _remove_tree(path)

    def _close(self) -> None:
        if not (self._begun and _may_be_publishing(self.path / MARKER)):
            for name in self._written:  # one by one: to list a directory takes a descriptor, and there may be none left
                file = self.path / STAGED / name
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
                    file.parent.rmdir()
            with contextlib.suppress(OSError):
                _remove_tree(self.path / STAGED)
        self._lock.release()
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove the directories that were made for this run, if nothing is in them."""
        with contextlib.suppress(OSError):
            for folder in reversed(self._made):
                folder.rmdir()


@contextlib.contextmanager
def directory_for(target: str | Path | OutputDirectory, **options: Any) -> Iterator[OutputDirectory]:
    """An open OutputDirectory as it is, which its owner publishes; a path becomes one, with these options."""
    if isinstance(target, OutputDirectory):
        yield target
        return
    with OutputDirectory(target, **options) as out:
        yield out


def _rank(name: str) -> int:
    return LAST.index(name) if name in LAST else -1


def check_unchanged(directory: Path, suffix: str) -> None:
    """Raise InputError if a file with this suffix is not as the marker in `directory` lists it; without one, pass."""
    for name, entry in _read_marker(directory / MARKER)["files"].items():
        file = directory / name
        if name.endswith(suffix) and not _same(file.resolve(), entry):
            state = "has been changed since headwise wrote it" if file.exists() else "is missing"
            raise InputError(f"{shown(file)} {state}; make it again, or delete {MARKER} there if you mean it to be so")


def _contents(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _same(file: Path, entry: Mapping[str, Any]) -> bool:
    """Whether `file` is a regular file with the size and SHA-256 of `entry`."""
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size != entry["size"]:
            return False
        return _contents(file)["sha256"] == entry["sha256"]
    except OSError:
        return False


def _read_marker(file: Path) -> dict[str, Any]:
    """files, publishing and stale; from a damaged marker, nothing: then no file in the directory counts as ours."""
    try:
        marker = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        marker = None
    if not isinstance(marker, dict) or marker.get("schema") != SCHEMA:
        marker = {}

    def entries(field: str) -> dict[str, dict[str, Any]]:
        listed = marker.get(field)
        listed = listed if isinstance(listed, dict) else {}
        return {name: entry for name, entry in listed.items() if _is_entry(name, entry)}

    listed = marker.get("stale")
    stale = [name for name in (listed if isinstance(listed, list) else ()) if isinstance(name, str) and _inside(name)]
    return {"files": entries("files"), "publishing": entries("publishing"), "stale": stale}


def _may_be_publishing(marker: Path) -> bool:
    """Whether the marker lists files that are being renamed; also if it cannot be read."""
    try:
        marker.read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return bool(_read_marker(marker)["publishing"])


def _is_entry(name: str, entry: Any) -> bool:
    fields = {"size": int, "sha256": str, "command": str, "key": str}
    is_whole = isinstance(entry, dict) and all(isinstance(entry.get(field), of) for field, of in fields.items())
    return is_whole and _inside(name)


def _inside(name: str) -> bool:
    """Whether `name` stays inside the directory it is relative to."""
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _remove_tree(path: Path) -> None:
    """Remove a directory of our own; a symbolic link is refused by rmtree."""
    if os.path.lexists(path):
        shutil.rmtree(path)
