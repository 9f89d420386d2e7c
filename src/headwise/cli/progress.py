"""Progress bars on standard error; silent when it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def bar(what: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """`advance(done)` moves the bar; without a total a spinner is shown."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """`progress(what, done, total)` moves the bar of `what`; a new `what` replaces the bar of the previous one."""
    with ExitStack() as stack:
        current: str | None = None
        advance: Callable[[int], None] = lambda done: None  # noqa: E731

        def progress(what: str, done: int, total: int) -> None:
            nonlocal current, advance
            if what != current:
                stack.close()
                advance = stack.enter_context(bar(what, total, quiet=quiet))
                current = what
            advance(done)

        yield progress
