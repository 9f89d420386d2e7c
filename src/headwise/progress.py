"""Progress of long work: a function that is told how far it is, or bars on standard error with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from headwise.errors import InputError

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""`progress(what, done, total)`: so many of the steps of `what` are done; a total of None is not known beforehand."""

SOON, OFTEN = 2.0, 10.0
"""Where standard error is not a terminal: seconds before the first line, and between two lines."""


@contextmanager
def reported(progress: Progress | bool | None) -> Iterator[Progress]:
    """The function to tell: the one given; for True bars as the command shows them; for None or False nothing is told.

    >>> with reported(lambda what, done, total: print(f"{what}: {done} of {total}")) as report:
    ...     report("measuring heads", 3, 16)
    measuring heads: 3 of 16
    """
    if progress is None or isinstance(progress, bool):
        with bars(quiet=not progress) as shown:
            yield shown
    elif callable(progress):
        yield progress
    else:
        raise InputError(
            f"progress is a {type(progress).__name__}; give True for bars on standard error, or a function that is "
            "called with what is done, the number of steps done, and their total or None"
        )


@contextmanager
def bar(what: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """`advance(done)` moves the bar; without a total a spinner is shown, on a terminal only."""
    if quiet:
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        yield lines(what, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def lines(what: str, total: int | None, clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
    """`advance(done)` writes such as "measuring heads: 3 of 16, about 20 s left", if it takes over two seconds."""
    start, next_line = clock(), SOON

    def advance(done: int) -> None:
        nonlocal next_line
        seconds = clock() - start
        if total is None or not 0 < done < total or seconds < next_line:
            return
        next_line = seconds + OFTEN
        left = in_words(seconds * (total - done) / done)
        print(f"{what}: {done} of {total}, about {left} left", file=sys.stderr, flush=True)

    return advance


def in_words(seconds: float) -> str:
    """
    >>> in_words(7.4), in_words(200), in_words(4000)
    ('7 s', '3 min', '1 h 7 min')
    """
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Progress]:
    """`progress(what, done, total)` moves the bar of `what`; a new `what` replaces the bar of the previous one."""
    with ExitStack() as stack:
        current: str | None = None
        advance: Callable[[int], None] = lambda done: None  # noqa: E731

        def progress(what: str, done: int, total: int | None) -> None:
            nonlocal current, advance
            if what != current:
                stack.close()
                advance = stack.enter_context(bar(what, total, quiet=quiet))
                current = what
            advance(done)

        yield progress
