"""(P v)_i = v_(i + n - m + by), clamped to the visible keys: every query attends to one key at a fixed distance.

The `shift` operator on sequences: with key masks, and with fewer queries than keys (the last query is at the last key).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import InputError, ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.operators.masks import Mask
from headwise.shapes import MOST, shown, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Offset(AttentionOperator):
    """P has one 1 in row i, at column index_i; a sequence without visible keys has rows of zeros."""

    index: Tensor  # (*batch, m) of int64
    n: int
    nonempty: Tensor | None  # (*batch, 1), False where there is no visible key
    causal: bool

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.index.shape, self.n))

    @property
    def claims(self) -> frozenset[Claim]:
        return weights_claim(stochastic=self.nonempty is None or bool(self.nonempty.all()), causal=self.causal)

    def apply(self, v: Tensor) -> Tensor:
        if self.index.dim() == 1:
            return v.index_select(-2, self.index)
        batch = torch.broadcast_shapes(self.index.shape[:-1], v.shape[:-2])
        index = self.index.unsqueeze(-1).expand(*batch, self.index.shape[-1], v.shape[-1])
        out = v.expand(*batch, *v.shape[-2:]).gather(-2, index)
        return out if self.nonempty is None else out.masked_fill(~self.nonempty.unsqueeze(-1), 0)

    def cost(self, d: int) -> Cost:
        return Cost(multiply_adds=0)


@supports(KEY_MASK, instead={CAUSAL: "by <= 0, which is causal"})
def offset(m: int, n: int, by: int, *, key_mask: Tensor | None = None, device: torch.device | None = None) -> Offset:
    """Query i, at position i + n - m, attends to the key `by` positions further; beyond the ends, to the outermost one.

    `key_mask` (*batch, n), True = attend; visible keys are consecutive.  Causal for by <= 0 without a key mask.

    >>> offset(3, 3, -1).dense()
    tensor([[1., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    whole_numbers("Offset", least=0, m=m, n=n)
    whole_numbers("Offset", least=-MOST, by=by)
    if device is not None and not isinstance(device, torch.device):
        raise InputError(f"Offset: device must be a torch.device, but is {shown(device)}")
    if m < 1 or n < 1:
        raise ShapeError(f"Offset: m has {m}, n has {n}: an empty axis has no attention")
    mask = Mask.checked("Offset", m, n, key_mask=key_mask).key_mask
    position = torch.arange(n - m, n, device=device if mask is None else mask.device) + by
    if mask is None:
        return Offset(position.clamp(0, n - 1), n, None, causal=by <= 0 and m <= n)
    first = mask.int().argmax(-1, keepdim=True)
    last = n - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    return Offset(position.clamp(first, last), n, mask.any(-1, keepdim=True), causal=False)
