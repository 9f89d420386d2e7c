"""sigma_1 >= sigma_2 >= ... of P, each with the distance it may be off: what a matrix-free computation knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Leading singular values sigma_1 >= ... >= sigma_r of a batch of m x n matrices.

    `errors` bounds |sigma_i - values_i| for each value; how it is obtained and when it is a guarantee is said by the
    function that made it (`headwise.linalg.krylov.singular_values`).
    """

    values: Tensor  # (*batch, r) descending, float64
    errors: Tensor  # (*batch, r) float64
    exact: bool  # True: a dense decomposition, errors are rounding only
    count: int  # min(m, n): how many singular values there are in all
    frobenius: Tensor | None = None  # (*batch,) ||P||_F = sqrt(sum of all sigma^2), where it is known

    @property
    def complete(self) -> bool:
        """Whether `values` holds every singular value, so that whole-spectrum measures have a meaning."""
        return self.values.shape[-1] == self.count
