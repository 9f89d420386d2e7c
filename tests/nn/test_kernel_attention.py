"""KernelAttention layers against sum_h P_h X W_h + b written out: values, gradients, costs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import DtypeError, InputError, ShapeError
from headwise.nn.kernel_attention import (
    ConvolutionGeometry,
    KernelAttention,
    QuadraticAttention,
    SeparableQuadraticAttention,
    ShiftAttention,
)
from headwise.operators.relative.quadratic import log_width
from headwise.testing.contract import normal
from headwise.testing.counting import count_multiply_adds

GEOMETRIES: dict[str, dict[str, Any]] = {
    "line": {"in_channels": 4, "kernel_size": (3,), "stride": (2,), "dilation": (2,), "padding": ((2, 1),)},
    "plane": {
        "in_channels": 4,
        "kernel_size": (3, 2),
        "stride": (1, 2),
        "dilation": (1, 2),
        "padding": ((1, 0), (2, 2)),
        "border": "reflect",
    },
    "grouped": {
        "in_channels": 4,
        "kernel_size": (2, 3),
        "stride": (1, 1),
        "dilation": (1, 1),
        "padding": ((0, 1), (1, 1)),
        "groups": 2,
    },
    "depthwise": {
        "in_channels": 4,
        "kernel_size": (3, 3),
        "stride": (1, 1),
        "dilation": (1, 1),
        "padding": ((1, 1), (1, 1)),
        "groups": 4,
    },
    "space": {
        "in_channels": 2,
        "kernel_size": (2, 1, 3),
        "stride": (1, 2, 1),
        "dilation": (2, 1, 1),
        "padding": ((1, 1), (0, 0), (1, 1)),
    },
}
GRIDS = {"line": (7,), "plane": (4, 5), "grouped": (4, 3), "depthwise": (4, 4), "space": (4, 3, 4)}


def layer(kind: str, name: str, *, alpha: float = 1.3) -> KernelAttention:
    geometry = ConvolutionGeometry(**GEOMETRIES[name])
    weight = normal(4, geometry.in_channels // geometry.groups, *geometry.kernel_size, seed=1)
    bias = normal(4, seed=2)
    if kind == "shift":
        return ShiftAttention(geometry, weight, bias)
    if kind == "separable":
        return SeparableQuadraticAttention(geometry, weight, bias, alpha=alpha)
    centres, widths = 2 * normal(geometry.heads, geometry.axes, seed=3), normal(geometry.heads, geometry.axes, seed=4)
    return QuadraticAttention(geometry, weight, bias, centres=centres, log_widths=widths)


def by_definition(module: KernelAttention, x: Tensor) -> Tensor:
    """sum over heads and groups of (P_h X) W_h + b, with dense P_h."""
    g, grid = module.geometry, tuple(x.shape[2:])
    p = module.operator(grid).dense(torch.empty(0, dtype=torch.float64))
    padded = g.pad(x).flatten(2)  # (b, channels, n)
    weight = module.weight.flatten(2)  # (out, in/groups, h)
    inner, outer = g.in_channels // g.groups, module.out_channels // g.groups
    out = torch.zeros(x.shape[0], module.out_channels, p.shape[-2], dtype=torch.float64)
    for h in range(g.heads):
        attended = padded @ p[h].mT
        parts = [
            weight[i * outer : (i + 1) * outer, :, h] @ attended[:, i * inner : (i + 1) * inner]
            for i in range(g.groups)
        ]
        out = out + torch.cat(parts, dim=1)
    assert module.bias is not None
    return (out + module.bias[:, None]).unflatten(-1, g.output_size(grid))


@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_is_the_sum_over_heads(kind: str, name: str) -> None:
    module = layer(kind, name)
    x = normal(2, module.geometry.in_channels, *GRIDS[name], seed=0).requires_grad_()
    output, expected = module(x), by_definition(module, x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    pull = normal(*output.shape, seed=5)
    leaves = [x, *module.parameters()]
    gradients = [torch.autograd.grad(y, leaves, pull) for y in (output, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_cost_is_what_is_counted(kind: str, name: str) -> None:
    module, grid = layer(kind, name), GRIDS[name]
    x = normal(1, module.geometry.in_channels, *grid, seed=0)
    assert count_multiply_adds(lambda: module(x)).products == module.cost(grid).multiply_adds


@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
def test_a_map_without_a_batch_axis(kind: str) -> None:
    module = layer(kind, "plane")
    x = normal(4, 4, 5, seed=0)
    torch.testing.assert_close(module(x), module(x.unsqueeze(0)).squeeze(0))


@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_applying_the_operators_gives_the_same(kind: str, name: str) -> None:
    module = layer(kind, name)
    x = normal(2, module.geometry.in_channels, *GRIDS[name], seed=0)
    torch.testing.assert_close(module.sum_over_heads(x), module(x), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap loops over operations without a batch rule
@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
def test_it_can_be_vmapped(kind: str) -> None:
    module, x = layer(kind, "grouped").requires_grad_(False), normal(3, 2, 4, 4, 3, seed=0)
    torch.testing.assert_close(torch.func.vmap(module)(x), torch.stack([module(part) for part in x]))


@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
def test_it_exports_saves_moves_and_trains(kind: str, tmp_path) -> None:
    module, x = layer(kind, "plane").float(), normal(2, 4, 4, 5, seed=0, dtype=torch.float32)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},)).module()
    torch.testing.assert_close(program(torch.cat([x, x])), module(torch.cat([x, x])))
    torch.save(module.state_dict(), tmp_path / "layer.pt")
    other = layer(kind, "plane").float()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(other(x), module(x))
    assert module.to("meta")(x.to("meta")).shape == other(x).shape
    before = other(x).square().mean()
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = other(x).square().mean()
        loss.backward()
        optimizer.step()
    assert other(x).square().mean() < before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["shift", "separable", "free"])
def test_every_dtype(kind: str, dtype: torch.dtype) -> None:
    module = layer(kind, "plane")
    x = normal(2, 4, 4, 5, seed=0)
    expected = module(x)
    output = layer(kind, "plane").to(dtype)(x.to(dtype))
    assert output.dtype == dtype
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5}[dtype]
    assert (output.double() - expected).abs().max() < tolerance * expected.abs().max()


def test_sharp_heads_on_a_grid_become_shifts() -> None:
    x = normal(2, 4, 4, 5, seed=0)
    torch.testing.assert_close(
        layer("separable", "plane", alpha=60.0)(x), layer("shift", "plane")(x), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    "x, error, message",
    [
        (torch.zeros(4), ShapeError, r"x must be \(batch, 4, 2 grid axes\) or the same without batch, but has shape"),
        (torch.zeros(1, 4, 3), ShapeError, r"axis 'channels' must agree, but x has 1, the layer 4"),
        (torch.zeros(1, 3, 4, 5), ShapeError, r"axis 'channels' must agree, but x has 3, the layer 4"),
        (torch.zeros(1, 4, 0, 5), ShapeError, r"x has an empty grid of size \(0, 5\)"),
        (torch.zeros(1, 4, 1, 5), ShapeError, r"does not fit into a map of \(1, 5\) padded to \(2, 9\)"),
        (
            torch.zeros(1, 4, 4, 2),
            ShapeError,
            r"reflect padding of 2 cells needs at least 3 cells, but grid axis 1 has 2",
        ),
        (torch.zeros(1, 4, 4, 5).double(), DtypeError, r"x is torch.float64, the weights are torch.float32"),
    ],
)
def test_bad_maps_are_rejected(x: Tensor, error: type[Exception], message: str) -> None:
    module = layer("shift", "plane").float()
    with pytest.raises(error, match=message):
        module(x)


def test_bad_geometry_is_rejected() -> None:
    good = GEOMETRIES["plane"]
    for change, message in (
        ({"kernel_size": (3,)}, "one entry per axis"),
        ({"kernel_size": (3, 0)}, "sizes must be at least 1"),
        ({"groups": 3}, "4 channels do not divide into 3 groups"),
        ({"padding": ((-1, 0), (0, 0))}, "must not be negative"),
        ({"border": "mirror"}, "border must be one of"),
    ):
        with pytest.raises(InputError, match=message):
            ConvolutionGeometry(**{**good, **change})
    geometry, weight = ConvolutionGeometry(**good), torch.zeros(4, 4, 3, 2)
    with pytest.raises(ShapeError, match=r"weight must be \(out, in per group 4, kernel \(3, 2\)\)"):
        ShiftAttention(geometry, torch.zeros(4, 4, 3, 3), None)
    with pytest.raises(ShapeError, match=r"axis 'out' must agree, but weight has 4, bias has shape \(3,\)"):
        ShiftAttention(geometry, weight, torch.zeros(3))
    with pytest.raises(ShapeError, match=r"centres must be \(heads 6, axes 2\)"):
        QuadraticAttention(geometry, weight, None, centres=torch.zeros(6, 1), log_widths=log_width(1.0))
