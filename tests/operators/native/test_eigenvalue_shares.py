"""Eigenvalues and what each eigenvector carries of X: the kernel and torch calls against a decomposition by numpy."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

from headwise.operators._kernels import native
from headwise.operators._kernels.native.eigenvalue_shares import eigenvalue_shares


@pytest.fixture(params=["torch", "kernel"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "kernel":
        request.getfixturevalue("kernels")
        assert native.usable(torch.ones(1, dtype=torch.float64), dtypes=(torch.float64,))
    return request.param


def gram(n: int, sharpness: float) -> Tensor:
    p = torch.softmax(sharpness * torch.randn(n, n, dtype=torch.float64), dim=-1)
    return p @ p.mT


def low_rank(n: int) -> Tensor:
    x = torch.randn(n, max(1, n // 5), dtype=torch.float64)
    return x @ x.mT


def graded(n: int) -> Tensor:
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    return q * torch.logspace(0, -14, n, dtype=torch.float64) @ q.mT


MATRICES = {
    "soft": lambda n: gram(n, 0.3),
    "sharp": lambda n: gram(n, 8.0),
    "low rank": low_rank,
    "graded": graded,
    "indefinite": lambda n: (x := torch.randn(n, n, dtype=torch.float64)) + x.mT,
    "identity": lambda n: torch.eye(n, dtype=torch.float64),
    "zero": lambda n: torch.zeros(n, n, dtype=torch.float64),
    "huge": lambda n: 1e120 * gram(n, 1.0),
    "tiny": lambda n: 1e-120 * gram(n, 1.0),
}


@pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 33, 100])
@pytest.mark.parametrize("name", MATRICES)
def test_values_and_shares_equal_those_of_numpy(name: str, n: int, path: str) -> None:
    a, x = MATRICES[name](n), torch.randn(n, 5, dtype=torch.float64)
    values, squares = eigenvalue_shares(a, x)
    true = torch.from_numpy(numpy.linalg.eigvalsh(a.numpy())).flip(0)
    size = float(true.abs().amax()) or 1.0
    torch.testing.assert_close(values / size, true / size, rtol=0, atol=1e-14 * n)
    torch.testing.assert_close(squares.sum(), x.square().sum(), rtol=1e-12, atol=0)
    # single shares depend on the basis where eigenvalues coincide; moments do not
    for power in (1, 2, 5):
        expected = (x * (torch.linalg.matrix_power(a / size, power) @ x)).sum()  # tr X^T A^k X
        found = ((values / size) ** power * squares).sum()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12 * float(x.square().sum()))


def test_separate_eigenvalues_have_the_shares_of_their_vectors(path: str) -> None:
    a, x = graded(40), torch.randn(40, 33, dtype=torch.float64)
    vectors = numpy.linalg.eigh(a.numpy())[1]
    expected = torch.from_numpy(vectors.T).flip(0) @ x
    _, squares = eigenvalue_shares(a, x)
    torch.testing.assert_close(squares[:20], expected.square().sum(-1)[:20], rtol=1e-6, atol=0)


def test_strides_do_not_matter(path: str) -> None:
    a, x = gram(20, 1.0), torch.randn(3, 20, dtype=torch.float64).mT
    wide = torch.full((40, 40), torch.nan, dtype=torch.float64)
    wide[::2, ::2] = a
    for one, other in zip(eigenvalue_shares(wide[::2, ::2], x), eigenvalue_shares(a, x.contiguous()), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_not_finite_is_refused(path: str) -> None:
    a = gram(12, 1.0)
    a[3, 4] = a[4, 3] = torch.nan
    with pytest.raises(RuntimeError):
        eigenvalue_shares(a, torch.ones(12, 1, dtype=torch.float64))


@pytest.mark.usefixtures("kernels")
def test_the_operation_passes_opcheck_and_checks_its_arguments() -> None:
    a, x = gram(9, 1.0), torch.randn(9, 2, dtype=torch.float64)
    operation = torch.ops.headwise.eigenvalue_shares
    torch.library.opcheck(operation.default, (a, x))
    with pytest.raises(RuntimeError, match="expected a"):
        operation(a[:4], x)
    with pytest.raises(RuntimeError, match="must be float64"):
        operation(a.float(), x)
