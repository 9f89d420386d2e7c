"""Window attention beyond the contract: its two paths agree, borders, global tokens, late queries, refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headwise.errors import DtypeError, ShapeError, UnsupportedError
from headwise.operators._kernels import limits
from headwise.operators._kernels.sparse_blocks import plain, plain_adjoint
from headwise.operators.softmax import softmax
from headwise.operators.sparse.fixed import fixed
from headwise.operators.sparse.strided import strided
from headwise.operators.sparse.window import window
from tests.operators.properties import (
    assert_no_look_ahead,
    assert_no_square,
    assert_padding_is_absence,
    draw,
)

VARIANTS = [
    {"width": 5},
    {"width": 6, "leading": 2},
    {"width": 40, "causal": True},
    {"width": 9, "leading": 3, "causal": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("n", [1, 3, 64, 201])
def test_the_fused_and_the_plain_path_agree(options: dict, n: int) -> None:
    options = {**options, "leading": min(options.get("leading", 0), n)}
    q, k, v = (x.requires_grad_() for x in draw(3, 2, n, 4).unbind(0))
    op = window(q, k, **options)
    pieces = op.union.pieces
    fused, slow = op(v), plain(q, k, v, op.union.scale, pieces)
    torch.testing.assert_close(fused, slow)
    pull = draw(2, n, 4, seed=1)
    torch.testing.assert_close(torch.autograd.grad(fused, (q, k, v), pull), torch.autograd.grad(slow, (q, k, v), pull))
    with torch.no_grad():
        torch.testing.assert_close(op.adjoint(pull), plain_adjoint(q, k, pull, op.union.scale, pieces))


@pytest.mark.parametrize("group", [1, 1000])
def test_pieces_in_runs_of_any_length(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are worked on a few blocks and a few heads at a time; here one block, and some."""
    q, k, v = (x.requires_grad_() for x in draw(3, 2, 201, 4).unbind(0))
    pull = draw(2, 201, 4, seed=1)
    builders = (partial(window, width=9, leading=2), partial(strided, stride=14, causal=True), partial(fixed, block=14))
    for build in builders:
        whole = build(q, k)(v)
        wanted = torch.autograd.grad(whole, (q, k, v), pull)
        with monkeypatch.context() as small:
            small.setattr(limits, "CACHE_ENTRIES", group)
            parts = build(q, k)(v)
            torch.testing.assert_close(parts, whole)
            torch.testing.assert_close(torch.autograd.grad(parts, (q, k, v), pull), wanted)


def test_second_derivatives() -> None:
    q, k, v = (x.requires_grad_() for x in draw(3, 1, 5, 2).unbind(0))
    assert torch.autograd.gradgradcheck(lambda q, k, v: window(q, k, 3)(v), (q, k, v))


def test_a_window_wider_than_the_sequence_is_softmax() -> None:
    q, k, v = draw(3, 2, 100, 4).unbind(0)
    torch.testing.assert_close(window(q, k, 200)(v), softmax(q, k)(v))
    torch.testing.assert_close(window(q, k, 100, causal=True)(v), softmax(q, k, causal=True)(v))
    torch.testing.assert_close(window(q, k, 1, leading=100)(v), softmax(q, k)(v))


def test_width_one_is_the_identity() -> None:
    q, k, v = draw(3, 70, 4).unbind(0)
    assert torch.equal(window(q, k, 1)(v), v)


@pytest.mark.parametrize("causal", [False, True])
def test_new_queries_against_a_cache(causal: bool) -> None:
    q, k, v = draw(3, 2, 300, 4).unbind(0)
    whole = window(q, k, 33, leading=2, causal=causal)(v)
    for m in (1, 7, 150):
        torch.testing.assert_close(window(q[:, -m:], k, 33, leading=2, causal=causal)(v), whole[:, -m:])


@pytest.mark.parametrize("leading", [0, 2])
def test_no_look_ahead(leading: int) -> None:
    assert_no_look_ahead(lambda q, k: window(q, k, 6, leading=leading, causal=True), 90)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_is_absence(options: dict) -> None:
    assert_padding_is_absence(lambda q, k, key_mask=None: window(q, k, key_mask=key_mask, **options), 150, 131)


def test_a_query_that_sees_only_padding_is_zero() -> None:
    q, k, v = (x.requires_grad_() for x in draw(3, 80, 4).unbind(0))
    key_mask = torch.arange(80) < 10
    out = window(q, k, 3, key_mask=key_mask)(v)
    assert out[11:].abs().max() == 0
    assert out[:11].abs().amin(-1).min() > 0
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert gradient[11:].abs().max() == 0


def test_no_square_is_formed() -> None:
    assert_no_square(lambda q, k: window(q, k, 16, leading=1))
    assert_no_square(lambda q, k: window(q, k, 16, causal=True))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = draw(3, 200, 4).unbind(0)
    out = window(1e4 * q.float(), k.float(), 9, key_mask=torch.arange(200) < 150)(v.float())
    assert out.isfinite().all()


def test_unsupported_masks_and_bad_sizes() -> None:
    q = torch.zeros(5, 4)
    with pytest.raises(UnsupportedError, match="window: does not support pair_mask; use softmax with a pair_mask"):
        window(q, q, 3, pair_mask=torch.ones(5, 5).bool())
    with pytest.raises(UnsupportedError, match="window: does not support attn_bias; use softmax"):
        window(q, q, 3, attn_bias=torch.zeros(5, 5))
    with pytest.raises(ShapeError, match="width must be at least 1"):
        window(q, q, 0)
    with pytest.raises(ShapeError, match="between 0 and n = 5, but is 6"):
        window(q, q, 3, leading=6)
    with pytest.raises(UnsupportedError, match="m = 5 queries need at least as many keys, but n has 3; use softmax"):
        window(q, q[:3], 3)
    with pytest.raises(ShapeError, match="axis 'k' must agree, but q has 4, k has 3"):
        window(q, torch.zeros(5, 3), 3)
    with pytest.raises(DtypeError, match="key_mask must be boolean"):
        window(q, q, 3, key_mask=torch.ones(5))
