"""Sequence projections, and the operators made of them, beyond the contract: padding, lengths, cost, refusals."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored, factored_blocks
from headwise.operators.linear.nystrom import nystrom
from headwise.operators.linear.projected import projected, projected_blocks
from headwise.operators.linear.projections import (
    CountSketch,
    convolution,
    count_sketch,
    dense,
    hadamard,
    identity,
    pooling,
)
from headwise.operators.softmax import softmax
from headwise.testing import references as twins
from tests.operators.properties import assert_no_look_ahead, assert_no_square, assert_padding_is_absence, draw


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_length(kind: str, n: int):
    """The projection whose columns for a longer sequence begin with those for a shorter one."""
    if kind == "pooling":
        return pooling(n, 4)
    if kind == "convolution":
        return convolution(n, 4, torch.tensor([0.3, 0.5, -0.1, 0.2], dtype=torch.float64))
    if kind == "count sketch":
        whole = count_sketch(30, 7, generator=generator())
        return CountSketch(whole.slot[:n], whole.sign[:n], 7)
    return dense(draw(5, 30)[:, :n])


@pytest.mark.parametrize("kind", ["pooling", "convolution", "count sketch", "dense"])
@pytest.mark.parametrize("build", [factored, projected])
def test_padding_is_absence(build, kind: str) -> None:
    assert_padding_is_absence(
        lambda q, k, key_mask=None: build(q, k, of_length(kind, k.shape[-2]), key_mask=key_mask), 30, 22
    )


def test_padding_of_landmarks_is_absence() -> None:
    build = lambda q, k, key_mask=None: nystrom(q, k, k.shape[-2] // 5, key_mask=key_mask)  # noqa: E731
    assert_padding_is_absence(build, 30, 20, tolerance=1e-9)


@pytest.mark.parametrize("build", [factored_blocks, projected_blocks])
@pytest.mark.parametrize("e", [pooling(7, 3), dense(draw(2, 7))], ids=["pooling", "dense"])
def test_blocks_never_look_ahead(build, e) -> None:
    assert_no_look_ahead(lambda q, k: build(q, k, e), 30)
    assert_padding_is_absence(lambda q, k, key_mask=None: build(q, k, e, key_mask=key_mask), 30, 18)


def test_blocks_that_lose_nothing() -> None:
    q, k, v = draw(3, 2, 30, 4).unbind(0)
    torch.testing.assert_close(factored_blocks(q, k, identity(7))(v), efficient(q, k, causal=True)(v))
    torch.testing.assert_close(projected_blocks(q, k, identity(7))(v), softmax(q, k, causal=True)(v))
    torch.testing.assert_close(projected_blocks(q, k, pooling(64, 8))(v), softmax(q, k, causal=True)(v))


def test_identity_gives_what_there_is_without_projection() -> None:
    q, k, v = draw(3, 2, 12, 4).unbind(0)
    torch.testing.assert_close(factored(q, k, identity(12))(v), efficient(q, k)(v))
    torch.testing.assert_close(projected(q, k, identity(12))(v), softmax(q, k)(v))


@pytest.mark.parametrize(
    "projection",
    [pooling(13, 4), count_sketch(13, 5, generator=generator()), hadamard(13, 5, generator=generator()),
     convolution(13, 3, torch.tensor([1.0, 2.0, -1.0, 0.5])), dense(torch.randn(5, 13, generator=generator()))],
    ids=lambda p: type(p).__name__,
)  # fmt: skip
def test_apply_and_adjoint_are_one_matrix(projection) -> None:
    x, y = draw(13, 3), draw(projection.slots, 3)
    left, right = (projection.apply(x) * y).sum(), (x * projection.adjoint(y)).sum()
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("make", [count_sketch, hadamard])
def test_sketches_preserve_inner_products_on_average(make) -> None:
    """E[E^T E] = I, within five standard errors of the mean."""
    seeds = generator()
    draws = []
    for _ in range(400):
        e = make(8, 4, generator=seeds)
        matrix = e.apply(torch.eye(8))
        draws.append(matrix.mT @ matrix)
    gram = torch.stack(draws)
    error = gram.mean(0) - torch.eye(8)
    assert (error.abs() <= 5 * gram.std(0) / 20 + 1e-6).all()


def test_the_projection_of_the_paper_collapses() -> None:
    """E = delta R with delta -> 0 makes L uniform, so that every row of the output is the same vector."""
    q, k, v = draw(3, 64, 8).unbind(0)
    r = draw(16, 64, seed=1) / 4

    def spread(delta: float) -> float:
        out = factored(q, k, dense(delta * r), dense(r))(v)
        return ((out - out.mean(-2, keepdim=True)).norm() / out.norm()).item()

    assert spread(2.0**-52) < 1e-14
    assert spread(1.0) > 1e-3


def test_cost_does_not_depend_on_r_for_sparse_projections() -> None:
    q = torch.zeros(4096, 64)
    sketches = [factored(q, q, count_sketch(4096, r)).cost(64).multiply_adds for r in (64, 256)]
    matrices = [factored(q, q, dense(torch.zeros(r, 4096))).cost(64).multiply_adds for r in (64, 256)]
    assert sketches[1] < 1.06 * sketches[0]
    assert matrices[1] > 2.5 * matrices[0]


def test_pseudo_inverse_converges() -> None:
    q, k, v = draw(3, 2, 40, 8).unbind(0)
    near = nystrom(3 * q, 3 * k, 40, iterations=25)(v)
    torch.testing.assert_close(near, softmax(3 * q, 3 * k)(v), atol=1e-6, rtol=0)


@pytest.mark.parametrize("build", [factored, projected])
def test_no_square_is_formed(build) -> None:
    assert_no_square(lambda q, k: build(q, k, pooling(2048, 32)))
    assert_no_square(lambda q, k: nystrom(q, k, 64))
    assert_no_square(lambda q, k: projected_blocks(q, k, pooling(64, 16)))
    assert_no_square(lambda q, k: factored_blocks(q, k, pooling(64, 16)))


def test_twins_of_projections_are_what_they_say() -> None:
    e = hadamard(8, 8, generator=generator())
    matrix = twins.projection("hadamard", 8, sign=e.sign, rows=e.rows)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(8, dtype=torch.float64))


def test_refusals() -> None:
    q = torch.zeros(6, 4)
    with pytest.raises(UnsupportedError, match="made for n = 5 keys, but there are 6; slice or interpolate"):
        projected(q, q, pooling(5, 2))
    with pytest.raises(UnsupportedError, match="use projected_blocks"):
        projected(q, q, pooling(6, 2), causal=True)
    with pytest.raises(UnsupportedError, match="use factored_blocks"):
        factored(q, q, pooling(6, 2), causal=True)
    with pytest.raises(UnsupportedError, match="does not support causal; use"):
        nystrom(q, q, 2, causal=True)
    with pytest.raises(ShapeError, match="axis 'r' must agree, but e has 3, f has 2"):
        projected(q, q, pooling(6, 2), pooling(6, 3))
    with pytest.raises(ShapeError, match="r = 7 slots for n = 6 keys shorten nothing"):
        dense(torch.zeros(7, 6))
    with pytest.raises(ShapeError, match="r = 7 slots for n = 6 keys shorten nothing"):
        count_sketch(6, 7)
    with pytest.raises(ShapeError, match="size must be at least 1, but is 0"):
        pooling(6, 0)
    with pytest.raises(ShapeError, match="landmarks must be between 1 and n = 6, but is 7"):
        nystrom(q, q, 7)
