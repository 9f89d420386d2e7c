"""Compile the sources of this folder into one library, check it in a process of its own, and put it into the cache.

    python -m headwise.operators._kernels.native.kernel_build        what runs in the background

One process builds at a time (a lock in the directory of the build); those that waited for it find its result.  The
compiler is $CXX, or the first of g++, c++ and clang++ that is found.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, InputError, shown
from headwise.locks import DirectoryLock
from headwise.operators._kernels.native import kernel_cache
from headwise.operators._kernels.native.kernel_cache import BuildRecord
from headwise.outputs import flush_to_disk, writing

COMPILERS = ("g++", "c++", "clang++")
LONGEST = 900.0
"""Seconds after which a compiler, or a wait for another process that builds, is given up."""

CHECK = """
import sys, torch
torch.set_num_threads(1)
torch.ops.load_library(sys.argv[1])
x = torch.linspace(-87, 87, 3001)
assert torch.allclose(torch.ops.headwise.self_test(x).double(), x.double().exp(), rtol=1e-6, atol=0)
"""


def find_compiler() -> list[str] | None:
    """The command that starts the compiler, or None."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # an unclosed quotation
        chosen = []
    for command in (chosen, *([name] for name in COMPILERS)):
        found = shutil.which(command[0]) if command else None
        if found is not None:
            return [found, *command[1:]]
    return None


def cannot_build() -> str | None:
    """Why no build can be tried on this machine, or None."""
    if sys.platform != "linux":
        return f"the kernels are compiled on Linux only, and this is {sys.platform}"
    if not sys.executable:
        return "Python does not know its own executable, which builds the kernels"
    if find_compiler() is None:
        return "no C++ compiler was found (g++, c++ or clang++; or set CXX)"
    if not (_torch_directory() / "include" / "torch" / "library.h").is_file():
        return "this installation of torch has no C++ headers"
    return None


def build(*, force: bool = False) -> BuildRecord:
    """The record of the build for this machine: of an earlier one, unless there is none or `force`.

    A compiler that fails is recorded; everything that prevents a build from being tried raises InputError or OSError.
    """
    if (reason := cannot_build()) is not None:
        raise InputError(reason)
    compiler = find_compiler() or []
    directory = kernel_cache.make_directory()
    with _lock(directory):
        _remove_abandoned(directory)
        record = kernel_cache.read_record()
        if not force and record is not None and not is_out_of_date(record):
            return record
        (directory / "build.json").unlink(missing_ok=True)
        version = _first_line([*compiler, "--version"])
        start = time.monotonic()
        library = kernel_cache.library_file()
        sha256 = None
        with _workspace(directory) as workspace:
            made = workspace / library.name
            reason = _compile(compiler, made) or _check(made)
            if reason is None:
                with writing(library):
                    sha256 = kernel_cache.file_hash(made)
                    flush_to_disk(made)
                    made.replace(library)
        record = BuildRecord(
            compiler=shlex.join(compiler),
            version=version,
            seconds=round(time.monotonic() - start, 1),
            finished=datetime.now().astimezone().isoformat(timespec="seconds"),
            sha256=sha256,
            reason=reason,
        )
        kernel_cache.write_record(record)
        if reason is None and kernel_cache.damaged(record):
            raise InputError(f"{shown(library)} was removed or changed while it was built; build it again")
        return record


def is_out_of_date(record: BuildRecord) -> bool:
    """Whether to build again: the library is damaged, or the failure was another compiler's."""
    if record.reason is not None:
        return record.compiler != shlex.join(find_compiler() or [])
    return kernel_cache.damaged(record)


def compile_command(compiler: Sequence[str], output: Path) -> list[str]:
    """The command that compiles a program from standard input."""
    includes = [f"-I{path}" for path in (kernel_cache.SOURCES, _torch_directory() / "include")]
    return [*compiler, *kernel_cache.flags(), *includes, "-c", "-xc++", "-", "-o", str(output)]


def link_command(compiler: Sequence[str], compiled: Path, output: Path) -> list[str]:
    """The command that makes the library.

    Without -fopenmp, so that OpenMP's functions are those that torch has loaded: one pool of threads, of torch's size.
    """
    libraries = [f"-L{_torch_directory() / 'lib'}", "-ltorch_cpu", "-lc10"]
    return [*compiler, "-shared", str(compiled), "-o", str(output), *libraries]


def program() -> str:
    """All sources as one: torch's headers, most of the work, are read once."""
    return "".join(f'#include "{file.name}"\n' for file in kernel_cache.sources())


def _compile(compiler: Sequence[str], output: Path) -> str | None:
    """None, or the reason of the failure."""
    compiled = output.with_suffix(".o")
    environment = {**os.environ, "TMPDIR": str(output.parent)}
    reason = _run(compile_command(compiler, compiled), program(), environment)
    return reason or _run(link_command(compiler, compiled, output), environment=environment)


def _check(library: Path) -> str | None:
    reason = _run([sys.executable, "-c", CHECK, str(library)], environment=_environment())
    return None if reason is None else f"the compiled library does not work ({reason})"


def _run(command: Sequence[str], stdin: str = "", environment: dict[str, str] | None = None) -> str | None:
    """None if the command succeeded, otherwise one line that says how it failed.

    It has a process group, so that what it has started (g++ starts cc1plus) ends with it when we are stopped.
    """
    name = Path(command[0]).name
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(command, **pipes, text=True, errors="replace", env=environment, process_group=0)
    except OSError as error:
        return f"{name} could not be started: {error.strerror}"
    with process:
        try:
            _, printed = process.communicate(stdin, timeout=LONGEST)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"{name} did not end within {LONGEST:.0f} seconds"
            raise
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed nothing")
    return f"{name} ended with {process.returncode}: {said[:300]}"


def start_in_background() -> subprocess.Popen[bytes]:
    """`build` in a process that goes on if this one ends, as `git gc --auto` does; it takes well under a minute."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    """Python's search path of this process for another, which must find the same headwise and torch."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}


def _torch_directory() -> Path:
    return Path(torch.__file__).parent


def _first_line(command: Sequence[str]) -> str:
    with contextlib.suppress(OSError, IndexError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()[0]
    return "unknown"


@contextlib.contextmanager
def _workspace(directory: Path) -> Iterator[Path]:
    """A directory for all that the compiler writes."""
    path = directory / f".building-{os.getpid()}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(directory: Path) -> None:
    """Remove what earlier builds left, as the lock is ours: a compiler that still runs cannot write there."""
    for abandoned in directory.glob(".building-*"):
        shutil.rmtree(abandoned)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Wait for the lock on the directory, and hold it."""
    lock = DirectoryLock(directory, "kernels build")
    deadline = time.monotonic() + LONGEST
    while True:
        try:
            lock.acquire()
            break
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    try:
        yield
    finally:
        lock.release()


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(HeadwiseError, OSError):
        build()
