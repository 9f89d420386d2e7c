"""P_r = sum_(i <= r) sigma_i u_i v_i^T: the best approximation of an operator by one of rank r, O((m + n) r d).

The singular triplets come from `singular_vectors`, that is from apply and adjoint of P alone.  P_r = U U^T P with the
u_i found (P V V^T if P is wide), so P_r is a projection of P, and

    sigma_(r+1) <= ||P - P_r||_2 <= sqrt(s^2 + ||D||^2),

s the (r+1)-th value found and D the part of P that the iteration has not explored, whose norm is bounded but for a
probability of 1e-9 (`headwise.linalg.krylov`).  P_r is the best of all n x n matrices of rank r (Eckart & Young 1936),
but no longer an attention: entries may be negative, rows need not sum to one, and a causal P has a P_r that is not
causal: a triangular matrix with a nonzero diagonal has full rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import InputError, ShapeError
from headwise.linalg.krylov import Triplets, singular_vectors
from headwise.linalg.spectrum import Spectrum, rounding
from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import Softmax
from headwise.shapes import is_generator, shown, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class LowRank(AttentionOperator):
    """left diag(values) right^T, constants without gradients; `error` (*batch,) bounds ||P - P_r||_2.

    `leading` has the r + 1 leading values of P (r if there are no more), each with its own error.
    """

    left: Tensor  # (*batch, m, r)
    values: Tensor  # (*batch, r)
    right: Tensor  # (*batch, n, r)
    leading: Spectrum
    error: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.left.shape[:-1], self.right.shape[-2]))

    def apply(self, v: Tensor) -> Tensor:
        return _through(self.left, self.values, self.right, v)

    def adjoint(self, u: Tensor) -> Tensor:
        return _through(self.right, self.values, self.left, u)

    def cost(self, d: int) -> Cost:
        *batch, m, n = self.shape
        r = self.values.shape[-1]
        return Cost((m + n) * r * d, r * d).times(math.prod(batch))


def _through(to: Tensor, values: Tensor, source: Tensor, x: Tensor) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)  # sums over n keys are not half-precision numbers
    to, values, source = (y.to(compute) for y in (to, values, source))
    return (to @ (values.unsqueeze(-1) * (source.mT @ x.to(compute)))).to(x.dtype)


def low_rank(operator: AttentionOperator, r: int, *, generator: torch.Generator | None = None) -> LowRank:
    """The rank-r approximation of an operator, made once: O(r) applications of P and of P^T.

    Without a generator the same P gives the same P_r every time.  Masks are those of the operator.

    >>> from headwise.operators import uniform
    >>> P = low_rank(uniform(5, 5), 1)
    >>> torch.allclose(P.dense(), torch.full((5, 5), 0.2)), P.error.item() < 1e-5
    (True, True)
    """
    if not isinstance(operator, AttentionOperator):
        raise InputError(f"LowRank: needs an attention operator, but got {shown(operator)}")
    is_generator("LowRank", generator)
    whole_numbers("LowRank", least=0, r=r)
    most = min(operator.shape[-2:])
    if not 1 <= r <= most:
        raise ShapeError(f"LowRank: r must be between 1 and min(m, n) = {most}, but is {r}")
    like = operator.like
    adjoint = operator.adjoint_map() if isinstance(operator, Softmax) else operator.adjoint
    found = singular_vectors(operator.apply, adjoint, operator.shape, min(r + 1, most), like=like, generator=generator)
    left, values, right = (x[..., :r].to(like.dtype) for x in (found.left, found.spectrum.values, found.right))
    return LowRank(left, values, right, found.spectrum, _error(found, r, operator.shape, like.dtype))


def _error(found: Triplets, r: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """sqrt(s^2 + ||D||^2) and rounding: the rows of P outside the span of U are D, those inside are known."""
    values = found.spectrum.values
    after = values[..., r] if values.shape[-1] > r else torch.zeros_like(values[..., 0])
    if found.remainder is not None:
        after = torch.hypot(after, found.remainder)
    return after + rounding(dtype, shape, values[..., 0])
