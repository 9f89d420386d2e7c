"""Contract cases of attention by position: how each is built, from what, and its reference."""

from __future__ import annotations

import torch

from headwise.operators.relative.positional import positional
from headwise.operators.relative.quadratic import bordered, quadratic, tables
from headwise.testing import Case, references

SPARSE = torch.tensor([[True, True, False, True, False, True], [False, True, True, False, True, True]])
EMPTY = torch.tensor([[True] * 6, [False] * 6])
HEADS = {"centres": (3, 2), "log_widths": (3, 2)}

CASES_POSITIONAL = [
    Case(
        "quadratic",
        lambda centres, log_widths: quadratic((2, 3), centres, log_widths),
        HEADS,
        lambda centres, log_widths: references.quadratic((2, 3), centres, log_widths),
    ),
    Case(
        "quadratic, one axis",
        lambda centres, log_widths: quadratic((5,), centres, log_widths),
        {"centres": (2, 1), "log_widths": (2, 1)},
        lambda centres, log_widths: references.quadratic((5,), centres, log_widths),
    ),
    Case(
        "quadratic, three axes, shared width",
        lambda centres, log_widths: quadratic((2, 3, 2), centres, log_widths),
        {"centres": (2, 3), "log_widths": (1,)},
        lambda centres, log_widths: references.quadratic((2, 3, 2), centres, log_widths),
    ),
    Case(
        "quadratic, other queries",
        lambda centres, log_widths: quadratic(
            (5, 4), centres, log_widths, queries=(2, 3), stride=(2, 1), origin=(1, -1)
        ),
        HEADS,
        lambda centres, log_widths: references.quadratic(
            (5, 4), centres, log_widths, queries=(2, 3), stride=(2, 1), origin=(1, -1)
        ),
    ),
    Case(
        "quadratic, keys masked",
        lambda centres, log_widths: quadratic((2, 3), centres, log_widths, key_mask=SPARSE[:, None]),
        HEADS,
        lambda centres, log_widths: references.quadratic((2, 3), centres, log_widths, key_mask=SPARSE[:, None]),
    ),
    Case(
        "quadratic, all keys masked",
        lambda centres, log_widths: quadratic((2, 3), centres, log_widths, key_mask=EMPTY[:, None]),
        HEADS,
        lambda centres, log_widths: references.quadratic((2, 3), centres, log_widths, key_mask=EMPTY[:, None]),
    ),
    Case(
        "quadratic, three axes, keys masked",
        lambda centres, log_widths: quadratic((2, 3, 2), centres, log_widths, key_mask=torch.arange(12) % 5 != 0),
        {"centres": (3,), "log_widths": (3,)},
        lambda centres, log_widths: references.quadratic(
            (2, 3, 2), centres, log_widths, key_mask=torch.arange(12) % 5 != 0
        ),
    ),
    Case(
        "tables",
        lambda rows, columns: tables((2, 3), [rows, columns]),
        {"rows": (2, 3), "columns": (2, 5)},
        lambda rows, columns: references.tables((2, 3), [rows, columns]),
    ),
    Case(
        "positional",
        lambda rows, columns: positional([rows, columns]),
        {"rows": (3, 2, 2), "columns": (3, 2, 3)},
        lambda rows, columns: references.positional(
            (2, 2), (2, 3), lambda q, k: rows[..., q[0], k[0]] + columns[..., q[1], k[1]]
        ),
    ),
    *(
        Case(
            f"quadratic, {border} border",
            lambda centres, log_widths, border=border: bordered(
                (2, 3), ((1, 1), (0, 2)), border, centres, log_widths, queries=(2, 2), stride=(1, 2)
            ),
            HEADS,
            lambda centres, log_widths, border=border: references.bordered(
                (2, 3), ((1, 1), (0, 2)), border, centres, log_widths, queries=(2, 2), stride=(1, 2)
            ),
        )
        for border in ("zeros", "replicate", "reflect", "circular")
    ),
]
