"""`strided`: every rank computes the columns of some residues, and the near keys of its own queries.

    columns    q, k and v of all positions of its residues, and rows back:  N (P-1)/P^2 (2 k + 2 d + 1) scalars
    band       a halo of stride - 1 positions on both sides:                2 (stride - 1) (k + d), causal half

The positions with the residues first .. first + c modulo `stride` are a sequence with the stride c.  Both parts are one
softmax: a row of a column comes back with its log-sum-exp.  `strided_steps` has columns alone, rows without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from headwise.distributed.collectives import tied
from headwise.distributed.exchanges import Call, NoExchange, local_rows
from headwise.distributed.fetched_keys import pattern_of, union_over
from headwise.distributed.slices import Slices, empty_rows, fetch, fetch_mask
from headwise.operators._kernels.key_patterns import KeyPattern
from headwise.operators._kernels.rows_with_lse import rows_with_lse
from headwise.operators._kernels.sparse_blocks import Piece
from headwise.operators.sparse.strided import Strided, columns
from headwise.operators.sparse.window import band


@final
@dataclass(frozen=True)
class Columns:
    """n positions dealt out to the ranks by their residues modulo `stride`, contiguous even ranges of residues.

    >>> Columns(7, 3, 2).positions(0), Columns(7, 3, 2).lengths
    (tensor([0, 1, 3, 4, 6]), (5, 2))
    """

    n: int
    stride: int
    ranks: int

    @property
    def residues(self) -> Slices:
        return Slices.even(self.stride, self.ranks)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.count(rank, 0, self.n) for rank in range(self.ranks))

    def count(self, rank: int, start: int, stop: int) -> int:
        """How many of the positions start..stop are in the columns of a rank."""
        ((first, last),) = self.residues.segments(rank)

        def up_to(position: int) -> int:
            rows, residue = divmod(position, self.stride)
            return rows * (last - first) + min(max(residue - first, 0), last - first)

        return up_to(stop) - up_to(start)

    def positions(self, rank: int) -> Tensor:
        """All positions in the columns of a rank, in the order of the sequence."""
        found = torch.arange(0, self.n, self.stride).unsqueeze(-1) + self.residues.positions(rank)
        return found[found < self.n]

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that has each position in its columns, and the row at which it does."""
        owners, place = self.residues.locate(positions % self.stride)
        return owners, positions // self.stride * torch.tensor(self.residues.lengths)[owners] + place


@local_rows.register
def _(operator: Strided, call: Call, v: Tensor) -> Tensor:
    """N (P-1)/P^2 (2 k + 2 d + 1) scalars for the columns, (stride - 1) (k + d) on each side for the band."""
    if not call.square:
        raise NoExchange("Strided: queries and keys are sliced differently")
    dealt, own = Columns(call.keys.n, operator.stride, call.ranks.size), call.queries.positions
    q, k, values = fetch([call.q, call.k, v], call.keys, dealt.positions, call.ranks)
    mask = fetch_mask(call.key_mask, call.keys, dealt.positions, call.ranks)
    residues = dealt.residues.lengths[call.rank]
    if q.shape[-2]:
        pieces = partial(columns, q.shape[-2], residues, operator.causal)
        pattern = KeyPattern(-1, -1, stride=residues)
        union = union_over(q, k, operator.union.scale, mask, pieces, pattern, operator.causal)
        rows = rows_with_lse(union, values)
    else:
        rows = _no_rows(operator, v, q, k, values)
    if not has_band(operator):
        return fetch([rows[..., :-1]], dealt, own, call.ranks)[0].to(v.dtype)
    (far,) = fetch([rows], dealt, own, call.ranks)
    both = torch.stack([far, _band_rows(operator, call, v)])
    return (torch.softmax(both[..., -1:], dim=0) * both[..., :-1]).sum(0).to(v.dtype)


def has_band(operator: Strided) -> bool:
    """Whether there are near keys besides the columns."""
    return pattern_of(operator.union).left > 0 and operator.stride > 1


def _band_rows(operator: Strided, call: Call, v: Tensor) -> Tensor:
    """Keys with 0 < |i - j| < stride, and log-sum-exps; causal, those before the query."""
    reach, n = operator.stride - 1, call.keys.n
    ahead = 0 if operator.causal else reach

    def halo(start: int, stop: int) -> tuple[int, int]:
        return (max(0, start - reach), min(n, stop + ahead)) if stop > start else (start, start)

    def wanted(rank: int) -> Tensor:
        return torch.cat([torch.arange(*halo(*segment)) for segment in call.queries.segments(rank)])

    k, values = fetch([call.k, v], call.keys, wanted, call.ranks)
    mask = fetch_mask(call.key_mask, call.keys, wanted, call.ranks)
    segments = call.queries.segments(call.rank)
    out, offset = [], 0
    for q, (start, stop) in zip(call.queries.split(call.q, call.rank), segments, strict=True):
        left, right = halo(start, stop)
        part = slice(offset, offset + right - left)
        offset += right - left
        if stop == start:
            continue
        behind = right - stop  # the last query counts as one at the last key
        pieces = partial(_band_pieces, stop - start, right - left, reach + behind, ahead - behind, behind, q.device)
        some = None if mask is None else mask[..., part]
        union = union_over(q, k[..., part, :], operator.union.scale, some, pieces, None, operator.causal)
        out.append(rows_with_lse(union, values[..., part, :]))
    if not out:
        return _no_rows(operator, v, k, values)
    return tied(torch.cat(out, dim=-2), k, values)


def _no_rows(operator: Strided, v: Tensor, *fetched: Tensor) -> Tensor:
    compute = torch.promote_types(v.dtype, torch.float32)
    batch = torch.broadcast_shapes(operator.shape[:-2], v.shape[:-2])
    return empty_rows(v.to(compute), batch, v.shape[-1] + 1, *fetched)


def _band_pieces(m: int, n: int, before: int, after: int, behind: int, device: torch.device) -> list[Piece]:
    """The last m of n positions against their neighbours, each query `behind` places before its own in the band."""
    first = n - m
    return band(m, n, before, after, start=first, bands=min(n, max(first, before)), hidden=behind, device=device)
