"""GridAttention is MultiHead on the positions of a grid, written out position by position."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.nn import GridAttention


def position_by_position(layer: GridAttention, x: Tensor, context: Tensor) -> Tensor:
    """Gather and scatter tokens one index at a time, independently of flatten and unflatten."""
    places, out = list(itertools.product(*map(range, x.shape[2:]))), None
    tokens = torch.stack([x[(slice(None), slice(None), *place)] for place in places], 1)
    context_tokens = [
        context[(slice(None), slice(None), *place)] for place in itertools.product(*map(range, context.shape[2:]))
    ]
    answers = layer.attend(tokens, torch.stack(context_tokens, 1))
    out = x.new_empty(x.shape[0], answers.shape[-1], *x.shape[2:])
    for i, place in enumerate(places):
        out[(slice(None), slice(None), *place)] = answers[:, i]
    return out


@pytest.mark.parametrize("grid, other", [((7,), (4,)), ((3, 5), (2, 6)), ((2, 3, 4), (3, 1, 2)), ((6,), (2, 3))])
def test_output_has_the_spatial_shape_of_the_queries(grid: tuple[int, ...], other: tuple[int, ...]) -> None:
    layer = GridAttention(8, 2, context_width=6, out_width=4, key_width=(3, 2)).double()
    x = torch.randn(2, 8, *grid, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 6, *other, dtype=torch.float64, requires_grad=True)
    fast, slow = layer(x, context), position_by_position(layer, x, context)
    assert fast.shape == (2, 4, *grid)
    torch.testing.assert_close(fast, slow)
    pull = torch.randn_like(fast)
    torch.testing.assert_close(
        torch.autograd.grad(fast, (x, context), pull), torch.autograd.grad(slow, (x, context), pull)
    )
    assert layer.operator(x, context).shape == (2, 2, torch.Size(grid).numel(), torch.Size(other).numel())


def test_padding_lies_on_the_grid_of_the_keys() -> None:
    layer, x = GridAttention(8, 2), torch.randn(1, 8, 4, 3)
    real = torch.ones(1, 4, 3, dtype=torch.bool)
    real[:, 2:] = False
    torch.testing.assert_close(layer(x, key_mask=real), layer(x, x[:, :, :2]))
    with pytest.raises(
        ShapeError, match=r"key_mask has shape \(1, 3, 4\), but the keys have \(b, \*grid\) = \(1, 4, 3\)"
    ):
        layer(x, key_mask=real.mT)


def test_keys_and_values_may_come_from_two_grids_of_one_size() -> None:
    layer, x = GridAttention(8, 2, context_width=(5, 6)), torch.randn(1, 8, 4, 3)
    keys, values = torch.randn(1, 5, 2, 6), torch.randn(1, 6, 3, 4)
    tokens = layer.attend(x.flatten(2).mT, (keys.flatten(2).mT, values.flatten(2).mT))
    torch.testing.assert_close(layer(x, (keys, values)), tokens.mT.unflatten(2, (4, 3)))


def test_compiles_whole() -> None:
    layer, x = GridAttention(8, 2), torch.randn(1, 8, 4, 3)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_inputs_without_a_grid_are_rejected() -> None:
    with pytest.raises(
        ShapeError, match=r"GridAttention: x must be \(b, c, \*grid\) without empty axes, but is \(8, 4\)"
    ):
        GridAttention(8, 2)(torch.zeros(8, 4))
