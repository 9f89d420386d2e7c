"""Run `headwise ARGUMENTS` many times in real processes, without importing torch each time.

A server has imported everything and computed nothing; it forks one child per run, in a process group of its own, with
its output in files.  `Server.start` returns at once, so that the caller can send signals; `Run.wait` returns what a
shell would see.  A request can also plant a fault: the child watches its own file-system calls through an audit hook
and does something at the k-th that writes below its working directory.

    kill, term, int   send itself the signal
    tell              write a byte to the pipe `tell`, so that the caller can send a signal a moment later
    errno N           let the call fail with that error
    remove DIR        delete DIR first

At the call number "end", which comes after `main`, a signal is sent as by a user who is a moment too late.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "MPLBACKEND": "agg"}
OUTSIDE = 70
"""Exit code of a child in which an exception left `main`; its standard error has the traceback."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


@dataclass(frozen=True)
class Ended:
    """What a shell sees of a finished run."""

    code: int  # 128 + signal for a process that a signal ended
    out: str
    err: str
    seconds: float
    writes: int  # file-system calls that wrote below the working directory; 0 if the process could not say


@dataclass
class Run:
    """A command that has been started in `directory`."""

    server: Server
    pid: int
    directory: Path
    logs: Path
    began: float = field(default_factory=time.monotonic)

    def signal(self, name: str, *, whole_group: bool = False) -> None:
        """Send a signal as `kill` does, or to the whole group, as a terminal does on Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (os.killpg if whole_group else os.kill)(self.pid, SIGNALS[name])

    def told(self, seconds: float) -> bool:
        """Wait until the child has reached the call at which it was to tell; False if it has not in that time."""
        with open(self.logs / ".tell", "rb", buffering=0) as pipe:
            return bool(select.select([pipe], [], [], seconds)[0]) and bool(pipe.read(1))

    def wait(self, seconds: float = 600.0) -> Ended:
        """The end of the run; one that takes longer is killed and reported as code 124."""
        reply = self.server.reply(seconds)
        late = reply is None
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            reply = self.server.reply(30.0) or {}
        status = reply.get("status", 0)
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        out, err = ((self.logs / name).read_text(errors="replace") for name in (".stdout", ".stderr"))
        counted = self.logs / ".writes"
        writes = int(counted.read_text() or 0) if counted.exists() else 0
        for name in (".stdout", ".stderr", ".writes", ".tell"):
            (self.logs / name).unlink(missing_ok=True)
        return Ended(124 if late else code, out, err, time.monotonic() - self.began, writes)

    def processes_left(self, patience: float = 2.0) -> bool:
        """Whether processes of the run outlive it, in its group or in its directory; they are then killed."""
        until = time.monotonic() + patience
        while left := self._processes():
            if time.monotonic() > until:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return True
            time.sleep(0.02)
        return False

    def _processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                in_directory = Path(os.readlink(entry / "cwd").removesuffix(" (deleted)")).is_relative_to(
                    self.directory
                )
                if in_directory or os.getpgid(int(entry.name)) == self.pid:
                    found.append(int(entry.name))
        return found


class Server:
    """The warm process; one run at a time."""

    def __init__(self) -> None:
        environment = {**os.environ, **ONE_THREAD, **QUIET, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        command = [sys.executable, "-P", "-m", "tests.faults.server"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, bufsize=0
        )
        self._line = b""
        if self.reply(300.0) is None:
            raise RuntimeError("the server did not start")

    def start(self, arguments: list[str], directory: Path, **request: Any) -> Run:
        """Run `headwise *arguments` in `directory`.

        at, do     plant a fault, see above
        limits     {name of a resource limit: value}; RLIMIT_AS counts from what the process has
        user       run as this user id
        environment  variables to set
        logs       another directory for what the command prints
        """
        logs = Path(request.pop("logs", directory))
        for path in (directory, logs):
            path.mkdir(parents=True, exist_ok=True)
        if request.get("do") == "tell":
            os.mkfifo(logs / ".tell")
        line = json.dumps({"arguments": arguments, "directory": str(directory), "logs": str(logs), **request})
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        reply = self.reply(300.0)
        if reply is None:
            raise RuntimeError("the server does not answer")
        return Run(self, reply["pid"], directory, logs)

    def run(self, arguments: list[str], directory: Path, *, seconds: float = 600.0, **request: Any) -> Ended:
        run = self.start(arguments, directory, **request)
        ended = run.wait(seconds)
        run.processes_left(0.0)
        return ended

    def reply(self, seconds: float) -> dict[str, Any] | None:
        stream = self._process.stdout
        assert stream is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._line:
            if not select.select([stream], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = os.read(stream.fileno(), 4096)
            if not more:
                raise RuntimeError("the server has ended")
            self._line += more
        line, _, self._line = self._line.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Watch:
    """An audit hook: counts the calls that write below `directory`, and acts at the k-th."""

    def __init__(self, directory: str, logs: str, at: int | str | None, do: str | None) -> None:
        self.directory, self.logs = os.path.join(directory, ""), os.path.join(logs, "")
        self.at, self.do = at, (do or "").split(maxsplit=1)
        self.count = 0
        self.active = True

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.active or not self._writes(event, arguments):
            return
        self.count += 1
        if self.count != self.at:
            return
        self.active = False
        what, *rest = self.do
        if what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
            time.sleep(0)  # a Python-level handler runs here
        elif what == "tell":
            with open(self.logs + ".tell", "wb", buffering=0) as pipe:
                pipe.write(b"x")
        elif what == "errno":
            raise OSError(int(rest[0]), os.strerror(int(rest[0])), str(arguments[0]))
        elif what == "remove":
            shutil.rmtree(self.directory + rest[0], ignore_errors=True)

    def _writes(self, event: str, arguments: tuple) -> bool:
        if event == "open":
            path, _, flags = arguments
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return False
            return self._below(path)
        if event == "os.rename":
            return self._below(arguments[1])
        if event in ("os.mkdir", "os.rmdir", "os.remove", "os.symlink", "os.link", "os.truncate"):
            # shutil.rmtree names files relative to an open directory
            relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1
            return relative or self._below(arguments[1 if event in ("os.symlink", "os.link") else 0])
        return False

    def _below(self, path: Any) -> bool:
        if isinstance(path, int):  # a file that was opened, and counted then
            return False
        text = os.path.abspath(os.fsdecode(path))
        return text.startswith(self.directory) and os.path.basename(text) not in (
            ".stdout",
            ".stderr",
            ".writes",
            ".tell",
        )


def _child(request: dict[str, Any]) -> None:
    """Become the command; ends the process."""
    directory, logs = request["directory"], request["logs"]
    os.chdir(directory)
    os.environ["TMPDIR"] = tempfile.tempdir = directory  # without the file by which Python tries whether it can write
    for target, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, ".stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, ".stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        fd = os.open(os.path.join(logs, name), flags, 0o666)
        os.dup2(fd, target)
        os.close(fd)
    counted = os.open(os.path.join(logs, ".writes"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))
    from headwise.__main__ import _end
    from headwise.cli.main import main

    os.environ.update(request.get("environment", {}))
    for name, value in request.get("limits", {}).items():
        limit = getattr(resource, name)
        if name == "RLIMIT_AS":
            value += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    if "user" in request:
        os.setgid(request["user"])
        os.setuid(request["user"])
    watch = Watch(directory, logs, request.get("at"), request.get("do"))
    sys.addaudithook(watch)
    sys.argv = ["headwise", *request["arguments"]]
    signal.signal(signal.SIGINT, _end)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())
        code = main()  # as the process of a user: given arguments, it would restore Python's handlers
        if request.get("at") == "end":
            os.kill(os.getpid(), SIGNALS[request["do"]])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 2
    except BaseException:
        traceback.print_exc()
        code = OUTSIDE
    watch.active = False
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(counted, str(watch.count).encode())
    except OSError:
        pass  # the disk is full
    os._exit(code)


def _serve() -> None:
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch
    import transformers

    for name in (
        "AutoModel",
        "AutoConfig",
        "AutoTokenizer",
        "AutoImageProcessor",
        "BertModel",
        "GPT2Model",
        "ViTModel",
    ):
        getattr(transformers, name)  # imported when first named
    import headwise.bench.scaling_figure
    import headwise.cli.main
    import headwise.convolution.exported_program
    import headwise.examination.report.page
    import headwise.growth.demo
    import headwise.ledger.verification
    import headwise.replacement.install.saved
    import headwise.replacement.model_comparison
    import headwise.replacement.planning.make_plan
    import headwise.replacement.planning.trade_off_figure

    for module, _ in headwise.cli.main.COMMANDS.values():
        __import__(module)
    torch.set_num_threads(1)
    replies = os.dup(1)
    os.dup2(2, 1)
    os.write(replies, b'{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS.values())  # until the child is in `main`
        pid = os.fork()
        if pid == 0:
            os.close(replies)
            os.setpgid(0, 0)
            try:
                _child(request)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(OUTSIDE)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())
        try:
            os.setpgid(pid, pid)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.ESRCH):
                raise
        os.write(replies, json.dumps({"pid": pid}).encode() + b"\n")
        _, status = os.waitpid(pid, 0)
        os.write(replies, json.dumps({"status": status}).encode() + b"\n")
    os._exit(0)  # there is nothing to tidy up


if __name__ == "__main__":
    _serve()
