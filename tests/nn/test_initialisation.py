"""Weights that start with a structure: the products that the papers ask for, and heads that shift."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm

from headwise.errors import HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.nn import GridAttention, MultiHead, impulse_, mimetic_
from headwise.nn.ragged_heads import head_slices
from headwise.operators.relative.encodings import cells, sinusoidal
from headwise.testing import references


def positions(grid: tuple[int, ...], width: int) -> torch.Tensor:
    return layer_norm(sinusoidal(cells(grid), width), (width,))


@pytest.mark.parametrize("key_width", [16, (64, 8, 4, 16)])
def test_mimetic_products(key_width) -> None:
    """Of full rank, W_q W_k^T and W_v W_o are a Z + b I exactly; of rank k, the best of that rank."""
    layer = MultiHead(64, 4, key_width=key_width, value_width=20)
    mimetic_(layer, generator=torch.Generator().manual_seed(0))
    generator, eye = torch.Generator().manual_seed(0), torch.eye(64, dtype=torch.float64)
    for rows, k in zip(head_slices(layer.key_widths), layer.key_widths, strict=True):
        z = torch.randn(64, 64, generator=generator, dtype=torch.float64) / 8
        product = layer.query.weight[rows].mT @ layer.key.weight[rows]
        u, s, vt = torch.linalg.svd(0.7 * z + 0.7 * eye)
        torch.testing.assert_close(product.double(), (u[:, :k] * s[:k]) @ vt[:k], atol=1e-5, rtol=0)
    z = torch.randn(64, 64, generator=generator, dtype=torch.float64) / 8
    product = (layer.out.weight @ layer.value.weight).mT  # 80 rows of values, of which 64 are needed
    torch.testing.assert_close(product.double(), 0.4 * z - 0.4 * eye, atol=1e-5, rtol=0)
    assert all(linear.bias.abs().max() == 0 for linear in (layer.query, layer.key, layer.value, layer.out))
    assert all(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("grid, width, key_width", [((7, 7), 64, 16), ((12,), 32, 12), ((2, 3, 3), 48, 12)])
def test_impulses_shift(grid: tuple[int, ...], width: int, key_width: int) -> None:
    layer, p = MultiHead(width, 4, key_width=key_width), positions(grid, width)
    offsets = impulse_(layer, p, grid, share=0.6, generator=torch.Generator().manual_seed(0))
    assert len(set(offsets)) == min(4, 3 ** len(grid))
    weights = layer.operator(p).dense().detach()
    for head, offset in enumerate(offsets):
        target = references.shift(grid, offset, border="replicate")
        assert (weights[head] * target).sum(-1).mean() == pytest.approx(0.6, abs=1e-3)
        assert (weights[head].argmax(-1) == target.argmax(-1)).float().mean() > 0.95


def test_narrow_heads_point_there_too() -> None:
    """Positions of full rank, all alike, and k far below it: the directions kept are random, not those of k cells."""
    p = 5 * torch.eye(30, 40)
    layer = MultiHead(40, 1, key_width=10)
    impulse_(layer, p, (30,), offsets=[(1,)], generator=torch.Generator().manual_seed(0))
    weights = layer.operator(p).dense()[0]
    assert (weights.argmax(-1) == torch.arange(1, 31).clamp(max=29)).float().mean() > 0.8


def test_the_generator_decides_and_grids_are_layers_too() -> None:
    layers = [GridAttention(32, 2) for _ in range(3)]
    p = positions((4, 4), 32)
    before = torch.random.get_rng_state()
    for layer, seed in zip(layers, (0, 0, 1), strict=True):
        impulse_(layer, p, (4, 4), generator=torch.Generator().manual_seed(seed))
        mimetic_(layer, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(before, torch.random.get_rng_state())
    first, second, third = (layer.attend.query.weight for layer in layers)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize(
    "act, error, text",
    [
        (
            lambda: mimetic_(torch.nn.Linear(2, 2)),
            InputError,
            "needs a MultiHead or GridAttention .* a Linear",
        ),
        (lambda: mimetic_(MultiHead(8, 2, out_width=4)), UnsupportedError, "maps 8, with a context of .8, 8., to 4"),
        (lambda: impulse_(MultiHead(8, 2), torch.zeros(9, 8), (3, 4)), ShapeError, "positions has 9, grid has 12"),
        (lambda: impulse_(MultiHead(8, 2), torch.zeros(9, 6), (3, 3)), ShapeError, "positions has 6, layer has 8"),
        (
            lambda: impulse_(MultiHead(8, 2), torch.zeros(9, 8), (3, 3), share=1.0),
            InputError,
            "between 0 and 1",
        ),
        (
            lambda: impulse_(MultiHead(8, 2), torch.zeros(9, 8), (3, 3), offsets=[(0, 1)]),
            ShapeError,
            "axis 'h' must agree, but the layer has 2, offsets has 1",
        ),
        (
            lambda: impulse_(MultiHead(8, 2), torch.zeros(9, 8), (3, 3), offsets=[(0, 1), (1,)]),
            ShapeError,
            r"grid has 2, offsets\[1\] has 1",
        ),
    ],
)
def test_bad_input_is_named(act, error: type[HeadwiseError], text: str) -> None:
    with pytest.raises(error, match=text):
        act()
