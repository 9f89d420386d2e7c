"""A griffe extension that turns the docstrings of this project into Markdown for the reference.

    name    meaning          lines of a name and its meaning become a table
    >>> 1 + 1                examples become code blocks
    (*batch, m, n)           shapes become code, so that asterisks are not emphasis

Lines that are indented, such as formulas, are code in Markdown already.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# up to three names; a sentence that two spaces follow ends with a full stop, which a name does not
ROW = re.compile(r"^(?P<names>`?[\w.]*\w`?(?:(?:, |/| )`?\w+`?){0,2}) {2,}(?P<meaning>\S.*)$")
SHAPE = re.compile(r"(?<![`\w])(\w*\(\*batch[^()]*(?:\([^()]*\)[^()]*)*\))(?!`)")
TAG = re.compile(r"<(?=[A-Za-z/])")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", docstring))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if lines[0].startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if lines[0].startswith("    "):
        return text
    if rows := _rows(lines):
        cells = [f"| {_code(names)} | {_prose(meaning).replace('|', '&#124;')} |" for names, meaning in rows]
        return "\n".join(["| name | meaning |", "|---|---|", *cells])
    return _prose(text)


def _rows(lines: list[str]) -> list[tuple[str, str]]:
    """(names, meaning) of every row, or nothing if the lines are no such table."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if match := ROW.match(line):
            rows.append((match["names"], match["meaning"]))
        elif rows and line.startswith("    "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return []
    return rows


def _code(names: str) -> str:
    return names if "`" in names else f"`{names}`"


def _prose(text: str) -> str:
    return TAG.sub("&lt;", SHAPE.sub(r"`\1`", text))
