"""Residuals, the collapse bound and path decomposition: against brute force, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from headwise.theory.residual import relative_residual, residual
from torch import nn

from headwise.errors import HeadwiseError
from headwise.linalg.norms import composite_norm, frobenius_norm, spectral_norm
from headwise.nn import Encoder, MultiHead
from headwise.operators import efficient
from headwise.theory import paths
from headwise.theory.collapse import SHRINKS, beta_of, collapse, collapse_curve, log_bound, log_bound_with_skips
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
    norms = torch.stack([frobenius_norm(y) for y in expected])
    torch.testing.assert_close(found.norms(), norms, rtol=1e-12, atol=1e-12)
    rest = torch.stack([frobenius_norm(residual(y)) for y in expected])
    torch.testing.assert_close(found.residuals() * norms, rest, rtol=1e-12, atol=1e-12)
    chosen = (depth - 1, heads - 1)
    through, without = torch.zeros_like(expected), torch.zeros_like(expected)
    for path, y in each.items():
        kind = through if path[chosen[0]] == chosen[1] else without
        kind[sum(h != paths.SKIP for h in path)] += y
    torch.testing.assert_close(paths.through_head(stack, x, chosen), through, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(paths.avoiding(stack, x, {chosen}), without, rtol=1e-12, atol=1e-12)
    nothing = paths.avoiding(stack, x, {(0, h) for h in range(heads)} - {chosen})  # a layer that only skips
    assert nothing.shape == expected.shape


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


def test_a_module_is_its_layer() -> None:
    for widths in (None, (3, 5)):
        module = MultiHead(8, 2, key_width=widths, value_width=widths).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        x = gaussian(6, 8)
        with torch.no_grad():
            torch.testing.assert_close(layer_of(module)(x), module(x))


def test_residuals_are_exact_where_differences_are_rounding() -> None:
    """Three layers in 400 digits: the last residual is far below what the difference of two states can show."""
    mpmath = pytest.importorskip("mpmath")
    for skip in (False, True):
        stack = random_stack(3, 2, 3, bias=0.3, skip=skip, generator=torch.Generator().manual_seed(0))
        x = 1e-4 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
        with mpmath.workdps(400):
            expected = _residual_in_many_digits(mpmath, stack, x)
        found = stack.residuals(x)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-300)
        assert (composite_norm(found[-1]) < 1e-30).item() is not skip
        torch.testing.assert_close(found[1], residual(stack.states(x)[1]), rtol=1e-3, atol=1e-14)


def _residual_in_many_digits(mpmath, stack: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    matrix = lambda t: mpmath.matrix(t.tolist())  # noqa: E731
    y, found = matrix(x), []
    n, d = x.shape

    def rest(y) -> torch.Tensor:
        means = [mpmath.fsum(y[i, j] for i in range(n)) / n for j in range(d)]
        return torch.tensor([[float(y[i, j] - means[j]) for j in range(d)] for i in range(n)], dtype=torch.float64)

    found.append(rest(y))
    for layer in stack.layers:
        out = y.copy() if stack.skip else mpmath.zeros(n, d)
        for h in range(len(layer.wq)):
            q = y * matrix(layer.wq[h])
            for i in range(n):
                for j in range(q.cols):
                    q[i, j] += mpmath.mpf(layer.bq[h, j].item())
            s = q * (y * matrix(layer.wk[h])).T / mpmath.sqrt(layer.wq.shape[-1])
            p = s.apply(mpmath.exp)
            for i in range(n):
                total = mpmath.fsum(p[i, j] for j in range(n))
                for j in range(n):
                    p[i, j] /= total
            out += p * y * (matrix(layer.wv[h]) * matrix(layer.wo[h]))
        for i in range(n):
            for j in range(d):
                out[i, j] += mpmath.mpf(layer.bias[j].item())
        y = out
        found.append(rest(y))
    return found


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
    encoder = Encoder(48, 12, 12, pre=pre)
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
    with pytest.raises(HeadwiseError, match="not of Linear"):
        collapse_curve([nn.Linear(8, 8)], x)
    with pytest.raises(HeadwiseError, match="reversible"):
        collapse_curve(Encoder(8, 2, 2, reversible=True), x)


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
    with pytest.raises(HeadwiseError, match="length 1 does not occur"):
        paths.sample_norms(good, gaussian(4, 6), 1, 10)
    with pytest.raises(HeadwiseError, match="equally many heads"):
        paths.sample_norms(Stack((good.layers[0], random_stack(1, 3, 6).layers[0])), gaussian(4, 6), 2, 10)
    with pytest.raises(HeadwiseError, match="softmax attention, not of efficient"):
        layer_of(MultiHead(8, 2, build=efficient))
