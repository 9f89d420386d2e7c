"""Eigenvalues from apply alone, against the dense decomposition."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import ShapeError
from headwise.linalg.arnoldi import Eigenvalues, eigenvalues
from tests.linalg.matrices import attention, awkward, rotation


def leading(p: Tensor, r: int, block: int = 16, steps: int | None = None) -> Eigenvalues:
    return eigenvalues(lambda v: p @ v, p.shape, r, like=p, block=block, steps=steps)


def assert_backward_stable(found: Eigenvalues, p: Tensor) -> None:
    """Each value is an eigenvalue of a matrix within its residual of P: sigma_min(P - theta I) <= residual."""
    eye = torch.eye(p.shape[-1], dtype=torch.complex128)
    for theta, residual in zip(found.values, found.residuals, strict=True):
        assert torch.linalg.svdvals(p.to(torch.complex128) - theta * eye)[-1] <= residual
    assert (found.values.abs().diff() <= 1e-12).all()


def separated(n: int) -> Tensor:
    """Not normal, with eigenvalues 1, +-0.9i, 0.8, 0.7 +- 0.1i and the rest below 0.1."""
    inner = 0.1 * torch.rand(n, dtype=torch.float64)
    d = torch.diag(inner)
    d[0, 0], d[3, 3] = 1.0, 0.8
    d[1:3, 1:3] = torch.tensor([[0.0, 0.9], [-0.9, 0.0]])
    d[4:6, 4:6] = torch.tensor([[0.7, 0.1], [-0.1, 0.7]])
    x = rotation(n) + 0.3 * rotation(n, 1)
    return x @ d @ torch.linalg.inv(x)


@given(n=st.integers(1, 25), batch=st.sampled_from([(), (2, 3)]), data=st.data())
def test_small_matrices_are_exact(n: int, batch: tuple[int, ...], data: st.DataObject) -> None:
    r = data.draw(st.integers(1, n))
    p = torch.softmax(torch.randn(*batch, n, n, dtype=torch.float64), -1)
    found = leading(p, r)
    assert found.exact
    expected = torch.from_numpy(scipy.linalg.eigvals(p.reshape(-1, n, n)[-1].numpy())).abs().sort(descending=True)
    torch.testing.assert_close(found.values.abs().reshape(-1, r)[-1], expected.values[:r], rtol=1e-9, atol=1e-9)


def test_separated_eigenvalues_are_found() -> None:
    p = separated(120)
    found = leading(p, 6, block=4, steps=12)
    assert not found.exact
    expected = torch.tensor([1, 0.9j, -0.9j, 0.8, 0.7 + 0.1j, 0.7 - 0.1j], dtype=torch.complex128)
    distance = (found.values.unsqueeze(-1) - expected).abs()
    assert distance.amin(0).amax() < 1e-6
    assert distance.amin(1).amax() < 1e-6
    assert_backward_stable(found, p)


@settings(max_examples=15)
@given(
    kind=st.sampled_from(["plain", "causal", "sink", "smooth"]), sharpness=st.floats(0.3, 6), seed=st.integers(0, 999)
)
def test_residuals_bound_the_errors(kind: str, sharpness: float, seed: int) -> None:
    p = attention(kind, sharpness, 110, 110, seed).float()
    found = leading(p, 5, block=4, steps=12)
    assert not found.exact
    assert_backward_stable(found, p.double())
    if kind in ("plain", "smooth") and sharpness < 2:  # row-stochastic, and 1 stands well apart from the rest
        assert abs(found.values[0] - 1) < 1e-4


@pytest.mark.parametrize("name", awkward(4))
def test_awkward_matrices(name: str) -> None:
    p = awkward(110)[name]
    assert_backward_stable(leading(p, 5, block=4, steps=12), p)


def test_batch_equals_loop() -> None:
    p = torch.stack([separated(110), attention("smooth", 1.0, 110, 110, 0)])
    found = leading(p, 3, block=4, steps=12)
    for i in range(2):
        torch.testing.assert_close(found.values[i].abs(), leading(p[i], 3, block=4, steps=12).values.abs())


def test_refusals() -> None:
    p = torch.eye(4)
    with pytest.raises(ShapeError, match="P must be square, but is 4 x 3; use singular_values"):
        eigenvalues(lambda v: v, (4, 3), 1, like=p)
    with pytest.raises(ShapeError, match=r"r must lie in 1\.\.4 for P of 4 x 4, but r is 5"):
        leading(p, 5)
    with pytest.raises(ShapeError, match="1 steps of block 2 span fewer directions than r = 3"):
        leading(p, 3, block=2, steps=1)
