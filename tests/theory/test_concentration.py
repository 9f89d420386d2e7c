"""The error of random sketches."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.theory.concentration import (
    Frequency,
    best_rank_error,
    expected_square,
    measured_square,
    sketch_error,
    sketch_size,
)


def test_the_second_moment_law() -> None:
    p = torch.softmax(torch.randn(30, 40, dtype=torch.float64), -1)
    w = torch.randn(40, 1, dtype=torch.float64)
    mean, error = measured_square(p, w, 12, 400, generator=torch.Generator().manual_seed(0))
    assert abs(mean - expected_square(p, w, 12)) < 4 * error
    assert abs(mean - 2 * expected_square(p, w, 12)) > 4 * error  # it could tell
    assert sketch_size(512, 0.5) == math.ceil(5 * math.log(512) / 0.125)
    low, high = Frequency(5, 100).interval
    assert low < 0.05 < high


def test_no_matrix_of_that_rank_is_closer_than_the_spectrum_says() -> None:
    p = torch.softmax(3 * torch.randn(20, 20, dtype=torch.float64), -1)
    u, s, v = torch.linalg.svd(p)
    assert best_rank_error(p, 5) == pytest.approx((p - (u[:, :5] * s[:5]) @ v[:5]).norm().item())
    assert best_rank_error(p, 20) == pytest.approx(0, abs=1e-12)
    assert sketch_error(p, 5, generator=torch.Generator().manual_seed(0)) > best_rank_error(p, 5)
