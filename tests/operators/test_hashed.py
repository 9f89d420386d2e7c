"""Hashed attention beyond the contract: what rounds find, causality, padding, shared keys, refusals."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators.softmax import softmax
from headwise.operators.sparse.hashed import hashed, random_rotations
from tests.operators.properties import assert_no_look_ahead, assert_no_square, assert_padding_is_absence, draw


def rotations(width: int = 4, buckets: float = 8, rounds: int = 3) -> torch.Tensor:
    return random_rotations(width, buckets, rounds, generator=torch.Generator().manual_seed(1)).double()


def test_one_chunk_is_softmax() -> None:
    """All pairs meet in every one of three rounds, and are counted once: the duplicates' weights are right."""
    q, k, v = draw(3, 2, 20, 4).unbind(0)
    torch.testing.assert_close(hashed(q, k, rotations(), chunk=20)(v), softmax(q, k)(v))
    torch.testing.assert_close(hashed(q, k, rotations(), chunk=20, causal=True)(v), softmax(q, k, causal=True)(v))


def test_more_rounds_come_nearer_to_softmax() -> None:
    q, v = draw(2, 2, 256, 8).unbind(0)
    q = q * 2
    exact = softmax(q, q)(v)
    generator = torch.Generator().manual_seed(0)
    errors = [(hashed(q, q, rounds=r, chunk=16, generator=generator)(v) - exact).norm() for r in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_two_hashes_together() -> None:
    q, k, v = draw(3, 1, 600, 4).unbind(0)
    op = hashed(q, k, chunk=4, rounds=2, generator=torch.Generator().manual_seed(0))
    assert random_rotations(4, 150, 2).shape == (2, 2, 4, 6)
    torch.testing.assert_close(op(torch.ones_like(v)), torch.ones_like(v))


def test_shared_positions_attend_to_themselves_only_when_alone() -> None:
    q = draw(1, 12, 4)
    p = hashed(q, None, rotations(), chunk=4, causal=True).dense()
    assert p[0, 0, 0] == 1
    assert p[0, 1:].diagonal(1).abs().max() == 0
    assert p[0].diagonal()[4:].max() < 1


@pytest.mark.parametrize("shared", [False, True])
def test_no_look_ahead(shared: bool) -> None:
    assert_no_look_ahead(lambda q, k: hashed(q, None if shared else k, rotations(), chunk=4, causal=True), 30)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_absence(causal: bool) -> None:
    def build(q, k, key_mask=None):
        return hashed(q, k, rotations(), chunk=4, causal=causal, key_mask=key_mask)

    # garbage in padded queries would be hashed too, were padding not sorted behind everything
    assert_padding_is_absence(build, 30, 21)


def test_second_derivatives() -> None:
    q, k, v = (x.requires_grad_() for x in draw(3, 1, 5, 2).unbind(0))
    turn = rotations(2)
    assert torch.autograd.gradgradcheck(lambda q, k, v: hashed(q, k, turn, chunk=2)(v), (q, k, v))


def test_randomness_comes_from_the_generator() -> None:
    q, k, v = draw(3, 1, 100, 4).unbind(0)
    outs = [hashed(q, k, chunk=8, generator=torch.Generator().manual_seed(seed))(v) for seed in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_no_square_is_formed() -> None:
    assert_no_square(lambda q, k: hashed(q, k, rounds=2, chunk=16))


def test_refusals() -> None:
    q = torch.zeros(6, 4)
    with pytest.raises(UnsupportedError, match="m has 1, n has 6; use window"):
        hashed(q[:1], q)
    with pytest.raises(ShapeError, match="chunk must be at least 1, but is 0"):
        hashed(q, q, chunk=0)
    with pytest.raises(ShapeError, match="axis 'k' must agree, but q has 4, rotations has 3"):
        hashed(q, q, torch.zeros(1, 3, 2))
    with pytest.raises(ShapeError, match=r"rotations must be .* but have shape"):
        hashed(q, q, torch.zeros(4, 2))
