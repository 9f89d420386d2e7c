"""Residuals and the collapse bound, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.linalg.norms import composite_norm, frobenius_norm, infinity_norm, one_norm, spectral_norm
from headwise.nn import Encoder, MultiHead
from headwise.theory.collapse import (
    SHRINKS,
    beta_of,
    collapse,
    collapse_curve,
    layer_constant,
    published_log_bound,
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
    start = composite_norm(residual(x)).log().item()
    first, second = stack.layers[:2]
    by_hand = start
    for layer in (first, second):
        spread = one_norm(layer.wq @ layer.wk.mT).max().item() * math.exp(2 * by_hand) / math.sqrt(3)
        by_hand = math.log(layer_constant(5, 6, spread) * beta_of(layer) / math.sqrt(3)) + 3 * by_hand
    assert found.log_bound[2] == pytest.approx(by_hand)
    known = {"beta": 2.0, "heads": 3, "key_width": 16, "log_residual": 0.5}
    assert published_log_bound(2, **known) == pytest.approx(4 * math.log(4 * 3 * 2 / 4) + 9 * 0.5)
    assert math.isfinite(published_log_bound(12, beta=3.0, heads=12, key_width=64, log_residual=5.0))
    assert math.isfinite(collapse(random_stack(6, 2, 6), 1e3 * gaussian(5, 6)).log_bound[-1])


def test_the_constant_of_one_layer() -> None:
    assert layer_constant(33, 10**6) < 4 < layer_constant(34, 10**6)
    assert layer_constant(10**6, 16) < 4 < layer_constant(10**6, 17)
    assert layer_constant(10**9, 10**9, 1.97) < 4 < layer_constant(10**9, 10**9, 1.98)
    assert layer_constant(10**9, 10**9, 0.0) == pytest.approx(math.sqrt(2))
    assert layer_constant(10**9, 10**9, 1e-9) == pytest.approx(math.sqrt(2))
    assert layer_constant(8, 10**9, 1e9) == pytest.approx(7 / 8 * 2)


def test_beta_adds_the_two_factors_of_the_norm_over_heads() -> None:
    layer = random_stack(1, 3, 6).layers[0]
    scores = [one_norm(q @ k.mT) for q, k in zip(layer.wq, layer.wk, strict=True)]
    columns = sum(s * w.abs().sum(0).max() for s, w in zip(scores, layer.w, strict=True))
    rows = sum(s * w.abs().sum(1).max() for s, w in zip(scores, layer.w, strict=True))
    assert beta_of(layer) == pytest.approx((columns * rows).sqrt().item())
    one = random_stack(1, 1, 6).layers[0]
    assert beta_of(one) == pytest.approx((one_norm(one.wq[0] @ one.wk[0].mT) * composite_norm(one.w[0])).item())


@pytest.mark.parametrize("n, d, k", [(2, 1, 1), (6, 3, 2), (40, 20, 4)])
def test_each_step_of_the_proof_holds(n: int, d: int, k: int) -> None:
    """The inequalities of docs/explanation/rank-collapse.md, for scores from small to saturated."""
    for seed, size in itertools.product(range(5), (0.05, 0.5, 2.0, 8.0)):
        generator = torch.Generator().manual_seed(seed)
        x = size * torch.randn(n, d, dtype=torch.float64, generator=generator)
        wq, wk = (torch.randn(d, k, dtype=torch.float64, generator=generator) for _ in range(2))
        rest, root, scores = residual(x), math.sqrt(k), wq @ wk.mT
        p = torch.softmax(x @ scores @ x.mT / root, -1)
        e = rest @ scores @ rest.mT / root
        spread = (e.amax(-1) - e.amin(-1)).max().item()
        a = (one_norm(scores) * one_norm(rest) * infinity_norm(rest)).item() / root
        slack = 1 + 1e-9
        assert rest.abs().max() <= one_norm(rest) / 2 * slack
        assert 2 * e.abs().max() <= a * slack
        assert spread <= a * slack
        assert one_norm(e) <= a * slack
        moved = residual(p @ rest)
        assert infinity_norm(moved) <= (1 - 1 / n) * a * infinity_norm(rest) * slack
        kappa = (layer_constant(10**15, 10**15, spread)) ** 2
        assert one_norm(moved) <= (1 - 1 / n) * min(n / 2, d, kappa) * a * one_norm(rest) * slack
        whole = layer_constant(n, d, spread) * one_norm(scores).item() / root * composite_norm(rest).item() ** 3
        assert composite_norm(moved).item() <= whole * slack


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
    layer, r, root = stack.layers[0], math.exp(found.log_bound[0]), math.sqrt(5 * 6)
    spread = one_norm(layer.wq @ layer.wk.mT).max().item() * r**2 / math.sqrt(3)
    added = layer_constant(5, 6, spread) * beta_of(layer) / math.sqrt(3) * r**3
    by_hand = math.sqrt(r**2 + added**2 + (root + 1 / root) * r * added)
    assert math.exp(found.log_bound[1]) == pytest.approx(by_hand)
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
