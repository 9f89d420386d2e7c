"""res(X) = X - 1 mean(X)^T, what attention has not yet made equal across tokens, and its size relative to X.

The mean is the best row to take away in every unitarily invariant norm (spectral, Frobenius): with J = 11^T/n,
res X = (I - J) X, and for any row x, (I - J)(X - 1 x^T) = res X with ||I - J|| = 1.  It is not the best in ||.||_1 or
||.||_inf, where medians do better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.linalg.norms import composite_norm

Norm = Callable[[Tensor], Tensor]


def residual(x: Tensor) -> Tensor:  # (*batch, n, d)
    """x less its row mean."""
    return x - x.mean(dim=-2, keepdim=True)


def relative_residual(x: Tensor, norm: Norm = composite_norm) -> Tensor:  # (*batch, n, d) -> (*batch,)
    """||res X|| / ||X|| in any norm, 0 when all tokens are equal; in float64, since float32 bottoms out at 2e-7.

    >>> relative_residual(torch.ones(4, 3)).item()
    0.0
    """
    x = x.double()
    return norm(residual(x)) / norm(x).clamp(min=torch.finfo(torch.float64).tiny)
