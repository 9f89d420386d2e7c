"""G_k = mean_i sum_j P_ij (x_j - x_i')(x_j - x_i')^T, x_i' = sum_j P_ij x_j: the softmax's Jacobian in the key metric.

The change of a row of P for a change ds of its scores has ds^T (diag P - P P^T) ds for squared length (twice the
Kullback-Leibler divergence, to second order): scores of keys that are not looked at are free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.growth.normal_equations import Tokens


def fisher_gram(sequences: Sequence[Tokens], z: Tensor) -> Tensor:
    """(d_k, d_k) for Z (g, d_q, d_k), averaged over query rows and the heads of a group; P in blocks of rows."""
    total, rows = None, 0
    z = z.double()
    for tokens in sequences:
        y = tokens.keys.double()
        for x, allowed in tokens.blocks():
            scores = x @ z @ y.mT  # (g, r, n)
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            p = torch.softmax(scores, -1).nan_to_num(0).flatten(0, 1)
            mean = p @ y
            part = (y * p.sum(0)[:, None]).mT @ y - mean.mT @ mean
            total, rows = part if total is None else total + part, rows + len(p)
    assert total is not None, "there is at least one sequence"
    return total / rows
