"""Processes that live as long as the tests and run one function after another, together, under gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
"""Seconds after which a collective that nobody answers is an error."""


def _serve(rank: int, size: int, meeting: str, timeout: float, connection: Any) -> None:
    import torch
    import torch._dynamo  # before the process group, whose threads it would keep beyond its end
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while (job := connection.recv()) is not None:
        function, args = job
        try:
            connection.send((True, function(*args)))
        except BaseException as error:
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Failed(AssertionError):
    """A function raised on at least one rank; `errors` has (type, message, traceback) or None for each."""

    def __init__(self, errors: list[tuple[str, str, str] | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {error[2]}" for rank, error in enumerate(errors) if error))


class Pool:
    def __init__(self, size: int, *, timeout: float = TIMEOUT) -> None:
        context = multiprocessing.get_context("forkserver")  # one import of torch for all processes
        context.set_forkserver_preload(["tests.distributed.sharded"])
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        ends = [context.Pipe() for _ in range(size)]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, meeting, timeout, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for _, there in ends:
            there.close()  # so that the end of a process is seen
        self._connections = [here for here, _ in ends]

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for connection in self._connections:
            connection.send((function, args))

    def results(self, *, timeout: float = 300.0) -> list[tuple[bool, Any]]:
        """(True, value) or (False, error) of each rank; a rank that has ended has (False, None)."""
        found: list[tuple[bool, Any]] = []
        for connection in self._connections:
            try:
                if not connection.poll(timeout):
                    raise TimeoutError(f"no answer within {timeout} s")
                found.append(connection.recv())
            except (EOFError, ConnectionResetError):
                found.append((False, None))
        return found

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank, and the results in the order of the ranks."""
        self.start(function, *args)
        found = self.results()
        if not all(good for good, _ in found):
            raise Failed([None if good else value for good, value in found])
        return [value for _, value in found]

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
