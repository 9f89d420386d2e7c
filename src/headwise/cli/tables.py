"""Tables on the terminal, made with rich.  Numbers are right-aligned and never wrapped; words may wrap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def make_table(
    title: str | None,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    words: Collection[str] | None = None,
    no_wrap: Collection[str] = (),
    bold: int | None = None,
) -> Table:
    """A table of strings, shown without interpreting markup; a `rich.text.Text` keeps its style.

    words    headings of left-aligned columns that may wrap (default: the first); the others hold numbers
    no_wrap  headings of further columns that must not wrap
    bold     index of a row in bold; -1 is the last
    """
    from rich.table import Table
    from rich.text import Text

    words = headings[:1] if words is None else words
    table = Table(title=None if title is None else Text(title, style="table.title"), title_justify="left")
    for heading in headings:
        left = heading in words
        table.add_column(Text(heading), justify="left" if left else "right", no_wrap=not left or heading in no_wrap)
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for index, row in enumerate(cells):
        last = bold is not None and index == bold % len(cells)
        table.add_row(*row, style="bold" if last else None)
    return table


def print_table(
    title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], **options: Any
) -> None:
    """Print `make_table` of the same arguments."""
    from rich.console import Console

    Console().print(make_table(title, headings, rows, **options))
