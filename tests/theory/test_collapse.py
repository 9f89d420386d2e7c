"""Residuals and the collapse bound, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.linalg.norms import composite_norm, frobenius_norm, spectral_norm
from headwise.nn import Encoder, MultiHead
from headwise.theory.collapse import (
    SHRINKS,
    beta_of,
    collapse,
    collapse_curve,
    log_bound,
    log_bound_with_skips,
    relative_residual,
    residual,
)
from headwise.theory.stack import Stack, random_stack


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_no_other_row_is_closer_in_unitarily_invariant_norms() -> None:
    x = gaussian(9, 5)
    for norm in (spectral_norm, frobenius_norm):
        best = norm(residual(x))
        for _ in range(50):
            assert norm(x - (x.mean(0) + 0.1 * gaussian(5))) >= best * (1 - 1e-12)
    assert relative_residual(torch.ones(6, 3)) == 0
    assert 0 < relative_residual(x, spectral_norm) <= 1


def test_the_bound_holds_and_is_computed_in_logs() -> None:
    stack, x = random_stack(4, 2, 6), gaussian(5, 6)
    found = collapse(stack, x)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        stack = random_stack(4, 2, 6, scale=0.7, generator=generator)
        x = 0.02 * torch.randn(5, 6, dtype=torch.float64, generator=generator)
        found = collapse(stack, x)
        assert found.verdict().holds
        assert found.premises[SHRINKS]
        assert all(later < sooner for sooner, later in itertools.pairwise(found.log_bound))
    rate = math.log(4 * 2 * beta_of(stack) / math.sqrt(3))
    start = composite_norm(residual(x)).log().item()
    assert found.log_bound[2] == pytest.approx(4 * rate + 9 * start)
    assert math.isfinite(log_bound(12, beta=3.0, heads=12, key_width=64, log_residual=5.0))


def test_large_inputs_do_not_meet_the_premise() -> None:
    found = collapse(random_stack(3, 2, 6), 10 * gaussian(5, 6))
    assert not found.premises[SHRINKS]
    assert found.log_bound[-1] > found.log_bound[0]


def test_depth_collapses_pure_attention_and_not_with_skips() -> None:
    """The published experiment: twelve layers of twelve heads, random weights."""
    x = gaussian(32, 48)
    pure = random_stack(12, 12, 48, generator=torch.Generator().manual_seed(0))
    assert relative_residual(pure.states(x)[-1]) < 1e-6
    with_skips = Stack(pure.layers, skip=True)
    assert relative_residual(with_skips.states(x)[-1]) > 0.1


def test_the_bound_with_skips_holds_and_does_not_shrink() -> None:
    for seed, size in itertools.product(range(10), (0.02, 1.0)):
        generator = torch.Generator().manual_seed(seed)
        stack = random_stack(4, 2, 6, skip=True, generator=generator)
        found = collapse(stack, size * torch.randn(5, 6, dtype=torch.float64, generator=generator))
        assert found.verdict().holds
        assert not found.shrinks
        assert found.log_bound == sorted(found.log_bound)
    r, c, root = 0.1, 4 * 2 * 3.0 / math.sqrt(4), math.sqrt(5 * 6)
    added = c * r**3
    by_hand = math.sqrt(r**2 + added**2 + (root + 1 / root) * r * added)
    known = {"beta": 3.0, "heads": 2, "key_width": 4, "log_residual": math.log(r), "shape": (5, 6)}
    assert math.exp(log_bound_with_skips(1, **known)) == pytest.approx(by_hand)
    # two matrices of unlike shape attain the factor that the missing triangle inequality costs
    tall, wide = torch.zeros(5, 6, dtype=torch.float64), torch.zeros(5, 6, dtype=torch.float64)
    tall[:, 0], wide[0] = 1, 1
    norms = composite_norm(tall).item(), composite_norm(wide).item()
    allowed = norms[0] ** 2 + norms[1] ** 2 + norms[0] * norms[1] * (root + 1 / root)
    assert composite_norm(tall + wide).item() <= math.sqrt(allowed)
    assert composite_norm(tall + wide).item() > sum(norms)


def test_tokens_that_are_equal_stay_under_the_bound() -> None:
    found = collapse(random_stack(2, 2, 6), torch.ones(5, 6, dtype=torch.float64))
    assert found.log_measured == [-math.inf] * 3
    assert found.verdict().holds


@pytest.mark.parametrize("pre", [True, False])
def test_collapse_curve_switches_skips_and_mlps(pre: bool) -> None:
    torch.manual_seed(0)
    encoder = Encoder(48, 12, 12, norm_first=pre)
    before = {name: x.clone() for name, x in encoder.state_dict().items()}
    x = gaussian(24, 48)
    curves = {(skip, mlp): collapse_curve(encoder, x, skip=skip, mlp=mlp) for skip in (0, 1) for mlp in (0, 1)}
    assert all(len(curve) == 13 for curve in curves.values())
    assert curves[0, 0][-1] < 1e-6  # twelve layers of twelve heads, as published
    assert curves[1, 0][-1] > 0.1
    assert curves[1, 1][-1] > 0.1
    assert curves[0, 1] != curves[0, 0]
    with torch.no_grad():
        whole = encoder.double()(x)
    if not pre:  # no norm after the last layer
        assert curves[1, 1][-1] == pytest.approx(relative_residual(whole).item())
    assert all(torch.equal(x.double(), encoder.state_dict()[name]) for name, x in before.items())


def test_collapse_curve_of_plain_layers() -> None:
    layers = nn.ModuleList(MultiHead(8, 2) for _ in range(3))
    x = gaussian(10, 8)
    curve = collapse_curve(layers, x, skip=False, norm=spectral_norm)
    with torch.no_grad():
        y = layers.double()[0](x)
    assert curve[:2] == pytest.approx([relative_residual(z, spectral_norm).item() for z in (x, y)])
    assert collapse_curve(layers, x)[1] == pytest.approx(relative_residual(x + y).item())
    with pytest.raises(HeadwiseError, match="not Linear"):
        collapse_curve([nn.Linear(8, 8)], x)
    with pytest.raises(HeadwiseError, match="reversible"):
        collapse_curve(Encoder(8, 2, 2, reversible=True), x)
