"""Matrix-free linear algebra: singular values, eigenvalues, ranks and norms of batches of matrices."""

from headwise.linalg.arnoldi import Eigenvalues, eigenvalues
from headwise.linalg.krylov import Triplets, singular_values, singular_vectors
from headwise.linalg.ranks import (
    effective_rank,
    effective_rank_bounds,
    energy,
    low_rank_error,
    numeric_rank,
    stable_rank,
)
from headwise.linalg.spectrum import Spectrum, dense_spectrum

__all__ = [
    "Eigenvalues",
    "Spectrum",
    "Triplets",
    "dense_spectrum",
    "effective_rank",
    "effective_rank_bounds",
    "eigenvalues",
    "energy",
    "low_rank_error",
    "numeric_rank",
    "singular_values",
    "singular_vectors",
    "stable_rank",
]
