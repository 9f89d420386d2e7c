"""Efficient attention beyond the contract: its causal form is exact, at any length and over a wide range of keys."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headwise.errors import NonFiniteError, ShapeError
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored_blocks
from headwise.operators.linear.projections import dense
from headwise.testing import references as twins
from tests.operators.properties import assert_no_look_ahead, assert_no_square, assert_padding_is_absence, draw

efficient_causal = partial(efficient, causal=True)


def test_rows_of_the_causal_form_are_the_plain_form_of_the_past() -> None:
    q, k, v = draw(3, 2, 150, 4).unbind(0)
    out = efficient_causal(q, k)(v)
    for i in (0, 1, 63, 64, 127, 149):
        past = efficient(q[:, i : i + 1], k[:, : i + 1])(v[:, : i + 1])
        torch.testing.assert_close(out[:, i : i + 1], past)


@pytest.mark.parametrize("group", [1, 40, 1 << 19], ids=["a block each", "two blocks", "all at once"])
@pytest.mark.parametrize("n", [192, 150])
@pytest.mark.parametrize("padded", [False, True])
def test_states_carried_from_group_to_group(group: int, n: int, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are the twin's, however many blocks are worked on together."""
    monkeypatch.setattr("headwise.operators._kernels.limits.CACHE_ENTRIES", group)
    q, k, v = (x.requires_grad_() for x in draw(3, n, 4).unbind(0))
    pull, e = draw(n, 4, seed=1), draw(16, 64, seed=2) / 8
    key_mask = torch.arange(n) < n - 20 if padded else None
    for operator, twin in (
        (efficient_causal(q, k, key_mask=key_mask), twins.efficient(q, k, causal=True, key_mask=key_mask)),
        (factored_blocks(q, k, dense(e), key_mask=key_mask), twins.factored_blocks(q, k, e, e, key_mask=key_mask)),
    ):
        out, twin = operator(v), twin @ v
        torch.testing.assert_close(out, twin)
        found, wanted = (torch.autograd.grad(x, (q, k, v), pull) for x in (out, twin))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_no_look_ahead() -> None:
    assert_no_look_ahead(efficient_causal, 140)


@pytest.mark.parametrize("build", [efficient, efficient_causal], ids=["plain", "causal"])
def test_padding_is_absence(build) -> None:
    assert_padding_is_absence(build, 150, 131)


def test_padding_in_front_of_the_causal_form() -> None:
    q, k, v = draw(3, 2, 100, 4).unbind(0)
    out = efficient_causal(q, k, key_mask=(torch.arange(100) >= 70).expand(2, 100))(v)
    assert out[:, :70].abs().max() == 0
    torch.testing.assert_close(out[:, 70:], efficient_causal(q[:, 70:], k[:, 70:])(v[:, 70:]))


def test_keys_that_rise_far_are_kept_apart() -> None:
    """Early rows do not underflow because of later keys that are e^400 times heavier, nor late ones overflow."""
    q, k, v = draw(3, 300, 4).unbind(0)
    k = k + torch.linspace(0, 400, 300).unsqueeze(-1)
    expected = twins.efficient(q, k, scale=1.0, causal=True) @ v
    torch.testing.assert_close(efficient_causal(q, k, scale=1.0)(v), expected)
    single = efficient_causal(q.float(), k.float(), scale=1.0)(v.float())
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=2e-4)  # keys near 400 are rounded to 3e-5


def test_keys_that_rise_too_far_are_refused() -> None:
    k = torch.zeros(10, 4)
    k[5:] = 130
    with pytest.raises(
        NonFiniteError, match=r"rises by 130 within 10 positions .* hold 120 and 600; use a smaller scale"
    ):
        efficient_causal(k, k, scale=1.0)
    efficient_causal(k.double(), k.double(), scale=1.0)
    assert efficient(k, k, scale=100.0)(k).isfinite().all()


def test_all_padding_gives_zeros() -> None:
    q = draw(1, 4, 3)
    for build in (efficient, efficient_causal):
        op = build(q, q, key_mask=torch.zeros(1, 4, dtype=torch.bool))
        assert op(q).abs().max() == 0
        assert "STOCHASTIC" not in {claim.name for claim in op.claims}


@pytest.mark.parametrize("build", [efficient, efficient_causal], ids=["plain", "causal"])
def test_no_square_is_formed(build) -> None:
    assert_no_square(build)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="Efficient: axis 'k' must agree, but q has 4, k has 3"):
        efficient(torch.zeros(5, 4), torch.zeros(5, 3))
    with pytest.raises(ShapeError, match="EfficientCausal: scale must be a positive number, but is -1"):
        efficient_causal(torch.zeros(5, 4), torch.zeros(5, 4), scale=-1)


@pytest.mark.parametrize("rows", [1, 24, 64])
def test_slices_of_any_size_are_one_double_softmax(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are worked on in slices; short ones here in slices of one, three and eight rows.

    Thirteen rows leave a short last slice, which is where writing a softmax into a strided room goes wrong.
    """
    monkeypatch.setattr("headwise.operators._kernels.limits.CACHE_ENTRIES", rows)
    q, k, v = (x.requires_grad_() for x in draw(3, 2, 13, 4).unbind(0))
    out, expected = efficient(q, k)(v), twins.efficient(q, k) @ v
    torch.testing.assert_close(out, expected)
    pull = draw(2, 13, 4, seed=1)
    found, wanted = (torch.autograd.grad(x, (q, k, v), pull) for x in (out, expected))
    torch.testing.assert_close(found, wanted)
