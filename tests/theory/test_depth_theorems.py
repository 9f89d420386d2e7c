"""Residuals, the collapse bound and path decomposition: against brute force, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.linalg.norms import composite_norm, frobenius_norm, spectral_norm
from headwise.nn import MultiHead
from headwise.theory import paths
from headwise.theory.collapse import beta_of, collapse, collapse_curve, log_bound
from headwise.theory.residual import relative_residual, residual
from headwise.theory.stack import Layer, Stack, layer_of, random_stack


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


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("depth", "heads"), [(1, 1), (2, 3), (3, 2), (4, 3)])
def test_groups_equal_enumeration(depth: int, heads: int, skip: bool) -> None:
    stack = random_stack(depth, heads, 6, bias=0.5, skip=skip, scale=1.5)
    x = gaussian(7, 6)
    found = paths.by_length(stack, x)
    states = stack.states(x)
    mixed = [layer.attention(y) for layer, y in zip(stack.layers, states, strict=False)]
    expected = torch.zeros_like(found.by_length)
    choices = [*range(heads), *([paths.SKIP] if skip else [])]
    each = {}
    for path in itertools.product(choices, repeat=depth):
        y = x
        for index, h in enumerate(path):
            y = y if h == paths.SKIP else mixed[index][h] @ y @ stack.layers[index].w[h]
        each[path] = y
        expected[sum(h != paths.SKIP for h in path)] += y
    torch.testing.assert_close(found.by_length, expected, rtol=1e-12, atol=1e-12)
    assert found.error < 1e-12
    walked = dict(paths.single_paths(stack, x))
    assert walked.keys() == each.keys()
    for path, y in walked.items():
        torch.testing.assert_close(y, each[path], rtol=1e-12, atol=1e-12)
    chosen = (depth - 1, heads - 1)
    through = sum(y for path, y in each.items() if path[chosen[0]] == chosen[1])
    torch.testing.assert_close(paths.through_head(stack, x, chosen).sum(0), through, rtol=1e-12, atol=1e-12)
    without = sum((y for path, y in each.items() if path[chosen[0]] != chosen[1]), torch.zeros_like(x))
    torch.testing.assert_close(paths.avoiding(stack, x, {chosen}).sum(0), without, rtol=1e-12, atol=1e-12)


def test_twelve_layers_of_twelve_heads_add_up() -> None:
    """2.3e13 paths; the recursion needs thirteen tensors."""
    stack = random_stack(12, 12, 48, skip=True, bias=0.1)
    assert paths.by_length(stack, gaussian(24, 48)).error < 1e-12


def test_sampled_paths_agree_with_all_of_them() -> None:
    stack, x = random_stack(3, 4, 8, skip=True), gaussian(6, 8)
    exact = paths.sample_norms(stack, x, 2, 10**6)
    sampled = paths.sample_norms(stack, x, 2, 30, generator=torch.Generator().manual_seed(1))
    assert exact.paths == exact.total == 3 * 16
    assert exact.error == 0
    assert sampled.paths == 30
    assert abs(sampled.mean - exact.mean) < 5 * sampled.error


def test_the_bound_holds_and_is_computed_in_logs() -> None:
    stack, x = random_stack(4, 2, 6), gaussian(5, 6)
    found = collapse(stack, x)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        stack = random_stack(4, 2, 6, scale=0.7, generator=generator)
        x = 0.02 * torch.randn(5, 6, dtype=torch.float64, generator=generator)
        found = collapse(stack, x)
        assert found.verdict().holds
        assert found.premises["sqrt(4 H beta / sqrt(d_qk)) ||res X|| < 1, so that the bound shrinks"]
        assert all(later < sooner for sooner, later in itertools.pairwise(found.log_bound))
    rate = math.log(4 * 2 * beta_of(stack) / math.sqrt(3))
    start = composite_norm(residual(x)).log().item()
    assert found.log_bound[2] == pytest.approx(4 * rate + 9 * start)
    assert math.isfinite(log_bound(12, beta=3.0, heads=12, key_width=64, log_residual=5.0))


def test_large_inputs_do_not_meet_the_premise() -> None:
    found = collapse(random_stack(3, 2, 6), 10 * gaussian(5, 6))
    assert not found.premises["sqrt(4 H beta / sqrt(d_qk)) ||res X|| < 1, so that the bound shrinks"]
    assert found.log_bound[-1] > found.log_bound[0]


def test_depth_collapses_pure_attention_and_not_with_skips() -> None:
    """The published experiment: twelve layers of twelve heads, random weights."""
    x = gaussian(32, 48)
    pure = random_stack(12, 12, 48, generator=torch.Generator().manual_seed(0))
    assert relative_residual(pure.states(x)[-1]) < 1e-6
    with_skips = Stack(pure.layers, skip=True)
    assert relative_residual(with_skips.states(x)[-1]) > 0.1


def test_a_module_is_its_layer() -> None:
    for widths in (None, (3, 5)):
        module = MultiHead(8, 2, key_width=widths, value_width=widths).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        x = gaussian(6, 8)
        with torch.no_grad():
            torch.testing.assert_close(layer_of(module)(x), module(x))


def test_collapse_curve_of_our_modules() -> None:
    layers = [MultiHead(8, 2).double() for _ in range(3)]
    x = gaussian(10, 8)
    curve = collapse_curve(layers, x)
    assert curve[0] == pytest.approx(relative_residual(x).item())
    assert len(curve) == 4


def test_bad_weights_are_sentences() -> None:
    good = random_stack(2, 2, 6)
    broken = Layer(*(x.clone() for x in vars(good.layers[0]).values()))
    broken.wq[0, 0, 0] = torch.nan
    with pytest.raises(HeadwiseError, match="wq of layer 1 has non-finite"):
        Stack((good.layers[0], broken))
    with pytest.raises(HeadwiseError, match="width 4 to 4, but the stack has width 6"):
        Stack((good.layers[0], random_stack(1, 2, 4).layers[0]))
    with pytest.raises(HeadwiseError, match="no head"):
        paths.through_head(good, gaussian(4, 6), (5, 0))
