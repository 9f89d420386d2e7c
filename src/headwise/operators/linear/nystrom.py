"""P = softmax(s Q K~^T) Z softmax(s Q~ K^T), Z ~ softmax(s Q~ K~^T)^+, with Q~, K~ the means of segments: landmarks.

Nystromformer, Xiong et al. 2021 (arXiv:2102.03902).  Z comes from six steps of a third-order iteration for the
pseudo-inverse, Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 (Razavi et al. 2014), as in the paper: products only,
so it has gradients where an SVD has none.  O(n r (k + d) + r^3).  Entries of P may be negative, and rows sum to one
only as far as the iteration has converged: nothing is claimed.

There is no causal form.  P has rank r; a causal P in which every query gives itself some weight is a triangle with a
nonzero diagonal and has rank n, so for r < n some query would have to ignore itself.  Causality needs a part of full
rank beside the landmarks: `window_low_rank_blocks` and `projected_blocks` have near keys exactly, and the means of
earlier blocks, which are these landmark keys, as slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels import limits
from headwise.operators._kernels.queries_keys import QueriesKeys, QueryKeyOperator
from headwise.operators._kernels.scores import Scores
from headwise.operators._kernels.slots import Shortened
from headwise.operators.linear.projections import pooling
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax
from headwise.shapes import whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Nystrom(QueryKeyOperator):
    """Queries attend to landmark keys and landmark queries to keys; Z connects the two."""

    qk: QueriesKeys
    landmark_q: Tensor
    landmark_k: Tensor
    filled_q: Tensor | None  # (*batch, r), False where a landmark has no real position
    filled_k: Tensor | None
    iterations: int

    def apply(self, v: Tensor) -> Tensor:
        compute = torch.promote_types(v.dtype, torch.float32)  # a pseudo-inverse is not a half-precision matrix
        left, right = self._sides(compute)
        return left.apply(self._between(compute) @ right.apply(v.to(compute))).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        compute = torch.promote_types(u.dtype, torch.float32)
        left, right = self._sides(compute)
        return right.adjoint(self._between(compute).mT @ left.adjoint(u.to(compute))).to(u.dtype)

    def cost(self, d: int) -> Cost:
        left, right = self._sides(self.qk.q.dtype)
        return self._copied(left, left.cost(d)) + self._between_cost(d) + self._copied(right, right.cost(d))

    def adjoint_cost(self, d: int) -> Cost:
        left, right = self._sides(self.qk.q.dtype)
        ends = self._copied(left, left.adjoint_cost(d)) + self._copied(right, right.adjoint_cost(d))
        return ends + self._between_cost(d)

    def _copied(self, side: Softmax, cost: Cost) -> Cost:
        return cost.times(self.qk.batch.numel() // side.shape[:-2].numel())

    def _between_cost(self, d: int) -> Cost:
        rows, columns = self.landmark_q.shape[-2], self.landmark_k.shape[-2]
        inverse = self.iterations * 2 * rows * rows * (rows + columns)
        work = rows * columns * self.qk.q.shape[-1] + inverse + rows * columns * d
        return Cost(work, 3 * rows * rows, 4 * self.iterations).times(self.qk.batch.numel())

    def _sides(self, dtype: torch.dtype) -> tuple[Softmax, Softmax]:
        """softmax(s Q K~^T) (m x r) and softmax(s Q~ K^T) (r x n)."""
        q, k, near_q, near_k = (x.to(dtype) for x in (self.qk.q, self.qk.k, self.landmark_q, self.landmark_k))
        rows, columns = near_q.shape[-2], near_k.shape[-2]
        # landmarks without positions are masked as keys on the left and as queries on the right
        queries = None if self.filled_q is None else self.filled_q.unsqueeze(-1)
        left = Scores(q, near_k, self.qk.scale, Mask(self.qk.m, columns, key_mask=self.filled_k))
        right = Scores(near_q, k, self.qk.scale, Mask(rows, self.qk.n, False, self.qk.key_mask, queries))
        return Softmax(left), Softmax(right)

    def _between(self, dtype: torch.dtype) -> Tensor:
        """Z (*batch, r, r)"""
        scores = self.qk.scale * (self.landmark_q.to(dtype) @ self.landmark_k.to(dtype).mT)
        if self.filled_k is not None:
            scores = scores.masked_fill(~self.filled_k.unsqueeze(-2), limits.HIDDEN)
        a = torch.softmax(scores, dim=-1)
        if self.filled_k is not None:  # an empty landmark is a row or a column of zeros, and stays one in Z
            a = a.masked_fill(~self.filled_k.unsqueeze(-2), 0)
        if self.filled_q is not None:
            a = a.masked_fill(~self.filled_q.unsqueeze(-1), 0)
        one = torch.eye(a.shape[-2], dtype=dtype, device=a.device)
        # A^T / (||A||_1 ||A||_inf) has all eigenvalues of A Z between 0 and 1; rows of A sum to one
        z = a.mT / a.sum(-2).amax(-1)[..., None, None].clamp(min=1e-30)
        for _ in range(self.iterations):
            az = a @ z
            z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
        return z


@supports(
    KEY_MASK,
    instead={CAUSAL: "window_low_rank_blocks or projected_blocks, with means as slots, or efficient"},
    one_length="its segments are cut for one length",
)
def nystrom(
    q: Tensor,
    k: Tensor,
    landmarks: int = 64,
    *,
    iterations: int = 6,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Nystrom:
    """Attention through about `landmarks` means of ceil(n / landmarks) consecutive positions each.

    There is no causal form: a P of rank r < n cannot be a triangle with a nonzero diagonal, whose rank is n.
    `key_mask` (*batch, n), True = attend (and, with as many queries as keys, real queries): means are over real
    positions, empty landmarks are left out.  Real rows equal those of a shorter sequence with segments of the same
    length, that is with proportionally fewer landmarks.
    """
    qk = QueriesKeys.checked("Nystrom", q, k, scale=scale, key_mask=key_mask)
    whole_numbers("Nystrom", least=0, landmarks=landmarks)
    whole_numbers("Nystrom", most=limits.NYSTROM_STEPS, iterations=iterations)
    if not 1 <= landmarks <= qk.n:
        raise ShapeError(f"Nystrom: landmarks must be between 1 and n = {qk.n}, but is {landmarks}; use softmax")
    mask_q = qk.key_mask if qk.m == qk.n else None
    near_q, filled_q = _means(qk.q, landmarks, mask_q)
    near_k, filled_k = _means(qk.k, landmarks, qk.key_mask)
    return Nystrom(qk, near_q, near_k, filled_q, filled_k, iterations)


def _means(x: Tensor, landmarks: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    segments = pooling(x.shape[-2], -(-x.shape[-2] // landmarks))
    short = Shortened(x, segments, segments, key_mask)
    return short.keys(), short.filled
