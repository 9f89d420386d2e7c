"""The strided and fixed patterns beyond the contract: any length, index sets, causality, padding, refusals."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators._kernels.sparse_blocks import BlockOperator, plain, plain_adjoint
from headwise.operators.softmax import softmax
from headwise.operators.sparse.fixed import fixed, fixed_steps
from headwise.operators.sparse.strided import strided, strided_steps
from headwise.testing import references as twins
from tests.operators.properties import assert_no_look_ahead, assert_no_square, assert_padding_is_absence, draw


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, size", [(1, 1), (2, 2), (5, 1), (7, 4), (12, 4), (13, 4), (13, 13), (13, 12), (50, 7)])
def test_every_length_and_size(n: int, size: int, causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in draw(3, 2, n, 4).unbind(0))
    pull = draw(2, n, 4, seed=1)
    for fast, slow in (
        (strided(q, k, size, causal=causal), twins.strided(q, k, size, causal=causal)),
        (fixed(q, k, size, causal=causal), twins.fixed(q, k, size, causal=causal)),
        (fixed(q, k, size, size, causal=causal), twins.fixed(q, k, size, size, causal=causal)),
    ):
        out, expected = fast(v), slow @ v
        torch.testing.assert_close(out, expected)
        found = torch.autograd.grad(out, (q, k, v), pull)
        torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), pull, retain_graph=True))
        assert isinstance(fast, BlockOperator)
        union = fast.union
        torch.testing.assert_close(out, plain(q, k, v, union.scale, union.pieces))
        with torch.no_grad():
            torch.testing.assert_close(fast.adjoint(pull), plain_adjoint(q, k, pull, union.scale, union.pieces))


@pytest.mark.parametrize("build", [strided, fixed, strided_steps, fixed_steps])
def test_no_look_ahead(build) -> None:
    assert_no_look_ahead(lambda q, k: build(q, k, 7, causal=True), 40)


@pytest.mark.parametrize("build", [strided, fixed])
def test_padding_is_absence(build) -> None:
    assert_padding_is_absence(lambda q, k, key_mask=None: build(q, k, 7, causal=True, key_mask=key_mask), 40, 30)
    assert_padding_is_absence(lambda q, k, key_mask=None: build(q, k, 7, key_mask=key_mask), 42, 35)


def test_a_block_that_is_all_summary_is_softmax() -> None:
    q, k, v = draw(3, 2, 12, 4).unbind(0)
    torch.testing.assert_close(fixed(q, k, 4, 4)(v), softmax(q, k)(v))
    torch.testing.assert_close(
        fixed(q[:, :11], k[:, :11], 4, 4, causal=True)(v[:, :11]), softmax(q, k, causal=True)(v)[:, :11]
    )


def test_the_steps_reach_everything_behind() -> None:
    """Two steps of O(sqrt n) keys connect every query with every earlier position: the point of the factorisation."""
    q, k = draw(2, 30, 4).unbind(0)
    past = torch.ones(30, 30).tril().bool()
    assert ((strided_steps(q, k, 5, causal=True).dense() > 0) == past).all()
    assert ((fixed_steps(q, k, 5, causal=True).dense() > 0) == past).all()


def test_a_query_meets_few_keys() -> None:
    q = torch.zeros(1, 4096, 1)
    for build in (strided, fixed):
        union = build(q, q).union
        met = sum(piece.rows.blocks * piece.rows.size * piece.columns.size for piece in union.pieces)
        assert met < 5 * 64 * 4096


@pytest.mark.parametrize("build", [strided, fixed])
def test_no_square_is_formed(build) -> None:
    assert_no_square(build)
    assert_no_square(lambda q, k: build(q, k, causal=True))


def test_refusals() -> None:
    q = torch.zeros(6, 4)
    with pytest.raises(UnsupportedError, match="m has 1, n has 6; use window"):
        strided(q[:1], q, 2)
    with pytest.raises(UnsupportedError, match="m has 1, n has 6; use window"):
        fixed(q[:1], q, 2)
    with pytest.raises(ShapeError, match="stride must be between 1 and n = 6, but is 7"):
        strided(q, q, 7)
    with pytest.raises(ShapeError, match="block must be between 1 and n = 6, but is 0"):
        fixed(q, q, 0)
    with pytest.raises(ShapeError, match="summaries must be between 1 and block = 2, but is 3"):
        fixed(q, q, 2, 3)
