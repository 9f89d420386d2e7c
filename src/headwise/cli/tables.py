"""Tables on the terminal, made with rich.  They fit its width, and nothing is ever cut off.

Numbers are right-aligned and stay whole.  Words wrap at spaces, and a name that is too long for its column after a dot,
slash, underscore or hyphen of its own.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

GAP = 3  # characters between two columns
NARROWEST = 8
"""A column of words is not made narrower: a line longer than the terminal can be read, one letter a line cannot."""


def make_table(
    title: str | None,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    words: Collection[str] | None = None,
    no_wrap: Collection[str] = (),
    bold: int | None = None,
    width: int | None = None,
) -> Table:
    """A table of strings, shown without interpreting markup; a `rich.text.Text` keeps its style.

    words    headings of left-aligned columns that may wrap (default: the first); the others hold numbers
    no_wrap  headings of further columns that must not wrap
    bold     index of a row in bold; -1 is the last
    width    of the whole table; default: that of the terminal
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    words = headings[:1] if words is None else words
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    columns = [[row[i].plain for row in cells] for i in range(len(headings))]
    may_wrap = [heading in words and heading not in no_wrap for heading in headings]
    widths = column_widths(headings, columns, may_wrap, terminal_width() if width is None else width)
    table = Table(
        title=None if title is None else Text(title, style="table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for heading, size in zip(headings, widths, strict=True):
        justify = "left" if heading in words else "right"
        table.add_column(Text(wrapped(heading, size)), justify=justify, min_width=size, no_wrap=True)
    for index, row in enumerate(cells):
        last = bold is not None and index == bold % len(cells)
        lines = [Text(wrapped(cell.plain, size), style=cell.style) for cell, size in zip(row, widths, strict=True)]
        table.add_row(*lines, style="bold" if last else None)
    return table


def print_table(
    title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], **options: Any
) -> None:
    """Print `make_table` of the same arguments; a title that is wider than the table stays in one line."""
    from rich.console import Console
    from rich.text import Text

    table, console = make_table(None, headings, rows, **options), Console()
    if title is not None:
        console.print(Text(title, style="italic"))
    needed = sum(column.min_width or 0 for column in table.columns) + GAP * (len(table.columns) - 1)
    Console(width=max(needed, console.width)).print(table)


def print_text(text: str, *, indent: str = "", first: str | None = None) -> None:
    """Print a sentence in lines of at most the width of the terminal; `first` is before its first line."""
    begin = indent if first is None else first
    wrapper = textwrap.TextWrapper(terminal_width(), begin, indent, break_long_words=False, break_on_hyphens=False)
    print(wrapper.fill(text))


def terminal_width() -> int:
    """Columns of the terminal; 80 if the output is not shown in one."""
    from rich.console import Console

    return Console().width


def column_widths(
    headings: Sequence[str], columns: Sequence[Sequence[str]], may_wrap: Sequence[bool], width: int
) -> list[int]:
    """The width of each column: that of its widest line if all fit, else words wrap, the longest lines first."""
    widest = [_longest_line([heading, *cells]) for heading, cells in zip(headings, columns, strict=True)]
    widths = [
        max(_longest_line(heading.split()), _longest_piece(cells) if wrap else _longest_line(cells))
        for heading, cells, wrap in zip(headings, columns, may_wrap, strict=True)
    ]
    free = width - GAP * (len(widths) - 1) - sum(widths)
    while free < 0:  # names are broken inside their parts
        index = max(range(len(widths)), key=lambda i: widths[i] * may_wrap[i])
        if not may_wrap[index] or widths[index] <= NARROWEST:
            break
        widths[index] -= 1
        free += 1
    for words in (True, False):  # the headings of numbers, which may wrap too, get what is left
        while free > 0:
            narrow = [i for i in range(len(widths)) if may_wrap[i] == words and widths[i] < widest[i]]
            if not narrow:
                break
            widths[min(narrow, key=lambda i: widths[i])] += 1
            free -= 1
    return widths


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width`: broken at spaces, inside a longer word after . / _ -, else anywhere."""
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if _length(line) <= width:
        return [line]
    lines, current = [], ""
    for word in line.split(" "):
        if current and _length(current) + 1 + _length(word) <= width:
            current = f"{current} {word}"
            continue
        if current:
            lines.append(current)
        *full, current = _broken_word(word, width)
        lines += full
    return [*lines, current]


def _broken_word(word: str, width: int) -> list[str]:
    """The word in parts of at most `width`."""
    lines = [""]
    for piece in _pieces(word):
        if _length(lines[-1]) + _length(piece) <= width:
            lines[-1] += piece
            continue
        for letter in piece if _length(piece) > width else [piece]:
            if not lines[-1] or _length(lines[-1]) + _length(letter) > width:
                lines.append(letter)
            else:
                lines[-1] += letter
    return [line for line in lines if line] or [""]


def _pieces(word: str) -> list[str]:
    """encoder.layer.0 -> encoder. layer. 0"""
    return re.findall(r"[^./_-]*[./_-]+|[^./_-]+", word)


def _longest_piece(cells: Iterable[str]) -> int:
    return max((_length(piece) for cell in cells for word in cell.split() for piece in _pieces(word)), default=0)


def _longest_line(cells: Iterable[str]) -> int:
    return max((_length(line) for cell in cells for line in cell.split("\n")), default=0)


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
