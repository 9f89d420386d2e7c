"""G^(1/2) and G^(-1/2) of a Gram matrix: the coordinates in which a change of weights costs what it changes of S.

For S = X_q Z X^T, ||dS||_F = ||G_q^(1/2) dZ G_k^(1/2)||_F with G_q = X_q^T X_q, G_k = X^T X.  In these coordinates the
best approximation of rank r is the truncated singular value decomposition (Eckart & Young 1936); in the coordinates of
the weights themselves it is not.  Derived in docs/theory/grow.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import NonFiniteError, ShapeError

CUTOFF = 1e-12
"""Eigenvalues below this share of the largest count as zero: X then has directions that no token uses."""


@final
@dataclass(frozen=True, eq=False)
class Root:
    """root = G^(1/2), inverse = its pseudo-inverse, rank = how many directions the tokens use.  All float64."""

    root: Tensor
    inverse: Tensor
    rank: int


def root(gram: Tensor, damping: float = 0.0) -> Root:
    """(G + damping * mean eigenvalue * I)^(1/2) and its pseudo-inverse, G symmetric and positive semi-definite.

    Without damping, directions that no token uses are left out of both (Moore & Penrose).

    >>> root(torch.diag(torch.tensor([4.0, 0.0]))).inverse.tolist()
    [[0.5, 0.0], [0.0, 0.0]]
    """
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1]:
        raise ShapeError(f"root: a Gram matrix is square, but this one has shape {tuple(gram.shape)}")
    gram = gram.detach().double()
    if not bool(gram.isfinite().all()):
        raise NonFiniteError("root: the Gram matrix of the tokens has non-finite entries; look at the layer's input")
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    largest = values[-1].clamp(min=0)
    used = values > CUTOFF * largest
    values = values.clamp(min=0) + damping * values.clamp(min=0).mean()
    if damping == 0.0:
        values = values.where(used, torch.zeros_like(values))
    live = values > 0
    half = values.sqrt()
    inverse = torch.where(live, 1 / half.where(live, torch.ones_like(half)), torch.zeros_like(half))
    return Root((vectors * half) @ vectors.mT, (vectors * inverse) @ vectors.mT, int(used.sum()))


def basis(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns of x (d, k).  Columns that depend on others are harmless."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    return u[:, s > CUTOFF**0.5 * s.amax().clamp(min=torch.finfo(s.dtype).tiny)]
