"""Patches, frames and their positions."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ShapeError
from headwise.nn.embeddings import PatchEmbedding, frame_embedding
from headwise.operators.relative.encodings import cells, sinusoidal


def test_embeddings() -> None:
    embed = PatchEmbedding(3, (4, 2), 16)
    x = torch.randn(2, 3, 8, 8)
    tokens = embed(x) - sinusoidal(cells((2, 4)), 16)
    patch = x[:, :, 4:8, 2:4].reshape(2, -1) @ embed.project.weight.reshape(16, -1).mT
    assert embed.project.bias is not None
    patch = patch + embed.project.bias
    torch.testing.assert_close(tokens[:, 5], patch)
    assert frame_embedding(100, 8, hop=50)(torch.randn(2, 1, 400)).shape == (2, 7, 8)
    positions = sinusoidal(cells((3, 5)), 12)
    assert len({tuple(row.tolist()) for row in positions}) == 15


def test_bad_sizes_are_rejected() -> None:
    with pytest.raises(ShapeError, match="is smaller than a patch of"):
        PatchEmbedding(1, (4, 4), 8)(torch.zeros(1, 1, 3, 3))
    with pytest.raises(ShapeError, match="a multiple of 4"):
        PatchEmbedding(1, (4, 4), 6)
