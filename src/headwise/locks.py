"""One writer per directory: a lock file that names its owner.

The lock is `flock` on the file, which the kernel releases when its owner ends, however it ends.  Where `flock` does not
exist or the file system lacks it, the file itself is the lock: it is created only if absent, and one whose owner, a
process of this host, has ended is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from headwise.errors import InputError, shown

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".headwise.lock"
_NO_FLOCK = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class DirectoryLock:
    """Held from `acquire` to `release`; a second owner gets an InputError that names the first."""

    def __init__(self, directory: Path, command: str) -> None:
        self.directory, self.command, self.file = directory, command, directory / NAME
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise InputError (held by another run) or OSError (the directory cannot be written)."""
        if self.file.is_symlink() or _read(self.file) is None:
            raise InputError(f"{shown(self.file)} is not a lock file of headwise; name another directory")
        while self._descriptor is None:
            self._descriptor = self._by_flock() if fcntl is not None else self._by_creation(self.file)

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # removed while it is locked: a waiting process sees another inode
                self.file.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _by_flock(self) -> int | None:
        """The locked descriptor; None if the file was removed or replaced in between."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[union-attr]
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_FLOCK:
                return self._by_creation(self.file)
            raise self._held() from error
        return self._signed(descriptor, self.file)

    def _by_creation(self, file: Path) -> int | None:
        """The descriptor of a file that did not exist; None after removing the file of an owner that has ended.

        Only the process that holds `file`-, a lock of the same kind, may remove `file`, and only if it still is that of
        the dead owner: otherwise two that see the same dead owner could remove each other's new file.
        """
        with contextlib.suppress(FileExistsError):
            return self._signed(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), file)
        owner = _read(file)
        deadline = time.monotonic() + 1
        while owner == {} and file.exists() and time.monotonic() < deadline:  # made, but not yet signed
            time.sleep(0.01)
            owner = _read(file)
        if owner is None or (owner and not _has_ended(owner)):
            raise self._held()
        guard = file.with_name(f"{file.name}-")
        descriptor = self._by_creation(guard)
        if descriptor is not None:
            if _read(file) == owner:
                file.unlink(missing_ok=True)
            os.close(descriptor)
            guard.unlink(missing_ok=True)
        return None

    def _signed(self, descriptor: int, file: Path) -> int | None:
        """The descriptor after writing this process's name; None if the file was removed or replaced meanwhile."""
        owner = {
            "headwise": self.command,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(owner).encode())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        os.close(descriptor)
        return None

    def _held(self) -> InputError:
        deadline = time.monotonic() + 1
        while not (owner := _read(self.file)) or _has_ended(owner):  # the owner has not yet written its name
            if time.monotonic() > deadline:
                owner = {}
                break
            time.sleep(0.01)
        who = "another run"
        if owner:
            who = f"`headwise {owner.get('headwise')}` (process {owner.get('pid')} on {owner.get('host')}, "
            who += f"since {owner.get('since')})"
        return InputError(f"{shown(self.directory)} is being written by {who}; wait for it, or name another directory")


def _read(file: Path) -> dict[str, Any] | None:
    """The owner written in a lock file; {} if there is none, None if the content is something else."""
    try:
        content = file.read_bytes()
    except OSError:
        return {}
    if not content.strip(b"\0 \n"):
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        owner = json.loads(content)
        return owner if isinstance(owner, dict) and "headwise" in owner else None
    return None


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this host that no longer runs."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
