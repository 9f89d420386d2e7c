"""Which positions of a sequence each rank holds, and rows fetched from where they are held.

Contiguous slices of any lengths, in the order of the ranks; or zig-zag, where a rank holds one part from the front and
one from the back, so that under a causal mask every rank has about as many pairs to compute:

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2        zig-zag   0 0 1 1 2 2 2 2 1 1 0 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from headwise.distributed.collectives import Ranks, exchange, nothing_of, tied
from headwise.errors import ShapeError
from headwise.shapes import truth_values, whole_numbers, whole_tuple


@final
@dataclass(frozen=True)
class Slices:
    """How n = sum(lengths) positions are held by len(lengths) ranks.

    >>> Slices((4, 2), zigzag=True).segments(0), Slices((4, 2), zigzag=True).segments(1)
    (((0, 2), (4, 6)), ((2, 3), (3, 4)))
    >>> Slices.even(7, 2).lengths
    (4, 3)
    """

    lengths: tuple[int, ...]
    zigzag: bool = False

    def __post_init__(self) -> None:
        whole_tuple("Slices", "lengths", self.lengths, least=0)
        truth_values("Slices", zigzag=self.zigzag)
        if not self.lengths:
            raise ShapeError("Slices: lengths has no entry; give one length for each rank")

    @classmethod
    def even(cls, n: int, ranks: int, *, zigzag: bool = False) -> Slices:
        """n positions on `ranks` ranks, the first ones holding one more if they do not divide."""
        whole_numbers("Slices", least=0, n=n)
        whole_numbers("Slices", ranks=ranks)
        return cls(tuple(n // ranks + (rank < n % ranks) for rank in range(ranks)), zigzag)

    @property
    def n(self) -> int:
        return sum(self.lengths)

    def segments(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the parts that a rank holds, in the order in which it holds them."""
        if not self.zigzag:
            start = sum(self.lengths[:rank])
            return ((start, start + self.lengths[rank]),)
        fronts = [-(-length // 2) for length in self.lengths]
        front, back = sum(fronts[:rank]), self.n - sum(length // 2 for length in self.lengths[:rank])
        return (front, front + fronts[rank]), (back - self.lengths[rank] // 2, back)

    def positions(self, rank: int) -> Tensor:
        """The positions that a rank holds, (lengths[rank],)."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.segments(rank)])

    def cut(self, x: Tensor, rank: int, dim: int = -2) -> Tensor:
        """The part of x that a rank holds, x the whole sequence along `dim`."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.segments(rank)], dim=dim)

    def split(self, x: Tensor, rank: int, dim: int = -2) -> tuple[Tensor, ...]:
        """x (*batch, lengths[rank], c) cut into the rank's segments."""
        segments = self.segments(rank)
        # one part is x itself: the gradient of a split would be a copy
        return x.split([stop - start for start, stop in segments], dim=dim) if len(segments) > 1 else (x,)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds each position, and the row at which it does."""
        parts = []
        for rank in range(len(self.lengths)):
            row = 0
            for start, stop in self.segments(rank):
                if stop > start:
                    parts.append((start, rank, row))
                row += stop - start
        if not len(positions):
            return positions.clone(), positions.clone()
        starts, owners, rows = (torch.tensor(column) for column in zip(*sorted(parts), strict=True))
        at = torch.searchsorted(starts, positions, right=True) - 1
        return owners[at], positions - starts[at] + rows[at]

    def in_sequence(self, x: Tensor, dim: int = -2) -> Tensor:
        """x with the rows of rank 0, rank 1, ... put into the order of the sequence."""
        if not self.zigzag:
            return x
        order = torch.cat([self.positions(rank) for rank in range(len(self.lengths))])
        return x.index_select(dim, order.argsort().to(x.device))

    def by_rank(self, x: Tensor, dim: int = -2) -> Tensor:
        """The inverse: the rows of a sequence in the order of the ranks."""
        if not self.zigzag:
            return x
        order = torch.cat([self.positions(rank) for rank in range(len(self.lengths))])
        return x.index_select(dim, order.to(x.device))


class Layout(Protocol):
    """Rows held by the ranks: how many by each, and where; `Slices`, or rows that are dealt out otherwise."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds each row, and the place at which it does."""
        ...


MANY_RUNS = 64
"""From so many runs of rows on, gathering row by row costs less than a copy of each run."""


def fetch(tensors: Sequence[Tensor], held: Layout, wanted: Callable[[int], Tensor], ranks: Ranks) -> list[Tensor]:
    """Rows at the positions wanted(rank), which every rank knows of every other, of tensors (*batch, n, c).

    One exchange for all tensors, which must share their dtype; their batch axes may differ.  Rows are sent in that
    dtype; gradients of a row that several ranks want are added in float32 or better, and rounded once.
    """
    own, n = wanted(ranks.rank), held.lengths[ranks.rank]
    owners, rows = held.locate(own)
    elsewhere = (owners != ranks.rank).nonzero().flatten()
    elsewhere = elsewhere[owners[elsewhere].argsort(stable=True)]  # in the order in which they arrive
    rows[elsewhere] = torch.arange(n, n + len(elsewhere))
    receive = torch.bincount(owners[elsewhere], minlength=ranks.size).tolist()
    sent = []
    for rank in range(ranks.size):
        owner, row = held.locate(wanted(rank) if rank != ranks.rank else own[:0])
        sent.append(row[owner == ranks.rank])
    dtype = tensors[0].dtype
    tensors = [x.to(torch.promote_types(dtype, torch.float32)) if x.is_floating_point() else x for x in tensors]
    given = [_rows(torch.cat(sent), x).to(dtype).movedim(-2, 0) for x in tensors]
    sizes = [x.shape[1:].numel() for x in given]
    flat = torch.cat([x.reshape(x.shape[0], size) for x, size in zip(given, sizes, strict=True)], dim=1)
    parts = exchange(flat, [len(row) for row in sent], receive, ranks).split(sizes, dim=1)
    got = [y.reshape(y.shape[0], *x.shape[1:]).movedim(0, -2) for x, y in zip(given, parts, strict=True)]
    return [tied(_rows(rows, x, y.to(x)).to(dtype), y) for x, y in zip(tensors, got, strict=True)]


def _rows(index: Tensor, *tensors: Tensor) -> Tensor:
    """Rows of the tensors (*batch, n, c), one behind the other: runs of neighbours are copied whole, or not at all."""
    starts = torch.tensor([0, *(x.shape[-2] for x in tensors)]).cumsum(0)
    first = torch.cat([index[:1] >= 0, (index.diff() != 1) | torch.isin(index[1:], starts)]).nonzero().flatten()
    if len(first) >= MANY_RUNS:
        return torch.cat(tensors, dim=-2).index_select(-2, index.to(tensors[0].device))
    held = torch.searchsorted(starts, index[first], right=True) - 1
    lengths = torch.cat([first, first.new_tensor([len(index)])]).diff()
    runs = list(zip(held.tolist(), (index[first] - starts[held]).tolist(), lengths.tolist(), strict=True))
    if len(runs) == 1 and runs[0][1:] == (0, tensors[runs[0][0]].shape[-2]):
        return tensors[runs[0][0]]
    return _Runs.apply(runs, *tensors)  # type: ignore[return-value]


class _Runs(torch.autograd.Function):
    """Some rows of tensors, as runs (tensor, start, length): the gradient of each tensor is made once."""

    @staticmethod
    def forward(ctx: Any, runs: Sequence[tuple[int, int, int]], *tensors: Tensor) -> Tensor:
        ctx.runs, ctx.shapes = runs, [x.shape for x in tensors]
        parts = [tensors[held].narrow(-2, start, length) for held, start, length in runs]
        return torch.cat(parts, dim=-2) if parts else tensors[0].narrow(-2, 0, 0).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        found, row = [gradients[0].new_zeros(shape) for shape in ctx.shapes], 0
        for held, start, length in ctx.runs:
            found[held].narrow(-2, start, length).add_(gradients[0].narrow(-2, row, length))
            row += length
        read, nothing = {held for held, *_ in ctx.runs}, nothing_of(gradients[0])
        return None, *(x if held in read else nothing.expand(x.shape) for held, x in enumerate(found))


def fetch_mask(mask: Tensor | None, held: Layout, wanted: Callable[[int], Tensor], ranks: Ranks) -> Tensor | None:
    """The same of a key mask (*batch, n), one byte a position; None stays None."""
    if mask is None:
        return None
    return fetch([mask.to(torch.uint8).unsqueeze(-1)], held, wanted, ranks)[0].squeeze(-1).bool()


def empty_rows(like: Tensor, batch: Sequence[int], width: int, *others: Tensor) -> Tensor:
    """No rows (*batch, 0, width), tied to the collectives that `others` came from."""
    return tied(like.new_zeros(*batch, 0, width), *others)
