"""Sketches against their definitions by loops, and E[S^T S] = I as a statistical test."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import ShapeError
from headwise.linalg.sketches import (
    DenseSketch,
    HadamardSketch,
    SegmentSketch,
    Sketch,
    count,
    gaussian,
    hadamard,
    hadamard_transform,
    pooling,
    sign,
)

RANDOM = (gaussian, sign, count, hadamard)
names = st.sampled_from(["gaussian", "sign", "count", "hadamard", "pooling"])


def make(name: str, k: int, n: int, seed: int = 0) -> Sketch:
    if name == "pooling":
        return pooling(k, n, dtype=torch.float64)
    build = {"gaussian": gaussian, "sign": sign, "count": count, "hadamard": hadamard}[name]
    return build(k, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(name=names, n=st.integers(1, 40), batch=st.sampled_from([(), (2,), (2, 3)]), d=st.integers(1, 4), data=st.data())
def test_apply_adjoint_and_dense_are_one_matrix(
    name: str, n: int, batch: tuple[int, ...], d: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    s = make(name, k, n)
    assert s.shape == (k, n)
    x = torch.randn(*batch, n, d, dtype=torch.float64)
    u = torch.randn(*batch, k, d, dtype=torch.float64)
    dense = s.dense()
    assert dense.shape == (k, n)
    torch.testing.assert_close(s(x), dense @ x)
    torch.testing.assert_close(s.adjoint(u), dense.mT @ u)


def test_count_sketch_by_loops() -> None:
    s = count(5, 17, generator=torch.Generator().manual_seed(3))
    assert isinstance(s, SegmentSketch)
    expected = torch.zeros(5, 17)
    for j, (row, weight) in enumerate(zip(s.rows.tolist(), s.weights.tolist(), strict=True)):
        expected[row, j] = weight
    assert torch.equal(s.dense(), expected)
    assert torch.equal(expected.abs().sum(0), torch.ones(17))


@given(n=st.integers(1, 60), data=st.data())
def test_pooling_is_the_mean_of_balanced_segments(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    x = torch.randn(n, 2, dtype=torch.float64)
    s = pooling(k, n, dtype=torch.float64)
    cuts = [i * n // k for i in range(k + 1)]
    lengths = numpy.diff(cuts)
    assert lengths.max() - lengths.min() <= 1
    expected = torch.stack([x[a:b].mean(0) for a, b in itertools.pairwise(cuts)])
    torch.testing.assert_close(s(x), expected)
    torch.testing.assert_close(s(torch.ones(n, 1, dtype=torch.float64)), torch.ones(k, 1, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 8, 11, 16])
def test_hadamard_by_scipy(n: int) -> None:
    s = hadamard(1, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert isinstance(s, HadamardSketch)
    h = torch.from_numpy(scipy.linalg.hadamard(s.padded)).double()
    torch.testing.assert_close(hadamard_transform(torch.eye(s.padded, dtype=torch.float64)), h)
    torch.testing.assert_close(s.dense(), h[s.rows, :n] * s.signs)


def test_entries() -> None:
    g = torch.Generator().manual_seed(0)
    assert torch.equal(sign(16, 50, generator=g).dense().abs(), torch.full((16, 50), 0.25))
    entries = gaussian(100, 400, generator=g, dtype=torch.float64).dense().flatten() * 10
    # Kolmogorov-Smirnov at level 1e-6
    assert scipy.stats.kstest(entries.numpy(), "norm").pvalue > 1e-6


@pytest.mark.parametrize("name", ["gaussian", "sign", "count", "hadamard"])
def test_inner_products_are_kept_on_average(name: str) -> None:
    """mean of (S^T S)_ij over draws within 6 standard errors of I: fails by chance below 1e-6, all entries together."""
    k, n, draws = 4, 11, 2000
    grams = torch.stack([(s := make(name, k, n, seed).dense()).mT @ s for seed in range(draws)])
    mean, error = grams.mean(0), grams.std(0) / math.sqrt(draws)
    # a diagonal entry that never varies must be 1 exactly
    assert ((mean - torch.eye(n)).abs() <= 6 * error + 1e-12).all()
    assert error.amax() < 0.1  # the test has the power to see a wrong scale


def test_draws_follow_the_generator_and_leave_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    for build in RANDOM:
        a, b, c = (build(4, 12, generator=torch.Generator().manual_seed(i)).dense() for i in (1, 1, 2))
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


@given(name=names)
def test_gradients_and_vmap(name: str) -> None:
    s = make(name, 3, 7)
    x = torch.randn(2, 7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(s.apply, (x,))
    torch.testing.assert_close(torch.vmap(s.apply)(x), s(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gaussian", "sign", "count", "hadamard", "pooling"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    s = make(name, 8, 600)
    x = torch.rand(600, 2).to(dtype)
    out, dense = s(x), s.dense()
    assert out.dtype == dtype
    expected = dense @ x.double()
    scale = dense.abs() @ x.double()  # what the sums add up from, for they cancel
    assert ((out.double() - expected).abs() <= 4 * torch.finfo(dtype).eps * scale).all()


def test_costs() -> None:
    assert make("gaussian", 4, 10).cost(3).multiply_adds == 120
    assert make("sign", 4, 10).cost(3).multiply_adds == 120
    assert make("count", 4, 10).cost(3).multiply_adds == 30
    assert make("pooling", 4, 10).cost(3).multiply_adds == 30
    assert make("hadamard", 4, 10).cost(3).multiply_adds == 16 * 4 * 3


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="SegmentSketch: axis 'n' must agree, but sketch has 10, x has 9"):
        pooling(4, 10)(torch.zeros(9, 2))
    with pytest.raises(ShapeError, match="pooling: axis 'k' must be at most n = 3, or segments are empty, but is 4"):
        pooling(4, 3)
    with pytest.raises(ShapeError, match=r"hadamard: axis 'k' must be at most N = 4.* n = 3 up, but is 5"):
        hadamard(5, 3)
    with pytest.raises(ShapeError, match="gaussian: axes 'k' and 'n' must be positive, but k is 0 and n is 3"):
        gaussian(0, 3)
    with pytest.raises(ShapeError, match="power of two, but is 3"):
        hadamard_transform(torch.zeros(3, 1))


def test_learned_projections_are_sketches_too() -> None:
    matrix = torch.randn(3, 6, requires_grad=True)
    DenseSketch(matrix)(torch.randn(6, 2)).sum().backward()
    assert matrix.grad is not None
