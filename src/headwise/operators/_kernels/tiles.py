"""start + jump b + step t for blocks b < count and places t < length: positions of a sequence that a kernel can read
as a batch of dense blocks without gathering them.

Consecutive blocks, overlapping bands, every l-th position and the last c of every l positions are all of this form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Tiles:
    """`count` blocks of `length` positions; with `shared` > 0, all of them as one block that `shared` others read.

    >>> Tiles(start=0, count=3, jump=2, length=4).index().tolist()
    [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    >>> Tiles(start=1, count=2, jump=3, length=2, shared=1).index().tolist()
    [[1, 2, 4, 5]]
    """

    start: int
    count: int
    jump: int
    length: int
    step: int = 1
    shared: int = 0

    @property
    def blocks(self) -> int:
        return self.shared or self.count

    @property
    def size(self) -> int:
        """Positions in one block as the kernel reads it."""
        return self.count * self.length if self.shared else self.length

    def run(self, first: int, most: int) -> Tiles:
        """Blocks first .. first + most, as far as there are any."""
        if self.shared:
            return replace(self, shared=min(most, self.shared - first))
        return replace(self, start=self.start + self.jump * first, count=min(most, self.count - first))

    def index(self, device: torch.device | None = None) -> Tensor:
        """Positions (blocks, size)."""
        b, t = torch.arange(self.count, device=device), torch.arange(self.length, device=device)
        index = self.start + self.jump * b[:, None] + self.step * t
        return index.reshape(1, -1).expand(self.shared, -1) if self.shared else index

    def view(self, x: Tensor) -> Tensor:
        """x (b, n, c) as (b, blocks, size, c): a view, except that a shared block is gathered once."""
        b, n, c = x.stride()
        sizes = (x.shape[0], self.count, self.length, x.shape[2])
        grid = x[:, self.start :].as_strided(sizes, (b, self.jump * n, self.step * n, c))
        return grid.flatten(1, 2).unsqueeze(1).expand(-1, self.shared, -1, -1) if self.shared else grid

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """total[..., index, :] += part for total (b, n, c) and part (b, blocks, size, c), in place."""
        if self.shared:
            part = part.sum(1).unflatten(1, (self.count, self.length))
            replace(self, shared=0).add_to(total, part)
        elif self.count == 1 or self.jump >= self.length * self.step or self.step >= self.jump * self.count:
            self.view(total).add_(part)
        else:  # overlapping bands: as many layers of blocks that do not overlap
            for first in range(0, self.length, self.jump):
                width = min(self.jump, self.length - first)
                layer = replace(self, start=self.start + first, length=width)
                layer.view(total).add_(part[:, :, first : first + width])
