"""What operators with features keep of the past: sums over the keys, and no key (see `kept_keys`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.replacement.kinds import Choice

if TYPE_CHECKING:
    from headwise.replacement.install.kept_keys import NewKeys


class RunningSums:
    """For the features b_jc of key j: mass_c = log sum_j exp b_jc, and means_c of v with the weights exp b_jc.

    (P v)_i = sum_c a_ic means_c over the keys j <= i, with a_i the softmax over the features of query i.
    """

    ROWS = 32  # queries at once, with ROWS x ROWS weights for each feature

    def __init__(self, choice: Choice, k: Tensor, v: Tensor) -> None:
        self.choice = choice
        features = self._features(k[:, :, :0], 1.0).shape[-1]
        compute = torch.promote_types(v.dtype, torch.float32)
        self.mass = torch.full((*v.shape[:2], features), -math.inf, dtype=compute, device=v.device)
        self.means = torch.zeros(*self.mass.shape, v.shape[-1], dtype=compute, device=v.device)

    def _features(self, x: Tensor, scale: float) -> Tensor:
        assert self.choice.definition.features is not None
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.choice.definition.features(x, scale, self.choice.options)

    def _keys(self, k: Tensor, new: NewKeys) -> Tensor:
        """b (b, g, m, r), -inf for padding."""
        b = self._features(k, new.scale)
        return b if new.keep is None else b.masked_fill(~new.keep[:, None, new.before : new.n, None], -math.inf)

    def write(self, k: Tensor, v: Tensor, new: NewKeys) -> None:
        b = self._keys(k, new)
        mass = torch.logaddexp(self.mass, b.logsumexp(-2))
        known = torch.where(mass.isinf(), 0.0, mass)  # no real key yet
        self.means = self.means * (self.mass - known).exp().unsqueeze(-1)
        self.means += (b - known.unsqueeze(-2)).exp().mT @ v.to(self.means.dtype)
        self.mass = mass

    def attend(self, q: Tensor, k: Tensor, v: Tensor, new: NewKeys) -> Tensor:
        """P v (b, h, m, d) of new queries (b, h, m, k); also writes the new keys."""
        a = self._features(q, new.scale).softmax(-1).unflatten(1, (k.shape[1], -1))  # (b, g, shared, m, r)
        parts = []
        for start in range(0, q.shape[2], self.ROWS):
            rows = slice(start, min(start + self.ROWS, q.shape[2]))
            own = new.up_to(new.before + rows.stop, new.before + start)
            b = self._keys(k[:, :, rows], own).mT  # (b, g, r, rows)
            mass = torch.logaddexp(self.mass.unsqueeze(-1), b.logcumsumexp(-1))
            mass = torch.where(mass.isinf(), 0.0, mass)
            weights = (b.unsqueeze(-2) - mass.unsqueeze(-1)).exp().tril()
            old = (self.mass.unsqueeze(-1) - mass).exp().unsqueeze(-1)
            means = weights @ v[:, :, rows].to(old.dtype).unsqueeze(2) + old * self.means.unsqueeze(-2)
            parts.append(torch.einsum("bgsmr,bgrmd->bgsmd", a[:, :, :, rows], means).flatten(1, 2))
            self.write(k[:, :, rows], v[:, :, rows], own)
        return torch.cat(parts, 2).to(v.dtype)

    def crop(self, count: int) -> None:
        raise AssertionError("check_crop raises")

    def check_crop(self, count: int) -> None:
        raise UnsupportedError(
            f"crop: {self.choice} keeps sums over the keys, from which none can be taken back; use "
            "HeadCache(model, keep_all=True)"
        )

    def select(self, index: Tensor) -> None:
        self.mass, self.means = (x.index_select(0, index) for x in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.mass, self.means]
