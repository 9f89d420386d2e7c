"""Where the compiled library is, whether it may be loaded, and what is known of its build.

    $HEADWISE_CACHE/kernels/<torch version>-<CPU capability>-<hash>/     default: ~/.cache/headwise, by XDG_CACHE_HOME
        kernels.so      the library
        build.json      how it was built and the SHA-256 of the library, or why the build failed

The hash is that of the sources, of the flags and of torch's build, so that nothing is ever loaded that was built for
something else.  Loading a library runs its code: the directories are made with permissions 0700, and a library that
another user could have written or replaced is not loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.errors import InputError, shown
from headwise.outputs import write_json
from headwise.reading import fields, nullable, number, read_json, string

SOURCES = Path(__file__).parent

_VECTORS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
}
"""Flags of the capabilities that torch has vectors for; others use what the compiler assumes."""


@dataclass(frozen=True)
class BuildRecord:
    """What build.json holds."""

    compiler: str  # as found; a failure with one compiler does not count for another
    version: str  # first line of `compiler --version`
    seconds: float
    finished: str
    sha256: str | None  # of the library; None if the build failed
    reason: str | None = None  # why it failed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_RECORD = fields(
    {
        "compiler": string(),
        "version": string(),
        "seconds": number(0),
        "finished": string(),
        "sha256": nullable(string()),
        "reason": nullable(string()),
    }
)


def sources() -> list[Path]:
    """The files that are compiled, in the order in which they are included."""
    return sorted(SOURCES.glob("*.cpp"))


def operations() -> list[str]:
    """The names under torch.ops.headwise that the sources define."""
    return [name for file in sources() for name in re.findall(r'\.def\(\s*"(\w+)', file.read_text())]


@functools.cache
def capability() -> str:
    """The vector instructions that torch uses on this machine: AVX512, AVX2, DEFAULT, …"""
    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def flags() -> list[str]:
    """Everything the compiler is told except where files are."""
    vectors = capability() if capability() in _VECTORS else "DEFAULT"
    return [
        "-std=c++20",
        "-O3",
        "-fPIC",
        "-fopenmp",  # at::parallel_for is written out by its header
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-w",  # warnings of torch's headers
        "-DNDEBUG",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DCPU_CAPABILITY={vectors}",
        f"-DCPU_CAPABILITY_{vectors}",
        *_VECTORS.get(vectors, ()),
    ]


@functools.cache
def key() -> str:
    """The name of the directory of this build."""
    digest = hashlib.sha256()
    build = [torch.__version__, str(torch.version.git_version), platform.machine(), *flags()]
    for part in (*build, *(text for file in _all_sources() for text in (file.name, file.read_text()))):
        digest.update(part.encode() + b"\0")
    return f"{torch.__version__}-{capability().replace(' ', '_')}-{digest.hexdigest()[:12]}"


def _all_sources() -> Sequence[Path]:
    return [*sources(), *sorted(SOURCES.glob("*.h"))]


def directory() -> Path:
    """The directory of this build, which need not exist."""
    try:
        shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "headwise")
        root = Path(os.environ.get("HEADWISE_CACHE") or shared).expanduser().absolute()
    except RuntimeError as error:
        raise InputError("there is no home directory for the compiled kernels; set HEADWISE_CACHE") from error
    return root / "kernels" / key()


def make_directory() -> Path:
    """The directory of this build, made for this user alone.  Raises OSError, or InputError if others can write it."""
    path = directory()
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    for made in (path.parent, path):
        made.mkdir(mode=0o700, exist_ok=True)
    if (reason := untrusted(path)) is not None:
        raise InputError(reason)
    return path


def library_file() -> Path:
    return directory() / "kernels.so"


def read_record() -> BuildRecord | None:
    """How the library of this key was built, or why it could not be; None if nothing is known."""
    try:
        return BuildRecord(**read_json(directory() / "build.json", _RECORD, "a record of a build"))
    except InputError:
        return None


def write_record(record: BuildRecord) -> None:
    write_json(directory() / "build.json", record.to_json())


def damaged(record: BuildRecord) -> bool:
    """Whether the library is not the file that the build made."""
    try:
        return file_hash(library_file()) != record.sha256
    except OSError:
        return True


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def untrusted(path: Path) -> str | None:
    """Why another user could have written `path`, or None: it and all directories above must be ours or root's.

    A directory that a group may write counts as ours if the group is the user's own (its number is the user's), and one
    that everyone may write if it is sticky, as /tmp is: others cannot replace our files there.
    """
    user = os.geteuid()
    path = path.resolve()
    for place in (path, *path.parents):
        try:
            found = place.stat()
        except OSError as error:
            return f"{shown(place)} cannot be read: {error.strerror}"
        by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in (0, user)
        sticky = place != path and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, user):
            return f"{shown(place)} belongs to another user; set HEADWISE_CACHE to a directory of your own"
        if (by_group or found.st_mode & stat.S_IWOTH) and not sticky:
            return f"{shown(place)} can be written by other users; set HEADWISE_CACHE to a directory of your own"
    return None
