"""Absolute and relative scores against the four terms summed pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.errors import ShapeError
from headwise.operators.relative.encodings import (
    cells,
    differences,
    four_terms,
    quadratic_encoding,
    quadratic_vector,
    sinusoidal,
)
from headwise.operators.relative.quadratic import log_width, quadratic
from headwise.operators.softmax import softmax
from headwise.testing.contract import normal


def four_terms_by_loops(a, c, r, u, v, grid, queries):
    """a_q.c_k + a_q.r_d + u.c_k + v.r_d, r a function of the difference of two cells."""
    rows = []
    for i, q in enumerate(cells(queries).tolist()):
        row = []
        for j, k in enumerate(cells(grid).tolist()):
            e = r(tuple(y - x for x, y in zip(q, k, strict=True)))
            row.append((a[..., i, :] * c[..., j, :] + a[..., i, :] * e + u * c[..., j, :] + v * e).sum(-1))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("grid, queries", [((4,), (4,)), ((2, 3), (2, 3)), ((3, 2), (2, 4)), ((2, 2, 2), (1, 2, 2))])
def test_four_terms(grid: tuple[int, ...], queries: tuple[int, ...]) -> None:
    m, n = math.prod(queries), math.prod(grid)
    offsets, index = differences(grid, queries)
    table = normal(2, len(offsets), 5, seed=4)  # two heads, learned
    a, c, u, v = normal(2, m, 5, seed=0), normal(2, n, 5, seed=1), normal(2, 5, seed=2), normal(2, 5, seed=3)
    leaves = [x.requires_grad_() for x in (a, c, u, v, table)]
    q, bias = four_terms(a, table, index, content=u, place=v)
    output = q @ c.mT + bias
    where = {tuple(d): i for i, d in enumerate(offsets.tolist())}
    assert len(where) == len(offsets)
    expected = four_terms_by_loops(a, c, lambda d: table[:, where[d]], u, v, grid, queries)
    torch.testing.assert_close(output, expected)
    pull = normal(*output.shape, seed=5)
    gradients = [torch.autograd.grad(y, leaves, pull) for y in (output, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_quadratic_encoding_without_content_is_the_quadratic_head() -> None:
    alpha, centres = torch.tensor([0.7, 2.0], dtype=torch.float64), normal(2, 2, seed=0)
    offsets, index = differences((3, 4))
    v = quadratic_vector(alpha, centres)
    nothing = torch.zeros(2, 12, 3, dtype=torch.float64)
    q, bias = four_terms(
        nothing, quadratic_encoding(offsets.double()), index, content=torch.zeros(2, 3, dtype=torch.float64), place=v
    )
    output = softmax(q, nothing, attn_bias=bias).dense()
    expected = quadratic((3, 4), centres, log_width(alpha).unsqueeze(-1)).dense()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)


def test_sinusoids_of_a_difference_turn_by_an_angle() -> None:
    # the dot product of two encodings depends on the difference of their positions alone
    e = sinusoidal(torch.arange(6, dtype=torch.float64).unsqueeze(-1), 8)
    gram = e @ e.mT
    for d in range(6):
        diagonal = gram.diagonal(d)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_sinusoids_of_a_grid_code_each_axis_by_itself() -> None:
    e = sinusoidal(cells((2, 3)), 8)
    torch.testing.assert_close(e[1, :4], e[0, :4])  # one step along the second axis
    torch.testing.assert_close(e[3, 4:], e[0, 4:])  # one along the first


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match=r"multiple of 2 x 2 axes, but is 6"):
        sinusoidal(torch.zeros(3, 2), 6)
    zero = torch.zeros(2)
    with pytest.raises(ShapeError, match=r"index refers to differences 0 to 6, but there are 5 encodings"):
        four_terms(torch.zeros(4, 2), torch.zeros(5, 2), differences((4,))[1], content=zero, place=zero)
    with pytest.raises(ShapeError, match="at least one cell"):
        differences((0, 2))
