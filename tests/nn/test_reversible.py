"""Gradients and stored activations of reversible stacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.errors import InputError
from headwise.nn.encoder import Encoder
from headwise.nn.reversible import Reversible


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_reversible_gradients_equal_the_plain_ones(dropout: float) -> None:
    pairs = [
        (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
        for _ in range(4)
    ]
    pairs[3] = pairs[0]  # shared parameters add up
    stack = Reversible(pairs).double()
    x = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves = [*x, *stack.parameters()]
    results = []
    for run in (stack, stack.plain):
        torch.manual_seed(1)
        one, two = run(*x)
        loss = (one * torch.linspace(0, 1, 6)).sum() + two.square().sum()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_reversible_stores_no_activations() -> None:
    """What autograd stores for the backward pass does not grow with depth; without `reversible` it does."""

    def stored(depth: int, reversible: bool) -> int:
        model, sizes = Encoder(8, 2, depth, reversible=reversible), {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in parameters:
                sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model(torch.randn(1, 64, 8, requires_grad=True))
            total = sum(sizes.values())
        del out
        return total

    assert stored(8, True) == stored(2, True)
    assert stored(8, False) > 3 * stored(2, False)


def test_an_empty_stack_is_rejected() -> None:
    with pytest.raises(InputError, match="at least one pair"):
        Reversible([])
