"""One line an operator and variant: how it is built, from what, and its twin."""

from __future__ import annotations

import torch

from headwise.operators.softmax import softmax
from headwise.testing import Case, references

PADDING = torch.tensor([[True] * 7, [True, True, True, True, False, False, False]])
SQUARE = {"q": (2, 3, 6, 4), "k": (2, 3, 6, 4)}
WIDE = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4)}
CASES = [
    Case("softmax", softmax, WIDE, references.softmax),
    Case(
        "softmax, causal",
        lambda q, k: softmax(q, k, causal=True),
        SQUARE,
        lambda q, k: references.softmax(q, k, causal=True),
    ),
    Case(
        "softmax, causal wide",
        lambda q, k: softmax(q, k, causal=True),
        WIDE,
        lambda q, k: references.softmax(q, k, causal=True),
    ),
    Case(
        "softmax, causal tall",
        lambda q, k: softmax(q, k, causal=True),
        {"q": (2, 3, 7, 4), "k": (2, 3, 5, 4)},
        lambda q, k: references.softmax(q, k, causal=True),
    ),
    Case(
        "softmax, padding",
        lambda q, k: softmax(q, k, padding=PADDING),
        WIDE,
        lambda q, k: references.softmax(q, k, padding=PADDING[:, None]),
    ),
    Case("softmax, 2-D", softmax, {"q": (5, 4), "k": (7, 4)}, references.softmax),
    Case("softmax, 3-D", softmax, {"q": (2, 5, 4), "k": (2, 7, 4)}, references.softmax),
]
