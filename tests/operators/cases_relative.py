"""Contract cases of operators by relative position."""

from __future__ import annotations

from functools import partial

import torch

from headwise.operators import offset, positional, quadratic, shift, toeplitz, toeplitz_softmax
from headwise.operators.relative.quadratic import bordered, tables
from headwise.testing import Case, references
from tests.operators.properties import NOTHING, PADDING, same

_shift = partial(same, build=shift, twin=references.shift)
SHIFT = [
    *(_shift(f"shift, 1-D, {border}", grid=(6,), offset=(2,), border=border) for border in references.BORDERS),
    *(_shift(f"shift, 2-D, {border}", grid=(3, 4), offset=(1, -2), border=border) for border in references.BORDERS),
    *(
        _shift(f"shift, 3-D, {border}", grid=(2, 3, 4), offset=(-1, 0, 3), border=border)
        for border in references.BORDERS
    ),
    _shift("shift, reflect, twice over", grid=(3,), offset=(-7,), border="reflect"),
    _shift("shift, zeros, out of sight", grid=(3, 2), offset=(0, 9), border="zeros"),
    _shift("shift, half turn", grid=(6,), offset=(3,)),
    *(
        _shift(f"shift, stride, {border}", grid=(5, 6), offset=(-1, 1), border=border, stride=(2, 3), queries=(3, 2))
        for border in references.BORDERS
    ),
]


_toeplitz = partial(same, build=toeplitz, twin=references.toeplitz)
_relative = partial(same, build=toeplitz_softmax, twin=references.toeplitz_softmax)
WINDOW = torch.where(torch.arange(11).sub(6).abs() <= 1, torch.linspace(-1, 1, 11, dtype=torch.float64), -torch.inf)
TOEPLITZ = [
    _toeplitz("toeplitz", inputs={"weights": (11,)}, m=6, n=6),
    _toeplitz("toeplitz, more keys", inputs={"weights": (2, 3, 11)}, m=5, n=7),
    _toeplitz("toeplitz, fewer keys", inputs={"weights": (2, 11)}, m=7, n=5),
    _toeplitz("toeplitz, symmetric", inputs={"weights": torch.arange(-5, 6).abs().double()}, m=6, n=6),
    _toeplitz("toeplitz, stochastic", inputs={"weights": torch.full((11,), 1 / 7, dtype=torch.float64)}, m=5, n=7),
    _toeplitz("toeplitz, causal", inputs={"weights": torch.arange(6, -5, -1).clamp(min=0).double()}, m=6, n=6),
    _relative("toeplitz softmax", inputs={"logits": (11,)}, m=6, n=6),
    _relative("toeplitz softmax, window", inputs={"logits": WINDOW}, m=7, n=5),
    _relative("toeplitz softmax, nothing to see", inputs={"logits": (11,)}, m=5, n=7, key_mask=NOTHING),
    _relative("toeplitz softmax, causal, fewer keys", inputs={"logits": (3, 11)}, m=7, n=5, causal=True),
    _relative("toeplitz softmax, everything", inputs={"logits": (3, 11)}, m=5, n=7, causal=True, key_mask=PADDING),
]

REAL = torch.tensor([[False, True, True, True, True, False, False], [True] * 7])  # consecutive keys
_offset = partial(same, build=offset, twin=references.offset)
OFFSET = [
    _offset("offset", m=6, n=6, by=2),
    _offset("offset, more keys", m=3, n=7, by=-2),
    _offset("offset, fewer keys", m=7, n=5, by=-1),
    _offset("offset, nothing to attend to", m=5, n=7, by=1, key_mask=NOTHING),
    _offset("offset, padding", m=5, n=7, by=-3, key_mask=REAL[:, None]),
]

SOME_KEYS = torch.tensor([[True, True, False, True, False, True], [False, True, True, False, True, True]])
NO_KEYS = torch.tensor([[True] * 6, [False] * 6])
CENTRES = {"centres": (3, 2), "log_widths": (3, 2)}

POSITIONAL = [
    Case(
        "quadratic",
        lambda centres, log_widths: quadratic((2, 3), centres, log_widths),
        CENTRES,
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
        CENTRES,
        lambda centres, log_widths: references.quadratic(
            (5, 4), centres, log_widths, queries=(2, 3), stride=(2, 1), origin=(1, -1)
        ),
    ),
    *(
        Case(
            f"quadratic, {name}",
            lambda centres, log_widths, key_mask, grid=grid: quadratic(grid, centres, log_widths, key_mask=key_mask),
            {**inputs, "key_mask": key_mask},
            lambda centres, log_widths, key_mask, grid=grid: references.quadratic(
                grid, centres, log_widths, key_mask=key_mask
            ),
        )
        for name, grid, inputs, key_mask in (
            ("keys masked", (2, 3), CENTRES, SOME_KEYS[:, None]),
            ("all keys masked", (2, 3), CENTRES, NO_KEYS[:, None]),
            ("three axes, keys masked", (2, 3, 2), {"centres": (3,), "log_widths": (3,)}, torch.arange(12) % 5 != 0),
        )
    ),
    *(
        Case(
            f"quadratic, causal, {name}",
            lambda centres, log_widths, grid=grid, **mask: quadratic(grid, centres, log_widths, causal=True, **mask),
            {**inputs, **mask},
            lambda centres, log_widths, grid=grid, **mask: references.quadratic(
                grid, centres, log_widths, causal=True, **mask
            ),
        )
        for name, grid, inputs, mask in (
            ("one axis", (5,), {"centres": (2, 1), "log_widths": (2, 1)}, {}),
            ("two axes", (2, 3), CENTRES, {}),
            ("three axes", (2, 3, 2), {"centres": (2, 3), "log_widths": (1,)}, {}),
            ("keys masked", (2, 3), CENTRES, {"key_mask": SOME_KEYS[:, None]}),
            ("all keys masked", (2, 3), CENTRES, {"key_mask": NO_KEYS[:, None]}),
            (
                "three axes, keys masked",
                (2, 3, 2),
                {"centres": (3,), "log_widths": (3,)},
                {"key_mask": torch.arange(12) % 5 != 0},
            ),
        )
    ),
    Case(
        "tables, causal",
        lambda rows, columns: tables((2, 3), [rows, columns], causal=True),
        {"rows": (2, 3), "columns": (2, 5)},
        lambda rows, columns: references.tables((2, 3), [rows, columns], causal=True),
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
            CENTRES,
            lambda centres, log_widths, border=border: references.bordered(
                (2, 3), ((1, 1), (0, 2)), border, centres, log_widths, queries=(2, 2), stride=(1, 2)
            ),
        )
        for border in ("zeros", "replicate", "reflect", "circular")
    ),
]
