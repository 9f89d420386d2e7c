"""W = (E x x^T)^-1 E x y^T: the directions that a module's own queries and keys read, from what it computes.

A dimension of which x explains less than `EXPLAINED` has none: it is zero in W.  For a rotated pair y_i = R_i W x_i
that is a pair that turns far within the sequences observed.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from headwise.growth.metric import root

EXPLAINED = 0.5
"""Share of the variance of a query or key dimension that its input explains, at all positions together."""

DAMPING = 1e-6
"""Share of the mean eigenvalue added to E x x^T."""


@final
class OwnProjections:
    """Running sums over the tokens of one layer: heads of queries and of keys, each k wide."""

    def __init__(self, heads: tuple[int, int], inputs: tuple[int, int], k: int, device: torch.device | None) -> None:
        sums = {"dtype": torch.float64, "device": device}
        self.grams = [torch.zeros(d + 1, d + 1, **sums) for d in inputs]
        self.cross = [torch.zeros(h, d + 1, k, **sums) for h, d in zip(heads, inputs, strict=True)]
        self.squares = [torch.zeros(h, k, **sums) for h in heads]

    def add(self, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        """inputs (b, n, d) and outputs (b, h, n, k) of queries and of keys."""
        for i, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            x, y = x.double(), y.double()
            x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1).flatten(0, 1)
            y = y.transpose(0, 1).flatten(1, 2)
            self.grams[i] += x.mT @ x
            self.cross[i] += x.mT @ y
            self.squares[i] += y.square().sum(1)

    def directions(self) -> tuple[Tensor, Tensor]:
        """W_q (h, d_q, k), whose last row is the bias, and W_k (h_kv, d_k, k), which needs none."""
        q, k = (_least_squares(*sums) for sums in zip(self.grams, self.cross, self.squares, strict=True))
        return q, k[:, :-1]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.grams, *self.cross, *self.squares]


def _least_squares(gram: Tensor, cross: Tensor, squares: Tensor) -> Tensor:
    count = gram[-1, -1].clamp(min=1)
    gram, cross, squares = gram / count, cross / count, squares / count
    inverse = root(gram, DAMPING).inverse
    w = inverse @ (inverse @ cross)
    variance = squares - cross[:, -1].square()  # the last row of the inputs is 1
    residual = squares - 2 * (w * cross).sum(1) + (w * (gram @ w)).sum(1)
    return w * (residual <= (1 - EXPLAINED) * variance).unsqueeze(1)
