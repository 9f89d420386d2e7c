"""The theorem of attention as convolution, its rate, and the costs of the encodings."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.nn.kernel_attention import ConvolutionGeometry, QuadraticAttention
from headwise.operators.relative.quadratic import log_width
from headwise.testing.contract import normal
from headwise.theory.convolution import (
    centres_stop_learning,
    convolution_is_attention,
    encoding_costs,
    missed_mass,
    sharp_heads_are_shifts,
    soft_output_error,
)

GEOMETRY = ConvolutionGeometry(3, (3, 3), stride=(1, 1), dilation=(1, 1), padding=((1, 1), (1, 1)))


def test_the_theorem_holds() -> None:
    verdict = convolution_is_attention(
        GEOMETRY, normal(4, 3, 3, 3, seed=0), normal(4, seed=1), normal(2, 3, 5, 6, seed=2)
    )
    assert verdict.holds
    assert verdict.measured < 1e-14


@pytest.mark.parametrize("alpha", [0.3, 1.0, 3.0, 6.0, 12.0, 18.0])
@pytest.mark.parametrize("grid, centre", [((9,), (2,)), ((7, 7), (0, 0)), ((6, 5), (-1, 2)), ((4, 3, 4), (1, 0, -1))])
def test_the_rate(alpha: float, grid: tuple[int, ...], centre: tuple[int, ...]) -> None:
    verdict = sharp_heads_are_shifts(alpha, grid, centre)
    assert verdict.holds
    if alpha >= 3 and min(grid) >= 5 and set(centre) == {0}:
        assert verdict.measured > 0.99 * verdict.bound  # the bound is attained, so it is the rate
        assert math.isclose(verdict.bound, 4 * len(grid) * math.exp(-alpha), rel_tol=0.3)


def test_a_centre_outside_every_query_says_nothing() -> None:
    assert sharp_heads_are_shifts(5.0, (3,), (7,)).holds is None


@pytest.mark.parametrize("alpha", [1.0, 2.0, 4.0, 6.0, 10.0, 15.0, 20.0])
def test_centres_stop_learning(alpha: float) -> None:
    verdict = centres_stop_learning(alpha, 9)
    assert verdict.holds
    assert verdict.measured > (0.45 if alpha >= 6 else 0.15) * verdict.bound


@pytest.mark.parametrize("alpha", [2.0, 5.0, 9.0, 14.0])
def test_the_error_of_soft_heads_is_within_its_bound(alpha: float) -> None:
    weight, x = normal(4, 3, 3, 3, seed=0), normal(2, 3, 6, 6, seed=1)
    places = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 2)
    soft = QuadraticAttention(GEOMETRY, weight, None, centres=places, log_widths=log_width(alpha).double())
    error = (soft(x) - torch.nn.functional.conv2d(x, weight, padding=1)).abs().max().item()
    bound = soft_output_error(alpha, GEOMETRY, weight, x)
    assert error <= bound
    assert error > bound / 50  # of the right order
    assert missed_mass(alpha, 2) < 1


def test_costs_of_the_encodings_are_ordered() -> None:
    costs = encoding_costs((32, 32), 64)
    work = {name: cost.multiply_adds for name, cost in costs.items()}
    assert work["factored"] < work["quadratic"] < work["absolute"] < work["relative"]
    four_times = encoding_costs((64, 64), 64)["factored"].multiply_adds / work["factored"]
    assert 4 < four_times < 8  # N^1.5 d and N d^2 where the others grow sixteenfold
