"""LearnedQuery against a loop over its heads; its output does not depend on order or on the number of inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.nn import LearnedQuery, head_slices


def by_loops(layer: LearnedQuery, x: Tensor, real: Tensor) -> Tensor:
    parts = []
    for keys, values in zip(head_slices(layer.key_widths), head_slices(layer.value_widths), strict=True):
        k = x @ layer.key.weight[keys].T + layer.key.bias[keys]
        v = x @ layer.value.weight[values].T + layer.value.bias[values]
        s = layer.query[:, keys] @ k.mT / math.sqrt(layer.query[:, keys].shape[1])
        parts.append(s.masked_fill(~real[:, None, :], -math.inf).softmax(-1) @ v)
    return torch.cat(parts, -1) @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("widths", [{}, {"key_width": (2, 5, 1), "value_width": (3, 1, 4), "out_width": 6}])
def test_equals_a_loop_over_heads_in_value_and_gradient(widths: dict) -> None:
    layer = LearnedQuery(12, 4, 3, **widths).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    fast, slow = layer(x, key_mask=real), by_loops(layer, x, real)
    torch.testing.assert_close(fast, slow)
    leaves, pull = [x, *layer.parameters()], torch.randn_like(fast)
    torch.testing.assert_close(torch.autograd.grad(fast, leaves, pull), torch.autograd.grad(slow, leaves, pull))


@pytest.mark.parametrize("n", [1, 2, 30])
def test_the_number_of_outputs_is_the_number_of_queries(n: int) -> None:
    layer = LearnedQuery(8, 3, 2, out_width=5)
    assert layer(torch.randn(4, n, 8)).shape == (4, 3, 5)
    assert layer(torch.randn(n, 8)).shape == (3, 5)
    assert layer.operator(torch.randn(4, n, 8)).shape == (4, 2, 3, n)


def test_padding_is_the_same_as_leaving_out() -> None:
    layer, x = LearnedQuery(8, 3, 2).double(), torch.randn(1, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x, key_mask=torch.arange(6)[None] < 4), layer(x[:, :4]))


def test_runs_under_autocast_and_compiles_whole() -> None:
    layer, x = LearnedQuery(8, 3, 2), torch.randn(2, 5, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_zero_queries_are_rejected() -> None:
    with pytest.raises(ShapeError, match="LearnedQuery: axis 'm' must be at least 1, but queries is 0"):
        LearnedQuery(8, 0, 2)
