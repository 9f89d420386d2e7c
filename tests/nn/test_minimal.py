"""Two rows from four products: the same convolution, whatever the rows, images, blocks, gaps and padding."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headwise.convolution import convert
from headwise.nn import minimal
from headwise.operators.relative.shift import Border
from headwise.testing.contract import normal
from headwise.testing.counting import count_multiply_adds


@pytest.mark.parametrize("block", [1, 1 << 11, 1 << 18])
@pytest.mark.parametrize("shape", [(1, 3, 6, 5), (3, 2, 7, 4), (5, 2, 3, 3), (2, 1, 9, 6)])
@pytest.mark.parametrize(
    "kernel, gap, padding", [(3, 1, ((1, 1), (1, 1))), (2, 2, ((0, 2), (3, 0))), (1, 1, ((0, 0), (0, 0)))]
)
def test_against_convolution(shape, kernel, gap, padding, block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal, "BLOCK", block)
    x, weight = normal(*shape, seed=0), normal(3, kernel, 4, shape[1], seed=1)
    expected = F.conv2d(
        F.pad(x, (*padding[1], *padding[0])), weight.permute(2, 3, 0, 1).contiguous(), dilation=(1, gap)
    )
    torch.testing.assert_close(minimal.three_rows(x, weight, gap, padding), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("border", get_args(Border))
def test_a_wide_layer_takes_the_short_cut_when_no_gradient_is_wanted(border: Border) -> None:
    conv = nn.Conv2d(16, 20, 3, padding=1, padding_mode=border, dtype=torch.float64)
    layer, receipt = convert(conv)
    x = normal(2, 16, 6, 8, seed=0)
    assert receipt.largest_change < 1e-13
    with torch.no_grad():
        torch.testing.assert_close(layer(x), conv(x), rtol=0, atol=1e-13)
        assert count_multiply_adds(lambda: layer(x)).products < 0.9 * count_multiply_adds(lambda: conv(x)).products
    torch.testing.assert_close(layer(x), conv(x), rtol=0, atol=1e-13)  # with gradients: tap by tap


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for baddbmm_ and loops
def test_whoever_watches_gets_every_step() -> None:
    layer = convert(nn.Conv2d(16, 16, 3, padding=1))[0].requires_grad_(False)
    x = torch.randn(2, 1, 16, 5, 5)
    expected = torch.stack([layer(part) for part in x])
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    watched = x[0].clone().requires_grad_()
    layer(watched).sum().backward()
    assert watched.grad is not None
    program = torch.export.export(layer, (x[0],))
    torch.testing.assert_close(program.module()(x[0]), expected[0])


def test_float32_rounds_like_the_convolution() -> None:
    conv = nn.Conv2d(64, 64, 3, padding=1)
    x = normal(1, 64, 24, 24, seed=0, dtype=torch.float32)
    layer = convert(conv)[0]
    with torch.no_grad():
        theirs, ours = conv(x).double(), layer(x).double()
        true = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)  # pyright: ignore
    assert (ours - true).abs().max() < 4 * (theirs - true).abs().max()
