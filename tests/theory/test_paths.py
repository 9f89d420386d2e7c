"""The path decomposition against enumeration, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.linalg.norms import frobenius_norm
from headwise.theory import paths
from headwise.theory.collapse import residual
from headwise.theory.stack import Stack, random_stack


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


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


def test_heads_and_lengths_that_do_not_exist_are_reported() -> None:
    stack = random_stack(2, 2, 6)
    with pytest.raises(HeadwiseError, match=r"head \(5, 0\) does not exist"):
        paths.through_head(stack, gaussian(4, 6), (5, 0))
    with pytest.raises(HeadwiseError, match="length 1 does not occur"):
        paths.sample_norms(stack, gaussian(4, 6), 1, 10)
    with pytest.raises(HeadwiseError, match="equally many heads"):
        paths.sample_norms(Stack((stack.layers[0], random_stack(1, 3, 6).layers[0])), gaussian(4, 6), 2, 10)
