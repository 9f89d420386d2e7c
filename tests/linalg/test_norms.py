"""Norms against numpy, the inequalities the collapse theorems use, and the one that fails."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import ShapeError
from headwise.linalg.norms import (
    composite_norm,
    frobenius_norm,
    infinity_norm,
    one_norm,
    spectral_norm,
)
from tests.linalg.matrices import attention


@given(m=st.integers(1, 8), n=st.integers(1, 8), seed=st.integers(0, 999))
def test_numpy_agrees(m: int, n: int, seed: int) -> None:
    x = torch.randn(2, 3, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y, axes = x.numpy(), (-2, -1)
    expected = {
        one_norm: numpy.linalg.norm(y, 1, axis=axes),
        infinity_norm: numpy.linalg.norm(y, numpy.inf, axis=axes),
        frobenius_norm: numpy.linalg.norm(y, "fro", axis=axes),
        spectral_norm: numpy.linalg.norm(y, 2, axis=axes),
    }
    for ours, value in expected.items():
        torch.testing.assert_close(ours(x), torch.as_tensor(value))
    torch.testing.assert_close(composite_norm(x), (one_norm(x) * infinity_norm(x)).sqrt())


@given(m=st.integers(1, 6), k=st.integers(1, 6), n=st.integers(1, 6), seed=st.integers(0, 999))
def test_composite_bounds_the_spectral_norm_and_is_submultiplicative(m: int, k: int, n: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=g).double(), torch.randn(k, n, generator=g).double()
    assert spectral_norm(a) <= composite_norm(a) * (1 + 1e-12)
    assert composite_norm(a @ b) <= composite_norm(a) * composite_norm(b) * (1 + 1e-12)


def test_composite_is_not_a_norm() -> None:
    a = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert composite_norm(a + a.mT).item() == pytest.approx(3)
    assert composite_norm(a).item() + composite_norm(a.mT).item() == pytest.approx(2 * math.sqrt(2))


def test_stochastic_matrices_have_row_norm_one_and_may_exceed_it_spectrally() -> None:
    p = attention("sink", 2.0, 9, 9, seed=0)
    torch.testing.assert_close(infinity_norm(p), torch.ones_like(infinity_norm(p)))
    assert spectral_norm(p) > 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5).to(dtype)
    for norm in (one_norm, infinity_norm, composite_norm, frobenius_norm, spectral_norm):
        assert norm(x).dtype == dtype
        torch.testing.assert_close(norm(x).double(), norm(x.double()), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_composite_does_not_overflow_if_its_result_does_not() -> None:
    x = torch.full((4, 4), 1e30)
    assert composite_norm(x).item() == pytest.approx(4e30)


def test_gradients_flow() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for norm in (one_norm, infinity_norm, composite_norm, frobenius_norm, spectral_norm):
        assert torch.autograd.gradcheck(norm, (x,))


def test_empty_axes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"one_norm: x has shape \(0, 3\)"):
        one_norm(torch.zeros(0, 3))
