"""sigma_1 >= sigma_2 >= ... of P, with an error bound for each: the result of a matrix-free computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.shapes import all_finite, no_empty_axis, same_kind


@final
@dataclass(frozen=True, eq=False)
class Spectrum:
    """The leading singular values sigma_1 >= ... >= sigma_r of a batch of m x n matrices.

    `errors` bounds |sigma_i - values_i| for each index, but for a probability of 1e-9 over the random start of the
    computation; infinite if no bound was computed.  `residuals` needs no such exception and is weaker: P has *some*
    singular value within residuals_i of values_i.  docs/explanation/spectrum-bounds.md derives both.
    Effective rank, stable rank and energy of a spectrum are in `headwise.linalg.ranks`.  An operator that knows ||P||_F
    adds it with `dataclasses.replace(spectrum, frobenius=...)`.
    """

    values: Tensor  # (*batch, r) descending, float64
    errors: Tensor  # (*batch, r) float64
    residuals: Tensor  # (*batch, r) float64
    exact: bool  # True: from a dense decomposition, errors are rounding only
    count: int  # min(m, n), the number of singular values
    frobenius: Tensor | None = None  # (*batch,) sqrt(sum of all sigma^2), where it is known

    @property
    def complete(self) -> bool:
        """Whether `values` holds every singular value."""
        return self.values.shape[-1] == self.count


def rounding(dtype: torch.dtype, shape: Sequence[int], scale: Tensor) -> Tensor:
    """(4 eps + sqrt(max(m, n)) eps') ||P||: how far rounding in `dtype` alone may shift a singular value.

    eps' is that of the accumulator, float32 for half precision: 4e-3 (float16) or 3e-2 (bfloat16) of ||P||.
    """
    accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return (4 * torch.finfo(dtype).eps + math.sqrt(max(shape[-2:])) * accumulator) * scale


def exact_spectrum(values: Tensor, dtype: torch.dtype, shape: Sequence[int], r: int) -> Spectrum:
    """The first r of all singular values of a matrix in `dtype`, which are known up to rounding."""
    errors = rounding(dtype, shape, values[..., :1]).expand_as(values)[..., :r]
    frobenius = torch.linalg.vector_norm(values, dim=-1)
    return Spectrum(values[..., :r], errors, errors, exact=True, count=values.shape[-1], frobenius=frobenius)


@torch.no_grad()
def dense_spectrum(p: Tensor) -> Spectrum:  # (*batch, m, n)
    """Every singular value of a dense matrix, computed in float64.

    >>> dense_spectrum(torch.eye(3)).values
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    no_empty_axis("dense_spectrum", p=p)
    same_kind("dense_spectrum", p=p)
    all_finite("dense_spectrum", p=p)
    return exact_spectrum(torch.linalg.svdvals(p.double()), p.dtype, p.shape, min(p.shape[-2:]))
