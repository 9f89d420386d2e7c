"""Two layers that break the published collapse bound ||res SA(X)|| <= (4 H beta / sqrt(d_qk)) ||res X||^3.

Both are exact: the attention matrix has a few kinds of rows, so that every norm is a sum of a few terms and any size
can be evaluated.  `tests/theory/test_collapse_counterexamples.py` compares them with dense layers.
headwise.theory.collapse has the bound that holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sides:
    """||res SA(X)|| and the published bound on it, for one layer."""

    left: float
    right: float

    @property
    def ratio(self) -> float:
        return self.left / self.right


def long_layer(n: int, width: int, *, strength: float, lead: float) -> Sides:
    """One head, n tokens, `width` - 1 pairs of which attend to themselves: ratio ~ sqrt(n) / log n.

    The residual R has a column for each pair, with 1 and -1 at its two tokens, and a first column with 1 and -1 at two
    tokens that lead; the remaining tokens have R = 0.  W_QK is diagonal, so that E = R W_QK R^T / sqrt(d_qk) is
    `strength` times the products inside a pair (and vanishes for the leaders, whose diagonal entry tends to zero while
    the mean token grows in inverse proportion), and r, the part of the scores that is equal for all queries, is `lead`
    and -`lead` for the two leaders.  W_V keeps the first column.  Every token attends to the first leader, except the
    pairs, whose own score is larger: the first column of P R has two values, at many tokens each, although the first
    column of R has two entries only.
    """
    pairs, pulled = 2 * (width - 1), math.exp(-lead)
    leaders = 1 - math.exp(-2 * lead)  # of R, weighted; all exponentials relative to the first leader
    others = 1 + math.exp(-2 * lead) + (n - 4) * pulled
    value, own = leaders / (others + 2 * pulled), leaders / (others + 2 * math.cosh(strength) * pulled)
    mean = ((n - pairs) * value + pairs * own) / n
    column = (n - pairs) * abs(value - mean) + pairs * abs(own - mean)
    row = max(abs(value - mean), abs(own - mean))
    residual = math.sqrt(2.0)  # ||R||_1 = 2, ||R||_inf = 1
    return Sides(math.sqrt(column * row), 4 * strength * residual**3)


def long_layer_weights(n: int, width: int, *, strength: float, lead: float) -> tuple[Tensor, Tensor, Tensor]:
    """X (n, d), W_QK (d, d) and W_V (d, d) of `long_layer`, to be scaled by 1 / sqrt(d) in the softmax."""
    faint = 1e-9
    rest = torch.zeros(n, width, dtype=torch.float64)
    for column in range(width):
        rest[2 * column, column], rest[2 * column + 1, column] = 1.0, -1.0
    scores = torch.eye(width, dtype=torch.float64) * strength * math.sqrt(width)
    scores[0, 0] = faint * math.sqrt(width)
    mean, values = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    mean[0], values[0, 0] = lead / faint, 1.0
    return mean + rest, scores, values


def two_wide_heads(width: int, *, size: float = 1e-3) -> Sides:
    """Two heads, two tokens: ratio ~ d^(1/4) / 16, whatever the spread of the scores.

    Tokens (a, 0, ..., 0) and (-a, 0, ..., 0), W_QK = e_1 e_1^T, d_qk = 1 for both heads.  The first W_V keeps the first
    column, the second copies it to all d columns, divided by sqrt(d): both have the composite norm one.  The first has
    the larger ||.||_1, the second the larger ||.||_inf, and the composite "norm" of the sum takes both.
    """
    moved = size * math.tanh(size * size)  # |P R| of each token
    columns, rows = 2 * moved * (1 + 1 / math.sqrt(width)), moved * (1 + math.sqrt(width))
    return Sides(math.sqrt(columns * rows), 4 * 2 * (math.sqrt(2) * size) ** 3)
