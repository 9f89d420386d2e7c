"""Shifts on grids, and convolutions as sums of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.operators.claims import Claim
from headwise.operators.relative.shift import Border, shift
from headwise.testing import assert_operator, references

BORDERS: tuple[Border, ...] = ("circular", "zeros", "replicate", "reflect")
NUMPY = {"circular": "wrap", "zeros": "constant", "replicate": "edge", "reflect": "reflect"}


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("grid, offset", [((6,), (2,)), ((4, 3), (-1, 5)), ((2, 3, 4), (1, 0, -2)), ((5,), (-9,))])
def test_contract(border: Border, grid: tuple[int, ...], offset: tuple[int, ...]) -> None:
    assert_operator(
        lambda: shift(grid, offset, border=border), {}, lambda: references.shift(grid, offset, border=border)
    )


@given(
    border=st.sampled_from(BORDERS),
    axes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(-12, 12), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=3
    ),
)
def test_strided_shifts_read_what_numpy_pads(border: Border, axes: list[tuple[int, int, int, int]]) -> None:
    """The padded array is numpy's; a strided shift reads cell p s + offset of it."""
    grid, offset, stride, queries = (tuple(x) for x in zip(*axes, strict=True))
    cells = np.arange(1.0, 1.0 + np.prod(grid)).reshape(grid)
    width = 40
    padded = np.pad(cells, width, mode=NUMPY[border])  # type: ignore[call-overload]
    at = [np.arange(size) * s + o + width for _, o, s, size in axes]
    expected = torch.from_numpy(padded[np.ix_(*at)].flatten()).unsqueeze(-1)
    op = shift(grid, offset, border=border, stride=stride, queries=queries)
    v = torch.from_numpy(cells.flatten()).unsqueeze(-1)
    assert torch.equal(op(v), expected)
    u = torch.randn(op.shape[0], 1, dtype=torch.float64)
    torch.testing.assert_close((op.adjoint(u) * v).sum(), (u * expected).sum())
    filled = expected.flatten() > 0
    assert torch.equal(op.sources().double().add(1)[filled], expected.flatten()[filled])
    assert (Claim.STOCHASTIC in op.claims) == bool(filled.all())


@pytest.mark.parametrize("stride, dilation, padding", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 2, 1)])
def test_a_convolution_is_a_sum_of_shifts(stride: int, dilation: int, padding: int) -> None:
    grid, kernel = (7, 6), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    x = torch.randn(1, 2, *grid, dtype=torch.float64)
    expected = F.conv2d(x, kernel, stride=stride, dilation=dilation, padding=padding)
    queries = tuple(expected.shape[-2:])
    v = x[0].flatten(1).mT  # (n, channels)
    out = torch.zeros(queries[0] * queries[1], 3, dtype=torch.float64)
    for a, b in itertools.product(range(3), range(3)):
        offset = (a * dilation - padding, b * dilation - padding)
        op = shift(grid, offset, border="zeros", stride=(stride, stride), queries=queries)
        out = out + op(v) @ kernel[:, :, a, b].mT
    torch.testing.assert_close(out.mT.reshape(expected.shape), expected)


def test_claims_follow_the_value() -> None:
    permutation = {Claim.STOCHASTIC, Claim.NONNEGATIVE, Claim.ORTHOGONAL}
    assert shift((5,), (2,)).claims == permutation
    assert shift((4,), (2,)).claims == permutation | {Claim.SYMMETRIC}
    assert shift((3, 3), (0, 0), border="zeros").claims == permutation | {Claim.SYMMETRIC, Claim.CAUSAL}
    assert shift((5,), (-1,), border="zeros").claims == {Claim.NONNEGATIVE, Claim.CAUSAL}
    assert shift((5,), (-1,), border="replicate").claims == {Claim.NONNEGATIVE, Claim.STOCHASTIC, Claim.CAUSAL}
    assert shift((5,), (1,), border="reflect").claims == {Claim.NONNEGATIVE, Claim.STOCHASTIC}


def test_a_query_reads_ahead_of_itself() -> None:
    v = torch.arange(4.0).unsqueeze(-1)
    assert shift((4,), (1,))(v).flatten().tolist() == [1, 2, 3, 0]
    assert shift((4,), (1,)).adjoint(v).flatten().tolist() == [3, 0, 1, 2]
    assert shift((4,), (1,), border="zeros")(v).flatten().tolist() == [1, 2, 3, 0]
    assert shift((4,), (-1,), border="replicate")(v).flatten().tolist() == [0, 0, 1, 2]


def test_the_smallest_grid_mirrors_onto_itself() -> None:
    assert shift((1,), (-3,), border="reflect").dense().tolist() == [[1.0]]


def test_bad_input_is_rejected() -> None:
    with pytest.raises(ShapeError, match=r"Shift: axis 'dimension' must agree, but grid has 2, offset has 1"):
        shift((3, 3), (1,))
    with pytest.raises(ShapeError, match=r"Shift: grid \(3, 0\)"):
        shift((3, 0), (1, 1))
    with pytest.raises(InputError, match=r"stride must be at least 1 along every axis, but is \(0,\)"):
        shift((3,), (1,), stride=(0,))
    with pytest.raises(InputError, match=r"border must be one of circular, zeros, replicate, reflect, but is 'wrap'"):
        shift((3,), (1,), border="wrap")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="shift: does not support key_mask; use offset"):
        shift((3,), (1,), key_mask=torch.ones(3) > 0)  # type: ignore[call-arg]
    with pytest.raises(ShapeError, match=r"Shift: axis 'n' must agree, but operator has 6, v has 5"):
        shift((6,), (1,))(torch.zeros(5, 2))
