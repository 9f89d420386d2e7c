"""Learned projections for other lengths, shared between layers or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn.builders import LearnedProjection, LearnedSimilarity
from headwise.nn.encoder import Encoder
from headwise.nn.multihead import MultiHead
from headwise.operators import projected


def test_one_builder_for_all_layers_and_one_for_each() -> None:
    shared = LearnedProjection(projected, 12, 4)
    assert sum(p.numel() for p in Encoder(8, 2, 3, build=shared).parameters()) == 48 + sum(
        p.numel() for p in Encoder(8, 2, 3).parameters()
    )
    each = [LearnedProjection(projected, 12, 4) for _ in range(3)]
    assert sum(p.numel() for p in Encoder(8, 2, 3, build=each).parameters()) == 144 + sum(
        p.numel() for p in Encoder(8, 2, 3).parameters()
    )


def test_projections_of_other_lengths() -> None:
    q = torch.randn(1, 6, 4)
    sliced = LearnedProjection(projected, 12, 3)
    torch.testing.assert_close(sliced.fitted(sliced.e, 6).apply(torch.eye(6)), sliced.e[:, :6])
    with pytest.raises(UnsupportedError, match="at most 12 positions, but there are 20; use fit='interpolate'"):
        sliced(torch.randn(1, 20, 4), torch.randn(1, 20, 4))
    stretched = LearnedProjection(projected, 12, 3, fit="interpolate")
    for n in (6, 20):
        wide = stretched.fitted(stretched.e, n).apply(torch.ones(n, 1)).squeeze(-1)
        assert wide.shape == (3,)
    constant = LearnedProjection(projected, 12, 3, fit="interpolate")
    nn.init.ones_(constant.e)
    torch.testing.assert_close(constant.fitted(constant.e, 20).apply(torch.ones(20, 1)), torch.full((3, 1), 12.0))
    assert stretched(q, q)(q).shape == q.shape


def test_ranks_beyond_the_length_are_rejected() -> None:
    with pytest.raises(ShapeError, match="rank must be between 1 and length = 4, but is 5"):
        LearnedProjection(projected, 4, 5)


class Reach(nn.Module):
    """1 / (reach_h^2 + |q - k|^2), one reach for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.reach = nn.Parameter(torch.linspace(0.5, 2, heads))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return 1 / (self.reach[:, None, None].square() + torch.cdist(q, k).square())


def test_a_similarity_that_is_a_network() -> None:
    """Its parameters are the layer's, saved with it, and have the gradients of the formula."""
    torch.manual_seed(0)
    build, x = LearnedSimilarity(Reach(2)), torch.randn(3, 5, 8).double()
    layer = MultiHead(8, 2, build=build).double()
    assert "build.f.reach" in dict(layer.named_parameters())
    assert "build.f.reach" in layer.state_dict()
    key_mask = torch.arange(5) < torch.tensor([[5], [3], [4]])
    out = layer(x, causal=True, key_mask=key_mask)
    q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
    f = build.f(q, k) * torch.ones(5, 5).tril() * key_mask[:, None, None]
    expected = layer.out((f / f.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(y.square().sum(), build.f.reach)[0] for y in (out, expected))
    torch.testing.assert_close(found, wanted)
    assert found.abs().min() > 0
    with pytest.raises(InputError, match=r"f must be an nn\.Module, but is a function; for a function use functools"):
        LearnedSimilarity(lambda q, k: q @ k.mT)  # type: ignore[arg-type]
