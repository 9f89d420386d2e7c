"""No output of a causal form depends on a later input; and why a form of low rank has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.operators import nystrom, positional, quadratic, similarity, softmax, window_low_rank_blocks
from headwise.operators.linear.projections import pooling
from headwise.operators.relative.quadratic import tables
from headwise.testing import references
from tests.operators.cases import inverse_square
from tests.operators.properties import assert_no_look_ahead, assert_no_square, assert_padding_is_absence, draw


@pytest.mark.parametrize("n", [13, 16, 150])
def test_slots_of_earlier_blocks_do_not_look_ahead(n: int) -> None:
    assert_no_look_ahead(lambda q, k: window_low_rank_blocks(q, k, 3, pooling(8, 4), leading=2), n)


def test_slots_of_earlier_blocks_form_no_square_and_ignore_padding() -> None:
    assert_no_square(lambda q, k: window_low_rank_blocks(q, k, 9, pooling(64, 16)))
    assert_padding_is_absence(lambda q, k, **mask: window_low_rank_blocks(q, k, 3, pooling(4, 2), **mask), 17, 10)


def test_any_similarity_does_not_look_ahead() -> None:
    assert_no_look_ahead(lambda q, k: similarity(q, k, inverse_square, causal=True), 7)


def look_ahead(build, n: int) -> float:
    """Largest |d out_i / d v_j| over j > i, by gradients."""
    v = draw(n, 1).requires_grad_()
    out = build()(v)
    rows = [torch.autograd.grad(out[i, 0], v, retain_graph=True)[0].squeeze(-1) for i in range(n)]
    jacobian = torch.stack(rows)
    assert (jacobian.diagonal() > 0).all(), "every query attends to itself"
    return jacobian.triu(1).abs().max().item()


@pytest.mark.parametrize("grid", [(7,), (3, 4), (2, 3, 2)])
def test_positions_do_not_look_ahead(grid: tuple[int, ...]) -> None:
    n, axes = len(torch.empty(grid).flatten()), len(grid)
    centres, widths = draw(axes), draw(axes, seed=1)
    values = [draw(2 * g - 1, seed=a) for a, g in enumerate(grid)]
    assert look_ahead(lambda: quadratic(grid, centres, widths, causal=True), n) == 0
    assert look_ahead(lambda: tables(grid, values, causal=True), n) == 0
    assert look_ahead(lambda: quadratic(grid, centres, widths), n) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_causal_head_that_points_at_later_cells_keeps_its_digits(dtype: torch.dtype) -> None:
    """The centre is 40 widths away from every cell that is allowed: all exponentials underflow without logarithms."""
    centres, widths = torch.tensor([3.0, 3.0], dtype=dtype), torch.tensor([-2.5], dtype=dtype)
    p = quadratic((4, 5), centres, widths, causal=True).dense()
    expected = references.quadratic((4, 5), centres, widths, causal=True)
    torch.testing.assert_close(p.double(), expected, atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=0)
    torch.testing.assert_close(p.sum(-1), torch.ones(20, dtype=dtype))


def test_causal_positions_are_no_square() -> None:
    """On 64 x 64 cells P has 16.8 million entries; what is formed is 64 times as large as a map at most."""
    from tests.operators.properties import Largest

    centres, widths, v = torch.zeros(1, 2).requires_grad_(), torch.zeros(1, 2), torch.randn(1, 64 * 64, 2)
    with Largest() as largest:
        quadratic((64, 64), centres, widths, causal=True)(v).sum().backward()
    assert largest.elements <= 64**3


def test_causality_needs_one_grid() -> None:
    def scores(rows: int) -> list[Tensor]:
        return [torch.zeros(rows, 3)]

    with pytest.raises(UnsupportedError, match=r"queries have \[2\] and keys \[3\] cells"):
        positional(scores(2), causal=True)
    with pytest.raises(UnsupportedError, match="quadratic: causal needs queries at the cells of the keys"):
        quadratic((3,), torch.zeros(1), torch.zeros(1), stride=(1,), causal=True)


def test_rank_r_cannot_be_causal() -> None:
    """A triangle with a nonzero diagonal has rank n.  nystrom's P has rank r < n, so it cannot be one."""
    q, k = draw(24, 4), draw(24, 4, seed=1)
    assert torch.linalg.matrix_rank(softmax(q, k, causal=True).dense()) == 24
    assert torch.linalg.matrix_rank(nystrom(q, k, 6).dense(), rtol=1e-10) == 6
    with pytest.raises(UnsupportedError, match="nystrom: does not support causal; use window_low_rank_blocks"):
        nystrom(q, k, 6, causal=True)  # type: ignore[call-arg]
