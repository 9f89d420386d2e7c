"""Every convolution is attention: dimension x kernel x stride x dilation x padding x border x groups, in float64."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from headwise.convolution import convert, to_convolution
from headwise.convolution.conversion import default_probe, geometry_of
from headwise.testing import references

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
KERNELS = {
    1: [(1,), (2,), (3,), (5,)],
    2: [(1, 1), (2, 2), (3, 3), (1, 3), (4, 2)],
    3: [(1, 1, 1), (2, 2, 2), (3, 1, 2), (1, 3, 3)],
}
STRIDES = {1: [(1,), (2,), (3,)], 2: [(1, 1), (2, 2), (1, 3)], 3: [(1, 1, 1), (2, 1, 2)]}
DILATIONS = {1: [(1,), (2,)], 2: [(1, 1), (2, 1)], 3: [(1, 1, 1), (1, 2, 1)]}
PADDINGS = [0, 1, 2, "same", "valid"]
BORDERS = ["zeros", "replicate", "reflect", "circular"]
GROUPS = [(4, 6, 1), (4, 6, 2), (4, 4, 4)]  # in, out, groups: full, grouped, depthwise


def configurations(axes: int) -> Iterator[Any]:
    options = itertools.product(KERNELS[axes], STRIDES[axes], DILATIONS[axes], PADDINGS, BORDERS, GROUPS)
    for kernel, stride, dilation, padding, border, (inputs, outputs, groups) in options:
        if padding == "same" and max(stride) > 1:
            continue  # torch does not support it
        yield KINDS[axes](
            inputs,
            outputs,
            kernel,
            stride=stride,
            dilation=dilation,
            padding=padding,
            padding_mode=border,
            groups=groups,
            bias=groups != 2,
            dtype=torch.float64,
        )


@pytest.mark.parametrize("axes", KINDS)
def test_every_convolution_is_attention(axes: int) -> None:
    worst, count = 0.0, 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
        for conv in configurations(axes):
            layer, receipt = convert(conv)
            probe = default_probe(geometry_of(conv), conv.weight)
            with torch.no_grad():
                change = (cast(Any, layer).sum_over_heads(probe) - conv(probe)).abs().max().item()
            assert max(change, receipt.largest_change) <= 1e-12, f"{conv} and {layer} differ by {change:.1e}"
            assert receipt.cost_after.multiply_adds == receipt.cost_before.multiply_adds
            assert torch.equal(cast(Any, to_convolution(layer)).weight, conv.weight), f"{conv} does not come back"
            worst, count = max(worst, change), count + 1
    print(f"{axes} axes: {count} configurations, worst difference {worst:.1e}")


def test_at_least_2500_configurations() -> None:
    assert sum(1 for axes in KINDS for _ in configurations(axes)) >= 2500


@pytest.mark.parametrize("axes", KINDS)
def test_against_loops_over_kernel_cells(axes: int) -> None:
    # the test above compares with torch's convolution; this one with loops over kernel cells, for every 97th
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
        for conv in list(configurations(axes))[::97]:
            geometry = geometry_of(conv)
            x = default_probe(geometry, conv.weight)[:1]
            expected = references.convolution(
                x,
                conv.weight,
                conv.bias,
                stride=geometry.stride,
                dilation=geometry.dilation,
                padding=geometry.padding,
                border=geometry.border,
                groups=geometry.groups,
            )
            layer = cast(Any, convert(conv)[0])
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(layer.sum_over_heads(x), expected, rtol=0, atol=1e-12)
