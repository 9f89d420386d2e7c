"""LinformerAttention against a MultiHead with the same projections."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.errors import UnsupportedError
from headwise.nn.builders import LearnedProjection
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.operators import projected


@pytest.mark.parametrize("shared", [False, True])
def test_linformer_attention_equals_multihead_with_a_learned_projection(shared: bool) -> None:
    """E (x W) = (E x) W: values and gradients of a MultiHead with the same weights."""
    first = LinformerAttention(8, 2, 12, 4, shared=shared, bias=False).double()
    last = MultiHead(8, 2, build=LearnedProjection(projected, 12, 4, shared=shared), bias=False).double()
    last.load_state_dict(
        {
            **first.attend.state_dict(),
            **{f"build.{name}": value for name, value in first.projection.state_dict().items()},
        }
    )
    x = torch.randn(2, 10, 8, dtype=torch.float64, requires_grad=True)
    key_mask = torch.arange(10) < torch.tensor([[10], [6]])
    for masks in ({}, {"key_mask": key_mask}):
        a, b = first(x, **masks), last(x, **masks)
        torch.testing.assert_close(a, b)
        pull = torch.randn_like(a)
        leaves = [[x, *sorted_parameters(m, part)] for m, part in ((first, "projection"), (last, "build"))]
        gradients = [torch.autograd.grad(out, of, pull) for out, of in zip((a, b), leaves, strict=True)]
        torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(first(x, key_mask=key_mask)[1, :6], first(x[1:, :6])[0])


def sorted_parameters(layer: nn.Module, projection: str) -> list[nn.Parameter]:
    """Parameters in the order of their names without those of the modules that hold them."""
    named = {name.replace(projection, "projection").replace("attend.", ""): p for name, p in layer.named_parameters()}
    return [named[name] for name in sorted(named)]


def test_linformer_attention_rejects_causal_and_longer_sequences() -> None:
    layer = LinformerAttention(8, 2, 12, 4)
    with pytest.raises(UnsupportedError, match="use MultiHead with LearnedBlocks"):
        layer(torch.randn(1, 12, 8), causal=True)
    with pytest.raises(UnsupportedError, match="at most 12 positions, but there are 13"):
        layer(torch.randn(1, 13, 8))
