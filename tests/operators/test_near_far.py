"""Near keys one by one, far ones through features: properties beyond the contract."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ShapeError, UnsupportedError
from headwise.operators.linear.near_far import near_far
from headwise.operators.softmax import softmax
from headwise.testing.references import near_far as twin
from tests.operators.properties import assert_no_look_ahead, assert_no_square, assert_padding_is_absence, draw


def features(r: int = 2, width: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = draw(2, r, width, seed=3).unbind(0)
    return a, b, draw(r, seed=4)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 130])
@pytest.mark.parametrize("causal", [False, True])
def test_every_length(n: int, causal: bool) -> None:
    q, k, v = draw(3, 2, n, 4).unbind(0)
    options = {"block": 4, "leading": min(1, n - 1), "causal": causal}
    torch.testing.assert_close(near_far(q, k, *features(), **options)(v), twin(q, k, *features(), **options) @ v)


def test_a_block_as_long_as_the_sequence_is_softmax() -> None:
    q, k, v = draw(3, 2, 40, 4).unbind(0)
    torch.testing.assert_close(near_far(q, k, *features(), block=20)(v), softmax(q, k)(v))


def test_keys_far_below_the_largest_are_not_lost() -> None:
    q = draw(64, 4)
    k = draw(64, 4, seed=1)
    k[-8:] += 40.0  # features of the last blocks are e^160 times those of the first
    a, c = torch.zeros(1, 4, dtype=q.dtype), torch.zeros(1, dtype=q.dtype)
    b = torch.ones(1, 4, dtype=q.dtype)
    found = near_far(q.float(), k.float(), a.float(), b.float(), c.float(), block=8, scale=1.0).dense().double()
    torch.testing.assert_close(found, twin(q, k, a, b, c, block=8, scale=1.0), atol=1e-4, rtol=1e-3)


def test_no_look_ahead() -> None:
    assert_no_look_ahead(lambda q, k: near_far(q, k, *features(), block=8, leading=2, causal=True), 90)


@pytest.mark.parametrize("options", [{"block": 8}, {"block": 7, "leading": 2}], ids=str)
def test_padding_is_absence(options: dict) -> None:
    build = lambda q, k, key_mask=None: near_far(q, k, *features(), key_mask=key_mask, **options)  # noqa: E731
    assert_padding_is_absence(build, 150, 131)


@pytest.mark.parametrize("causal", [False, True])
def test_no_square(causal: bool) -> None:
    a, b, c = (x.float() for x in features())
    assert_no_square(lambda q, k: near_far(q, k, a, b, c, block=16, leading=1, causal=causal))


def test_refusals() -> None:
    q = draw(9, 4)
    with pytest.raises(UnsupportedError, match="m has 5, n has 9"):
        near_far(q[:5], q, *features(), block=2)
    with pytest.raises(ShapeError, match="block must be at least 1"):
        near_far(q, q, *features(), block=0)
    with pytest.raises(ShapeError, match="axis 'r' must agree"):
        near_far(q, q, features(2)[0], features(3)[1], features(3)[2], block=2)
    with pytest.raises(ShapeError, match="axis 'k' must agree"):
        near_far(q, q, *features(2, 5), block=2)
