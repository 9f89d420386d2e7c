"""A progress bar on standard error for anything that takes longer than a moment; silent when asked or when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """`advance(done)` moves the bar; without a total it only turns."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    shown = [SpinnerColumn(), TextColumn("{task.description}")]
    if total is not None:
        shown += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
