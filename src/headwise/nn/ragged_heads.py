"""Heads of different widths in one layer: concatenated in the weights, padded with zeros for the operator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.shapes import whole_numbers, whole_tuple

MOST_HEADS = 2**20


def head_widths(owner: str, axis: str, heads: int, width: int | Sequence[int] | None, total: int) -> tuple[int, ...]:
    """One width per head: the same for all, one given per head, or an equal share of `total`.

    >>> head_widths("MultiHead", "k", 2, None, 8), head_widths("MultiHead", "k", 2, (3, 5), 8)
    ((4, 4), (3, 5))
    """
    whole_numbers(owner, least=0, heads=heads)
    if heads < 1:
        raise ShapeError(f"{owner}: axis 'h' must be at least 1, but heads is {heads}")
    if width is None:
        if total % heads:
            raise ShapeError(
                f"{owner}: width {total} does not divide into {heads} heads; give axis {axis!r} a width per head"
            )
        width = total // heads
    whole_numbers(owner, most=MOST_HEADS, heads=heads)
    if isinstance(width, Sequence):
        widths = whole_tuple(owner, f"axis {axis!r}", width, least=0)
    else:
        whole_numbers(owner, **{f"axis {axis!r}": width})
        widths = (width,) * heads
    if len(widths) != heads:
        raise ShapeError(
            f"{owner}: axis {axis!r} has {len(widths)} widths {widths} for {heads} heads; give one per head"
        )
    if min(widths) < 1:
        raise ShapeError(f"{owner}: axis {axis!r} has widths {widths}; every head needs at least 1")
    return widths


def head_slices(widths: Sequence[int]) -> tuple[slice, ...]:
    """The rows of each head in a concatenated weight.

    >>> head_slices((3, 5))
    (slice(0, 3, None), slice(3, 8, None))
    """
    ends = tuple(accumulate(whole_tuple("head_slices", "widths", widths)))
    return tuple(slice(end - width, end) for width, end in zip(widths, ends, strict=True))


class HeadLayout(nn.Module):
    """(*batch, n, k_1 + ... + k_h) <-> (*batch, h, n, max k_i), zeros in the gaps.

    Zeros do not change dot products, and the operator maps zero columns to zero, so the result is that of a loop over
    the heads.  The widths are a buffer, saved with the weights, so that checkpoints of grown layers can be loaded.
    """

    widths: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.register_buffer("widths", torch.tensor(self.sizes, dtype=torch.int64))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def ragged(self) -> bool:
        return len(set(self.sizes)) > 1

    def resize_(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.widths.copy_(torch.tensor(self.sizes, dtype=torch.int64))

    def split(self, y: Tensor) -> Tensor:
        h, k = len(self.sizes), max(self.sizes)
        if self.ragged:
            y = y.new_zeros(*y.shape[:-1], h * k).index_copy(-1, self._slots(y), y)
        return y.unflatten(-1, (h, k)).transpose(-3, -2)

    def merge(self, y: Tensor) -> Tensor:
        y = y.transpose(-3, -2).flatten(-2)
        return y.index_select(-1, self._slots(y)) if self.ragged else y

    def _slots(self, y: Tensor) -> Tensor:
        # computed each time: a buffer that is not saved would be uninitialised after loading on "meta"
        k = max(self.sizes)
        return torch.tensor([i * k + j for i, size in enumerate(self.sizes) for j in range(size)], device=y.device)

    def extra_repr(self) -> str:
        return f"{self.sizes}"
