"""x = W patch + position: images, audio and video as sequences of tokens for an `Encoder`.

A patch is a block of pixels of an image, or a frame of audio.  Positions are sines and cosines of each coordinate
(Vaswani et al. 2017), so any grid size works; every axis gets an equal share of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.operators.relative.encodings import cells, sinusoidal
from headwise.shapes import autocasting, same_kind, whole_numbers, whole_tuple


@final
class PatchEmbedding(nn.Module):
    """(b, channels, *grid) -> (b, n, width) for grids of one to three axes; by default patches do not overlap.

    >>> import torch
    >>> PatchEmbedding(1, (2, 2), 16)(torch.randn(5, 1, 8, 8)).shape
    torch.Size([5, 16, 16])
    """

    def __init__(
        self, channels: int, patch_size: Sequence[int], width: int, stride: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        size = whole_tuple("PatchEmbedding", "patch_size", patch_size)
        step = size if stride is None else whole_tuple("PatchEmbedding", "stride", stride)
        whole_numbers("PatchEmbedding", channels=channels, width=width)
        if not 1 <= len(size) <= 3 or len(step) != len(size):
            raise ShapeError(
                f"PatchEmbedding: patch_size and stride need one to three axes each, but are {size} and {step}"
            )
        if width % (2 * len(size)):
            raise ShapeError(
                f"PatchEmbedding: width must be a multiple of {2 * len(size)} (a sine and a cosine per axis), but is "
                f"{width}"
            )
        self.channels, self.patch_size = channels, size
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1]
        self.project = kind(channels, width, size, stride=step)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        axes = len(self.patch_size)
        same_kind("PatchEmbedding", x=x)
        if not autocasting(x.device):
            same_kind("PatchEmbedding", x=x, weight=self.project.weight)
        if x.dim() != axes + 2 or x.shape[1] != self.channels:
            raise ShapeError(
                f"PatchEmbedding: x must be (b, {self.channels}, {axes} grid axes), but has shape {tuple(x.shape)}"
            )
        if 0 in x.shape:
            raise ShapeError(f"PatchEmbedding: x has shape {tuple(x.shape)}: an empty axis has no patches")
        if any(side < size for side, size in zip(x.shape[2:], self.patch_size, strict=True)):
            raise ShapeError(
                f"PatchEmbedding: a grid of {tuple(x.shape[2:])} is smaller than a patch of {self.patch_size}"
            )
        y = self.project(x)
        return y.flatten(2).mT + sinusoidal(cells(y.shape[2:]), y.shape[1]).to(y)


def frame_embedding(size: int, width: int, *, hop: int | None = None, channels: int = 1) -> PatchEmbedding:
    """(b, channels, samples) -> (b, n, width): frames of `size` samples, `hop` samples apart (default: `size`)."""
    whole_numbers("frame_embedding", size=size)
    return PatchEmbedding(channels, (size,), width, None if hop is None else (hop,))
