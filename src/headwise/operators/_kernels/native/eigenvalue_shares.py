"""Eigenvalues of A = U diag(lambda) U^T with ||u_i^T X||^2 for each: how much of X each eigenvector carries."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.operators._kernels.native.kernel_library import after_loading, usable


def eigenvalue_shares(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(lambda_i, ||u_i^T X||^2), each (n,), in descending order of lambda_i; a is symmetric (n, n), x (n, d).

    The kernel (eigenvalue_shares.cpp) forms no eigenvectors; without it they are computed and multiplied by x.
    """
    if usable(a, x, dtypes=(torch.float64,)):
        values, squares = torch.ops.headwise.eigenvalue_shares(a, x)
    else:
        values, vectors = torch.linalg.eigh(a)
        squares = (vectors.mT @ x).square().sum(-1)
    order = values.argsort(descending=True)
    return values[order], squares[order]


@after_loading
def _register() -> None:
    @torch.library.register_fake("headwise::eigenvalue_shares")
    def fake(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return a.new_empty(a.shape[0]), a.new_empty(a.shape[0])
