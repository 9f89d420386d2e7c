"""The closed forms against dense layers, and what they show."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.linalg.norms import composite_norm, one_norm
from headwise.theory.collapse import layer_constant, residual
from headwise.theory.collapse_counterexamples import long_layer, long_layer_weights, two_wide_heads


@pytest.mark.parametrize("n, width, strength, lead", [(60, 11, 4.0, 3.0), (200, 40, 8.0, 6.0), (34, 17, 2.0, 0.5)])
def test_the_long_layer_is_what_a_dense_layer_computes(n: int, width: int, strength: float, lead: float) -> None:
    x, scores, values = long_layer_weights(n, width, strength=strength, lead=lead)
    output = torch.softmax(x @ scores @ x.mT / math.sqrt(width), -1) @ (x - x.mean(0)) @ values
    rest = x - x.mean(0)
    beta = one_norm(scores) * composite_norm(values)
    sides = long_layer(n, width, strength=strength, lead=lead)
    assert sides.left == pytest.approx(composite_norm(residual(output)).item(), rel=1e-6)
    assert sides.right == pytest.approx((4 * beta / math.sqrt(width) * composite_norm(rest) ** 3).item(), rel=1e-6)
    # the proven constant is not exceeded
    assert sides.left <= sides.right / 4 * layer_constant(n, width)


def test_the_long_layer_breaks_the_published_constant() -> None:
    ratios = [
        long_layer(n, round(0.175 * n) + 1, strength=math.log(n) + 6, lead=math.log(n) + 3).ratio
        for n in (10**4, 10**5, 2 * 10**5, 10**6)
    ]
    assert ratios == sorted(ratios)
    assert ratios[1] < 1 < ratios[3]
    assert long_layer(10**6, 175_001, strength=19.75, lead=16.75).ratio == pytest.approx(2.196, abs=1e-3)


@pytest.mark.parametrize("width", [4, 1000])
def test_two_wide_heads_are_what_a_dense_layer_computes(width: int) -> None:
    size = 0.3
    x = torch.zeros(2, width, dtype=torch.float64)
    x[:, 0] = torch.tensor([size, -size])
    scores = torch.zeros(width, width, dtype=torch.float64)
    keep, copy = scores.clone(), scores.clone()
    scores[0, 0] = keep[0, 0] = 1.0
    copy[0] = 1 / math.sqrt(width)
    output = torch.softmax(x @ scores @ x.mT, -1) @ x @ (keep + copy)
    sides = two_wide_heads(width, size=size)
    assert sides.left == pytest.approx(composite_norm(residual(output)).item())
    assert composite_norm(keep) == pytest.approx(composite_norm(copy).item()) == pytest.approx(1.0)
    assert sides.right == pytest.approx(4 * 2 * composite_norm(x).item() ** 3)


def test_two_heads_break_the_bound_from_some_width_on() -> None:
    assert two_wide_heads(10**4).ratio < 1 < two_wide_heads(10**5).ratio
