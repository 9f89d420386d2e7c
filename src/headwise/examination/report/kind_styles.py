"""How a kind of head looks: a colour, and a letter that says the same."""

from __future__ import annotations

from headwise.examination.report.report_figures import COLOURS, LETTERS

OTHER = "#777777"
"""The colour of a kind that has none."""


def kind_style(kind: str) -> dict[str, str]:
    """colour, letter and ink (black or white, whichever has more contrast on the colour)."""
    colour = COLOURS.get(kind, OTHER)
    return {"colour": colour, "letter": LETTERS.get(kind, kind[:1].upper()), "ink": _ink(colour)}


def _ink(colour: str) -> str:
    """By the relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return "#000" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "#fff"
