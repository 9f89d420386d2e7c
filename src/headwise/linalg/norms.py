"""Batched matrix norms used by the collapse theorems: 1, infinity, their geometric mean, spectral, Frobenius."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.shapes import no_empty_axis, same_kind


def one_norm(x: Tensor) -> Tensor:  # (*batch, m, n) -> (*batch,)
    """||X||_1 = max_j sum_i |x_ij|, the largest column sum: the operator norm from l1 to l1."""
    no_empty_axis("one_norm", x=x)
    same_kind("one_norm", x=x)
    return x.abs().sum(-2).amax(-1)


def infinity_norm(x: Tensor) -> Tensor:  # (*batch, m, n) -> (*batch,)
    """||X||_inf = max_i sum_j |x_ij|, the largest row sum: 1 for every row-stochastic matrix."""
    no_empty_axis("infinity_norm", x=x)
    same_kind("infinity_norm", x=x)
    return x.abs().sum(-1).amax(-1)


def composite_norm(x: Tensor) -> Tensor:  # (*batch, m, n) -> (*batch,)
    """||X||_(1,inf) = sqrt(||X||_1 ||X||_inf): submultiplicative and at least the spectral norm, but NOT a norm.

    The triangle inequality fails: for A = [[1, 1], [0, 0]], ||A + A^T|| = 3 > 2 sqrt 2 = ||A|| + ||A^T||.  The rank
    collapse bounds are stated in it (Dong, Cordonnier & Loukas 2021).

    >>> a = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    >>> composite_norm(a + a.mT).item(), (composite_norm(a) + composite_norm(a.mT)).item()
    (3.0, 2.828...)
    """
    # the root of each factor first: the product of the factors may overflow where the result does not
    return one_norm(x).sqrt() * infinity_norm(x).sqrt()


def frobenius_norm(x: Tensor) -> Tensor:  # (*batch, m, n) -> (*batch,)
    """||X||_F = sqrt(sum_ij x_ij^2)."""
    no_empty_axis("frobenius_norm", x=x)
    same_kind("frobenius_norm", x=x)
    return torch.linalg.vector_norm(x, dim=(-2, -1))


def spectral_norm(x: Tensor) -> Tensor:  # (*batch, m, n) -> (*batch,)
    """||X||_2 = sigma_1.  May exceed 1 for a row-stochastic matrix.  Half precision is decomposed in float32."""
    no_empty_axis("spectral_norm", x=x)
    same_kind("spectral_norm", x=x)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.linalg.matrix_norm(wide, 2).to(x.dtype)
