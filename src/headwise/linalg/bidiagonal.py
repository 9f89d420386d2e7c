"""U^T P V is block bidiagonal: two bases that grow by a block a step (Golub & Kahan 1965), and what is left of P.

From a block V_1 of orthonormal columns the bases grow alternately, U_j from P V_j and V_(j+1) from P^T U_j, each new
block orthogonal to all previous ones.  In the bases [U, U'] and [V, V'], primes for the unexplored complement,

    P = [ B  C ]      B, C known, C = U^T P V' of `block` columns;      D = U'^T P V' unknown.
        [ 0  D ]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.linalg.basis import extend, outside, size

Map = Callable[[Tensor], Tensor]
Fresh = Callable[[int], Tensor]


@final
@dataclass(frozen=True, eq=False)
class Explored:
    """P = left known right^T + D on the rest, known = [B C]."""

    left: Tensor  # U (*batch, m, s)
    known: Tensor  # (*batch, s, s + block), float64
    right: Tensor  # [V, newest block of V'] (*batch, n, s + block)

    @property
    def s(self) -> int:
        return self.known.shape[-2]


@final
class Bidiagonalisation:
    """The bases after any number of steps; one step is one product with P and one with P^T, of `block` columns each.

    start  (*batch, n, block) orthonormal: V_1
    fresh  rows -> a new Gaussian block, for columns where the iteration finds nothing new
    steps  room for so many
    """

    def __init__(self, forward: Map, backward: Map, m: int, start: Tensor, fresh: Fresh, steps: int) -> None:
        *batch, n, self.block = start.shape
        self._forward, self._backward, self._fresh = forward, backward, fresh
        most = self.block * steps
        self._left, self._right = start.new_zeros(*batch, m, most), start.new_zeros(*batch, n, most + self.block)
        self._known = torch.zeros(*batch, most, most + self.block, dtype=torch.float64, device=start.device)
        self._scale = torch.zeros(batch, dtype=torch.float64, device=start.device)
        self._next, self._size = start, 0

    def step(self) -> None:
        left, right, first, stop = self._left, self._right, self._size, self._size + self.block
        v = self._next if not first else extend(right[..., :first], self._next, self._scale, self._fresh)
        right[..., first:stop] = v
        y = self._forward(right[..., first:stop])
        self._scale = torch.maximum(self._scale, size(y))
        left[..., first:stop] = extend(left[..., :first], y, self._scale, self._fresh)
        # all of U^T P V, not only its two nonzero blocks, so that `known` includes the rounding
        self._known[..., :stop, first:stop] = (left[..., :stop].mT @ y).double()
        self._next, self._size = self._backward(left[..., first:stop]), stop

    def explored(self) -> Explored:
        """What is known after the steps so far; its bases are overwritten by the next step."""
        s, b = self._size, self.block
        z = outside(outside(self._next, self._right[..., :s]), self._right[..., :s])
        self._right[..., s : s + b], t = torch.linalg.qr(z)
        known = self._known[..., :s, : s + b].clone()
        known[..., s:] = 0
        known[..., s - b :, s:] = t.mT.double()
        return Explored(self._left[..., :s], known, self._right[..., : s + b])
