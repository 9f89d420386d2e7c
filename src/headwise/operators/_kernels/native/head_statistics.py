"""P V, the log-sum-exp, entropy, squares and largest weight of every row of P, its sums of columns and diagonals, and
the weight of keys beside other places of the query's token.

The formulas are in head_statistics.cpp and token_patterns.cpp.  There is no gradient: the numbers describe a head.
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


def token_patterns(scores: Scores, log_sum_exp: Tensor, order: Tensor, starts: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weight (h, 3, n) that queries give to the places of their token elsewhere, those after and those before earlier
    ones, and the numbers of such keys (3, n); None if the kernels are not usable or the mask is not causality alone.

    order, starts  places of repeated tokens, ascending, those of token t from starts[t] to starts[t + 1]
    """
    mask = scores.mask
    q, k = scores.q.float(), scores.k.float()
    only_causal = mask.visible is None and mask.attn_bias is None
    if not only_causal or q.shape != k.shape or not usable(q, k, log_sum_exp):
        return None
    return torch.ops.headwise.token_patterns(q, k, log_sum_exp, order, starts, scores.scale, mask.ahead)


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

    @torch.library.register_fake("headwise::token_patterns")
    def _(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        h, n, _ = q.shape
        return q.new_empty(h, 3, n), q.new_empty(3, n)
