"""One line a sparse or linear-cost operator and variant, for `cases`."""

from __future__ import annotations

import torch

from headwise.operators.efficient import efficient
from headwise.operators.efficient_causal import efficient_causal
from headwise.operators.window import window
from headwise.testing import Case
from headwise.testing import references_sparse as twins

PADDING = torch.arange(9) < torch.tensor([[9], [5]])
SELF = {"q": (2, 3, 9, 4), "k": (2, 3, 9, 4)}
LONG = {"q": (1, 2, 150, 4), "k": (1, 2, 150, 4)}
EARLY = {"q": (2, 3, 9, 4), "k": (2, 3, 5, 4)}
LATE = {"q": (2, 3, 5, 4), "k": (2, 3, 9, 4)}


def both(name: str, builder, twin, inputs, *args, **options) -> Case:
    """A builder and a twin that take the same arguments; a padding (b, n) is given heads for the twin."""
    padding = options.get("padding")
    slow = options if padding is None else {**options, "padding": padding.unsqueeze(1)}
    return Case(name, lambda q, k: builder(q, k, *args, **options), inputs, lambda q, k: twin(q, k, *args, **slow))


def causal(twin):
    return lambda q, k, **options: twin(q, k, causal=True, **options)


TABLE_CASES = [
    both("window", window, twins.window, SELF, 3),
    both("window, even, wider than n", window, twins.window, SELF, 24),
    both("window, causal", window, twins.window, SELF, 4, causal=True),
    both("window, bands", window, twins.window, LONG, 17),
    both("window, bands, causal, tokens", window, twins.window, LONG, 9, causal=True, tokens=2),
    both("window, tokens", window, twins.window, SELF, 3, tokens=2),
    both("window, late queries", window, twins.window, LATE, 3, tokens=1),
    both("window, padding", window, twins.window, SELF, 3, padding=PADDING, tokens=1),
    both("window, causal, padding", window, twins.window, SELF, 3, padding=PADDING.flip(-1), causal=True),
    both("efficient", efficient, twins.efficient, LATE),
    both("efficient, padding", efficient, twins.efficient, LATE, padding=PADDING, scale=1.0),
    both("efficient, causal", efficient_causal, causal(twins.efficient), SELF),
    both("efficient, causal, blocks", efficient_causal, causal(twins.efficient), LONG),
    both("efficient, causal, late queries", efficient_causal, causal(twins.efficient), LATE, padding=PADDING),
    both("efficient, causal, early queries", efficient_causal, causal(twins.efficient), EARLY, padding=PADDING[:, 4:]),
]
