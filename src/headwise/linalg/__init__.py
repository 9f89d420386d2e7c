"""Matrix-free linear algebra: singular values, eigenvalues, ranks and norms of batches of matrices."""

from headwise.linalg.arnoldi import Eigenvalues, eigenvalues
from headwise.linalg.krylov import Triplets, singular_values, singular_vectors
from headwise.linalg.spectrum import Spectrum, dense_spectrum

__all__ = [
    "Eigenvalues",
    "Spectrum",
    "Triplets",
    "dense_spectrum",
    "eigenvalues",
    "singular_values",
    "singular_vectors",
]
