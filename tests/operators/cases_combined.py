"""One line a variant of a window with a low-rank rest, for `cases`."""

from __future__ import annotations

import torch

from headwise.operators.linear.projections import dense, pooling
from headwise.operators.linear.window_low_rank import window_low_rank
from headwise.testing import Case
from headwise.testing import references_combined as combined
from headwise.testing import references_sparse as sparse

PADDING = torch.arange(9) < torch.tensor([[9], [5]])
SELF = {"q": (2, 3, 9, 4), "k": (2, 3, 9, 4)}
LATE = {"q": (2, 3, 5, 4), "k": (2, 3, 9, 4)}
LEARNED = {"e": (3, 2, 9), "f": (2, 9), "bias": (3, 2)}
MEANS = sparse.projection("pooling", 150, size=50)


def learned(name: str, inputs, width: int, **options) -> Case:
    key_mask = options.get("key_mask")
    slow = options if key_mask is None else {**options, "key_mask": key_mask[:, None]}
    return Case(
        name,
        lambda q, k, e, f, bias: window_low_rank(q, k, width, dense(e), dense(f), bias, **options),
        {**inputs, **LEARNED},
        lambda q, k, e, f, bias: combined.window_low_rank(q, k, width, e, f, bias, **slow),
    )


COMBINED_CASES = [
    Case(
        "window and low rank, means, bands",
        lambda q, k: window_low_rank(q, k, 9, pooling(150, 50), tokens=1),
        {"q": (1, 2, 150, 4), "k": (1, 2, 150, 4)},
        lambda q, k: combined.window_low_rank(q, k, 9, MEANS, tokens=1),
    ),
    learned("window and low rank, late queries", LATE, 3),
    learned("window and low rank, tokens", SELF, 4, tokens=2, scale=0.3),
    learned("window and low rank, padding", SELF, 3, key_mask=PADDING, tokens=1),
]
