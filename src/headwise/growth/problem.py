"""What the growth of one head starts from: its weights, and what the data say about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from headwise.errors import NonFiniteError, ShapeError
from headwise.growth.metric import Root
from headwise.growth.normal_equations import GramCluster, NormalMap, TokenSequence
from headwise.shapes import same_axis


@final
@dataclass(frozen=True, eq=False)
class Factors:
    """W_q (g, d_q, k) for the g heads of a group and the W_k (d_k, k) they share; the score scale is inside W_q."""

    wq: Tensor
    wk: Tensor

    @property
    def width(self) -> int:
        return self.wk.shape[-1]

    def product(self) -> Tensor:
        """Z_h = W_q,h W_k^T: (g, d_q, d_k)"""
        return self.wq @ self.wk.mT

    def double(self) -> Factors:
        return Factors(self.wq.double(), self.wk.double())

    def beside(self, other: Factors) -> Factors:
        """The dimensions of both."""
        return Factors(torch.cat([self.wq, other.wq], -1), torch.cat([self.wk, other.wk], -1))


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """The weights of a head (or of g heads that share keys) and the statistics behind its growth.

    folds      (f, g, d_q, d_k): M = -dL/dZ measured on f disjoint parts of the data
    shares     (f,): how much data, in batches, each fold saw
    present    the weights as they are
    gram_q     mean over query rows of x x^T, (d_q, d_q); with a query bias x ends in a 1
    gram_k     mean over query rows of sum_j (x_j - mean)(x_j - mean)^T, j the keys the row attends to, (d_k, d_k)
    sequences  whole sequences; `clusters` stand for those that did not fit (statistics.py)
    biased     whether scores had an additive bias, which the sequences do not store
    roots      damped roots of gram_q and gram_k, where they are known already
    """

    folds: Tensor
    shares: Tensor
    present: Factors
    gram_q: Tensor
    gram_k: Tensor
    sequences: Sequence[TokenSequence] = ()
    clusters: Sequence[GramCluster] = ()
    biased: bool = False
    roots: tuple[Root, Root] | None = None
    cached_roots: dict[str, tuple[Root, Root]] = field(default_factory=dict, init=False, repr=False)  # by metric

    def __post_init__(self) -> None:
        g, dq, k = self.present.wq.shape
        same_axis("growth.Problem", "g", M=self.folds.shape[1], W_q=g)
        same_axis("growth.Problem", "d_q", M=self.folds.shape[2], W_q=dq, gram_q=self.gram_q.shape[0])
        same_axis("growth.Problem", "d_k", M=self.folds.shape[3], W_k=len(self.present.wk), gram_k=len(self.gram_k))
        same_axis("growth.Problem", "k", W_q=k, W_k=self.present.width)
        if not bool(self.folds.isfinite().all()):
            raise NonFiniteError("grow: the gradient of the scores has non-finite entries; growth would spread them")
        if not bool(self.present.wq.isfinite().all() and self.present.wk.isfinite().all()):
            raise NonFiniteError(
                "grow: the query or key weights of a head have non-finite entries; nothing was changed"
            )

    @cached_property
    def normal(self) -> NormalMap:
        """The least-squares problem of the scores; ShapeError when no sequence was stored."""
        if not self.sequences and not self.clusters:
            raise ShapeError("grow: a refit needs stored sequences; raise `memory` of the Grower")
        return NormalMap(self.sequences, self.clusters)

    @cached_property
    def descent(self) -> Tensor:
        """M = -dL/dZ over all the data, the change of Z that lowers the loss fastest: (g, d_q, d_k)"""
        return self._mean(torch.arange(len(self.shares), device=self.shares.device))

    def halves(self) -> tuple[Tensor, Tensor]:
        """M on two disjoint halves of the data; ShapeError when only one fold has data."""
        nonempty = self._nonempty()
        if len(nonempty) < 2:
            raise ShapeError("grow: one sequence cannot be cross-validated; observe at least two, or name p and heads")
        return self._mean(nonempty[0::2]), self._mean(nonempty[1::2])

    def half_share(self) -> float:
        """How much of the data the first half is."""
        return float(self.shares[self._nonempty()[0::2]].sum() / self.shares.sum())

    def _nonempty(self) -> Tensor:
        return self.shares.nonzero().flatten()

    def _mean(self, index: Tensor) -> Tensor:
        weights = self.shares[index].double()
        return torch.einsum("f,fgqk->gqk", weights / weights.sum(), self.folds[index].double())

    def width_limit(self) -> int:
        """min(g d_q, d_k): at this width Z can be any matrix, and no dimension beyond it adds expressivity."""
        g, dq, _ = self.present.wq.shape
        return min(g * dq, len(self.present.wk))

    def check_room(self, p: int) -> None:
        """Raise ShapeError unless p more dimensions can make the head express more."""
        limit, width = self.width_limit(), self.present.width
        if p < 1:
            raise ShapeError(f"grow: p must be at least 1, but is {p}")
        if width + p > limit:
            raise ShapeError(
                f"grow: the head is {width} wide and at {limit} it can express every bilinear score, so it has room "
                f"for {max(0, limit - width)} more dimensions, not p = {p}"
            )
