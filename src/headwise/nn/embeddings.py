"""x = W patch + position: images, audio and video as sequences of tokens for an `Encoder`.

A patch is a block of the input, a pixel is a patch of one, a frame of audio is a patch in one dimension.  Positions are
sines and cosines of each coordinate (Vaswani et al. 2017), so that any grid fits; an axis has an equal share of width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError


@final
class PatchEmbedding(nn.Module):
    """(b, channels, *grid) -> (b, n, width) for grids of one to three axes; patches of `size`, `step` apart.

    >>> PatchEmbedding(1, (2, 2), 16)(torch.randn(5, 1, 8, 8)).shape
    torch.Size([5, 16, 16])
    """

    def __init__(self, channels: int, size: Sequence[int], width: int, step: Sequence[int] | None = None) -> None:
        super().__init__()
        size, step = tuple(size), tuple(size if step is None else step)
        if not 1 <= len(size) <= 3 or len(step) != len(size) or min(*size, *step) < 1:
            raise ShapeError(f"PatchEmbedding: size and step need one to three axes each, but are {size} and {step}")
        if width % (2 * len(size)):
            raise ShapeError(
                f"PatchEmbedding: width must be a multiple of {2 * len(size)} (a sine and a cosine for each axis), but "
                f"is {width}"
            )
        self.channels, self.size = channels, size
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1]
        self.project = kind(channels, width, size, stride=step)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        axes = len(self.size)
        if x.dim() != axes + 2 or x.shape[1] != self.channels:
            raise ShapeError(
                f"PatchEmbedding: x must be (b, {self.channels}, {'*' * axes}), but has shape {tuple(x.shape)}"
            )
        if any(have < need for have, need in zip(x.shape[2:], self.size, strict=True)):
            raise ShapeError(f"PatchEmbedding: a grid of {tuple(x.shape[2:])} has no patch of {self.size}")
        y = self.project(x)
        grid = y.shape[2:]
        return y.flatten(2).mT + grid_positions(grid, y.shape[1]).to(y)


def frames(size: int, width: int, *, hop: int | None = None, channels: int = 1) -> PatchEmbedding:
    """(b, channels, samples) -> (b, n, width): frames of `size` samples, `hop` apart."""
    return PatchEmbedding(channels, (size,), width, None if hop is None else (hop,))


def grid_positions(grid: Sequence[int], width: int) -> Tensor:
    """Sines and cosines of every coordinate, (product of the grid, width)."""
    share = width // len(grid)
    rates = torch.exp(-math.log(10000.0) * torch.arange(0, share, 2) / share)
    parts = []
    for axis, g in enumerate(grid):
        angles = torch.arange(g).unsqueeze(-1) * rates
        part = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        shape = [1] * len(grid) + [share]
        shape[axis] = g
        parts.append(part.reshape(shape).expand(*grid, share))
    return torch.cat(parts, dim=-1).reshape(-1, width)
