"""P V, the log-sum-exp, entropy, squares and largest weight of every row of P, and its sums of columns and diagonals.

The formulas are in head_statistics.cpp.  There is no gradient: the numbers describe a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.operators._kernels.native.kernel_library import after_loading, usable
from headwise.operators._kernels.scores import Scores


class HeadStatistics(NamedTuple):
    """What the kernel gathers of q (h, m, k), k (h, n, k), v (h, n, d); a query without keys has a row of zeros."""

    output: Tensor  # (h, m, d) P V
    entropy: Tensor  # (h, m)
    row_maximum: Tensor  # (h, m) max_j P_ij
    row_squares: Tensor  # (h, m) sum_j P_ij^2
    log_sum_exp: Tensor  # (h, m) of the scores; -inf for a query without keys
    peak: Tensor  # (h, m) max_j S_ij
    received: Tensor  # (h, n) sum_i P_ij, float64
    diagonals: Tensor  # (h, m + n - 1) sum_i P_(i, i + delta) for delta = -(m - 1) ... n - 1, float64
    sample: Tensor  # (h, len(sampled), n) rows of P


def head_statistics(scores: Scores, v: Tensor, sampled: Tensor) -> HeadStatistics | None:
    """The statistics of the heads, with the rows `sampled` (ascending) of P; None if the kernels are not usable."""
    mask = scores.mask
    bias = None if mask.attn_bias is None else mask.attn_bias.float()
    if not usable(scores.q, scores.k, v, mask.visible, bias) or not scores.q.dtype == scores.k.dtype == v.dtype:
        return None
    output, statistics, *sums = torch.ops.headwise.head_statistics(
        scores.q, scores.k, v, scores.scale, mask.ahead, _three_axes(mask.visible), _three_axes(bias), sampled
    )
    return HeadStatistics(output, *statistics, *sums)


def _three_axes(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(*(1,) * (3 - x.dim()), *x.shape)


@after_loading
def _register() -> None:
    @torch.library.register_fake("headwise::head_statistics")
    def fake(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        ahead: int | None,
        visible: Tensor | None,
        attn_bias: Tensor | None,
        sampled: Tensor,
    ) -> tuple[Tensor, ...]:
        (h, m, _), n, d = q.shape, k.shape[1], v.shape[2]
        single, double = torch.float32, torch.float64
        return (
            q.new_empty((h, m, d), dtype=single),
            q.new_empty((5, h, m), dtype=single),
            q.new_empty((h, n), dtype=double),
            q.new_empty((h, m + n - 1), dtype=double),
            q.new_empty((h, sampled.shape[0], n), dtype=single),
        )
