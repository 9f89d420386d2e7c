"""Centres, spreads and ellipses of receptive fields against known values."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.errors import ShapeError
from headwise.operators.relative.quadratic import quadratic
from headwise.operators.relative.shift import shift
from headwise.operators.softmax import softmax
from headwise.testing.contract import normal
from headwise.theory.receptive_fields import receptive_fields


def test_a_wide_quadratic_head_has_its_own_centre_and_widths() -> None:
    widths = torch.tensor([1.5, 0.8], dtype=torch.float64)
    p = quadratic((41, 41), torch.tensor([[2.5, -3.0]], dtype=torch.float64), widths.log())
    (field,) = receptive_fields(p, (41, 41))
    assert field.centre == pytest.approx((2.5, -3.0), abs=1e-6)
    assert field.spread[0][0] == pytest.approx(1.5**2, rel=1e-3)
    assert field.spread[1][1] == pytest.approx(0.8**2, rel=1e-3)
    assert field.spread[0][1] == pytest.approx(0, abs=1e-9)
    for ellipse in field.ellipses:  # of a normal distribution in the plane: r^2 = -2 log(1 - share)
        r = math.sqrt(-2 * math.log(1 - ellipse.share))
        assert ellipse.half_axes == pytest.approx((1.5 * r, 0.8 * r), rel=0.12)  # cells are coarse
        assert abs(ellipse.directions[0][0]) == pytest.approx(1)


def test_a_shift_has_no_spread() -> None:
    (field,) = receptive_fields(shift((5, 4), (-1, 1), border="zeros"), (5, 4))
    assert field.centre == (-1.0, 1.0)
    assert [ellipse.half_axes for ellipse in field.ellipses] == [(0.0, 0.0), (0.0, 0.0)]


def test_a_content_head_against_sums_by_hand() -> None:
    p = softmax(normal(3, 12, 4, seed=0), normal(3, 12, 4, seed=1))
    fields = receptive_fields(p, (3, 4), at=[0, 7])
    dense = p.dense()
    for h, field in enumerate(fields):
        mean, second = [0.0, 0.0], 0.0
        for q in (0, 7):
            for k in range(12):
                w, dy, dx = dense[h, q, k].item() / 2, k // 4 - q // 4, k % 4 - q % 4
                mean = [mean[0] + w * dy, mean[1] + w * dx]
                second += w * dy * dx
        assert field.centre == pytest.approx(mean)
        assert field.spread[0][1] == pytest.approx(second - mean[0] * mean[1])
        inner, outer = field.ellipses
        assert outer.half_axes[0] >= inner.half_axes[0] > 0


def test_a_head_without_weight_has_no_field() -> None:
    (field,) = receptive_fields(shift((3,), (9,), border="zeros"), (3,))
    assert math.isnan(field.centre[0])
    assert field.ellipses == ()


def test_strided_queries_are_measured_from_their_cell() -> None:
    p = shift((7,), (3,), border="zeros", stride=(2,), queries=(3,))
    (field,) = receptive_fields(p, (7,), queries=(3,), stride=(2,), origin=(1,), at=[0, 1])
    assert field.centre == (2.0,)


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match=r"axis 'n' must agree, but operator has 3, grid has 4"):
        receptive_fields(shift((3,), (0,)), (2, 2))
    with pytest.raises(ShapeError, match=r"at must hold indices of 3 queries, but is \[3\]"):
        receptive_fields(shift((3,), (0,)), (3,), at=[3])
