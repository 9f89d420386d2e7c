"""Learned projections for other lengths, shared between layers or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.errors import ShapeError, UnsupportedError
from headwise.nn.builders import LearnedProjection
from headwise.nn.encoder import Encoder
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
