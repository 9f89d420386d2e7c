"""(P v)_i = v_(i + offset), kept inside the real keys: a head that looks at one place, with padding and a cache.

The `shift` operator on sequences of unequal length; the last query sits at the last key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim


@final
@dataclass(frozen=True, eq=False)
class Look(AttentionOperator):
    """P has one 1 in row i, at column index_i; a sequence without keys has rows of zeros."""

    index: Tensor  # (*batch, m) of int64
    n: int
    whole: Tensor | None  # (*batch, 1), False where there is no key at all
    causal: bool

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.index.shape, self.n))

    @property
    def claims(self) -> frozenset[Claim]:
        promised = {Claim.NONNEGATIVE} | ({Claim.CAUSAL} if self.causal else set())
        silent = self.whole is not None and not bool(self.whole.all())
        return frozenset(promised if silent else promised | {Claim.STOCHASTIC})

    def apply(self, v: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(self.index.shape[:-1], v.shape[:-2])
        if self.index.dim() == 1:
            return v.index_select(-2, self.index)
        index = self.index.unsqueeze(-1).expand(*batch, self.index.shape[-1], v.shape[-1])
        out = v.expand(*batch, *v.shape[-2:]).gather(-2, index)
        return out if self.whole is None else out.masked_fill(~self.whole.unsqueeze(-1), 0)

    def cost(self, d: int) -> Cost:
        return Cost(multiply_adds=0)


def look(m: int, n: int, offset: int, *, like: Tensor, keep: Tensor | None = None) -> Look:
    """Query i, at position i + n - m, looks `offset` keys further; beyond the ends, at the outermost real key.

    `keep` (*batch, n) is True at real keys, which are consecutive.  Causal for offset <= 0 unless padding comes first.

    >>> look(3, 3, -1, like=torch.empty(0)).dense()
    tensor([[1., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    at = torch.arange(n - m, n, device=like.device) + offset
    if keep is None:
        return Look(at.clamp(0, n - 1), n, None, causal=offset <= 0 and m <= n)
    first = keep.int().argmax(-1, keepdim=True)
    last = n - 1 - keep.flip(-1).int().argmax(-1, keepdim=True)
    return Look(at.clamp(first, last), n, keep.any(-1, keepdim=True), causal=False)
