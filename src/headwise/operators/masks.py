"""M_ij = 1 where query i may look at key j: the masks of the averages, kept in the form they came in.

C_i = sum_j M_ij, the number of keys that row i averages over, costs O(m + n) unless an m x n mask was given.
Causal is aligned to the bottom right (the last query sees the last key): M_ij = 0 for j > i + n - m.  Such a matrix is
a rectangle beside a square triangle: the first n - m keys are seen by every query, the first m - n queries see nothing,
and min(m, n) queries remain against as many keys, each seeing its own and those before.  An operator that can do the
rectangle and the triangle can do any causal shape, and its transpose (`causal_apply`, `causal_adjoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import DtypeError, ShapeError
from headwise.shapes import broadcasts_to, filled, same_axis


@final
@dataclass(frozen=True, eq=False)
class Visibility:
    """Which of n keys each of m queries may see.  True means visible, in `key_mask` and in `pair_mask` alike."""

    m: int
    n: int
    causal: bool = False
    key_mask: Tensor | None = None  # (*batch, n)
    pair_mask: Tensor | None = None  # broadcasts to (*batch, m, n)

    @property
    def batch(self) -> torch.Size:
        padded = () if self.key_mask is None else self.key_mask.shape[:-1]
        masked = () if self.pair_mask is None else self.pair_mask.shape[:-2]
        return torch.broadcast_shapes(padded, masked)

    @property
    def overlap(self) -> int:
        """Length of the causal square: the last min(m, n) queries against as many last keys."""
        return min(self.m, self.n)

    def counts(self, device: torch.device) -> Tensor:
        """C: (*batch, m)"""
        if self.pair_mask is not None:
            return self.rows(0, self.m, device).sum(-1)
        if not self.causal:
            seen = (
                torch.tensor([self.n], device=device) if self.key_mask is None else self.key_mask.sum(-1, keepdim=True)
            )
            return seen.expand(*self.batch, self.m)
        reach = (torch.arange(self.m, device=device) + (self.n - self.m + 1)).clamp(min=0)
        if self.key_mask is None:
            return reach
        return torch.nn.functional.pad(self.key_mask.cumsum(-1), (1, 0)).index_select(-1, reach)

    def rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        """M for queries start..stop: (*batch, stop - start, n)"""
        seen = torch.ones(stop - start, self.n, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen.tril(start + self.n - self.m)
        if self.pair_mask is not None:
            seen = seen & (self.pair_mask if self.pair_mask.shape[-2] == 1 else self.pair_mask[..., start:stop, :])
        return seen if self.key_mask is None else seen & self.key_mask.unsqueeze(-2)

    def hide(self, x: Tensor) -> Tensor:
        """Rows of padded keys set to zero, whatever they hold: (*batch, n, d) -> (*batch, n, d)"""
        return x if self.key_mask is None else x.masked_fill(~self.key_mask.unsqueeze(-1), 0)

    def average(self, u: Tensor) -> Tensor:
        """u_i / C_i: (*batch, m, d) -> (*batch, m, d).  A row that sees nothing is left alone: it is zero already."""
        return u / self.counts(u.device).clamp(min=1).to(u.dtype).unsqueeze(-1)

    def leaves_no_row_empty(self) -> bool:
        device = next((x.device for x in (self.key_mask, self.pair_mask) if x is not None), torch.device("cpu"))
        return bool((self.counts(device) > 0).all())


def visibility(
    owner: str,
    m: int,
    n: int,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    batch: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Visibility:
    """A checked Visibility.  Masks have to broadcast to `batch` and be on `device` where these are given.

    A padding (b, n) against a batch (b, h) is shared by the heads, as in `softmax`.
    """
    for name, x in (("key_mask", key_mask), ("pair_mask", pair_mask)):
        if x is not None and x.dtype != torch.bool:
            raise DtypeError(f"{owner}: {name} must be boolean, True where a key may be seen, but is {x.dtype}")
        if x is not None and device is not None and x.device != device:
            raise DtypeError(f"{owner}: {name} is on {x.device}, the rest on {device}; move one with .to(device)")
    if key_mask is not None:
        same_axis(owner, "n", keys=n, key_mask=key_mask.shape[-1] if key_mask.dim() else 0)
        if batch is not None:
            key_mask = share_between_heads(key_mask, batch)
            broadcasts_to(owner, "key_mask", key_mask, (*batch, n))
    if pair_mask is not None:
        if pair_mask.dim() < 2 or pair_mask.shape[-2] not in (1, m) or pair_mask.shape[-1] not in (1, n):
            seen = tuple(pair_mask.shape)
            raise ShapeError(f"{owner}: mask has shape {seen}, which does not broadcast to (*batch, m = {m}, n = {n})")
        if batch is not None:
            broadcasts_to(owner, "pair_mask", pair_mask, (*batch, m, n))
    return Visibility(m, n, causal, key_mask, pair_mask)


def share_between_heads(key_mask: Tensor, batch: Sequence[int]) -> Tensor:
    """Axes of size one put before the last: (b, n) against a batch (b, h) is (b, 1, n); (n,) stays as it is."""
    missing = len(batch) - (key_mask.dim() - 1)
    if key_mask.dim() < 2 or missing <= 0:
        return key_mask
    return key_mask.reshape(*key_mask.shape[:-1], *(1,) * missing, key_mask.shape[-1])


Part = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(a, b, v) -> sum_j f(a_i, b_j) v_j over all j, or over j <= i: rows a (*batch, m, k), b (*batch, n, k)."""


def causal_apply(rectangle: Part, triangle: Part, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """sum over j <= i + n - m of f(a_i, b_j) v_j: (*batch, n, d) -> (*batch, m, d)"""
    ahead, silent = _overhang(a, b)
    out = triangle(a[..., silent:, :], b[..., ahead:, :], v[..., ahead:, :])
    if ahead:
        out = out + rectangle(a, b[..., :ahead, :], v[..., :ahead, :])
    return filled(out, (0, 0, silent, 0))


def causal_adjoint(rectangle: Part, triangle: Part, a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """sum over i >= j - n + m of f(b_j, a_i) u_i: (*batch, m, d) -> (*batch, n, d), for f of which the order of the
    arguments does not matter.  The transpose of a triangle is the triangle of both sequences reversed."""
    ahead, silent = _overhang(a, b)
    backwards = (b[..., ahead:, :].flip(-2), a[..., silent:, :].flip(-2), u[..., silent:, :].flip(-2))
    out = triangle(*backwards).flip(-2)
    return torch.cat([rectangle(b[..., :ahead, :], a, u), out], dim=-2) if ahead else out


def _overhang(a: Tensor, b: Tensor) -> tuple[int, int]:
    m, n = a.shape[-2], b.shape[-2]
    return max(0, n - m), max(0, m - n)
