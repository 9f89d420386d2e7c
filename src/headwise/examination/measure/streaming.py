"""One pass over blocks of rows of P that gathers the sums from which the measures of a head are computed.

For E = exp(S - max) and Z = E 1, a block of rows gives in a few sweeps

    H_i        = log Z_i + sum_j E_ij (max_i - S_ij) / Z_i        entropy; all terms positive, so no cancellation
    ||P_i||^2  = sum_j E_ij^2 / Z_i^2
    t_delta    = sum_i P_(i, i+delta)                             every diagonal at once, by a skewed view of the block
    c_j        = sum_i P_ij                                       what key j receives
    O          = P V

At most `limits.CACHE_ENTRIES` entries of P exist at a time.  A query that attends to no key has a row of zeros.  The
compiled kernel `head_statistics` gathers the same where it is usable.  `head_measures` makes numbers of the sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.operators._kernels import limits
from headwise.operators._kernels.native.head_statistics import head_statistics
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask

REACH = 64
"""Largest offset |j - i| of the profile."""

ROWS = 64
"""Least rows of P in a block, unless a single head of them is larger than the workspace."""

SAMPLED_ROWS = 32
"""Query rows kept of every head, evenly spaced, to compare heads with one another."""

LARGE_SCORES = 1e3
"""Beyond this bound of |S|, single precision rounds a score by more than 3e-5, and P by as much: S is then computed in
float64 until the maximum of its row is subtracted."""

SKETCH = 512
"""Columns to which longer sampled rows are hashed."""


@dataclass(frozen=True, eq=False)
class HeadSums:
    """What one pass over P gathers of the h heads of one attention call on one text; the input of measures."""

    entropy: Tensor  # (h, m) H_i
    row_maximum: Tensor  # (h, m) max_j P_ij
    row_squares: Tensor  # (h, m) sum_j P_ij^2
    log_sum_exp: Tensor  # (h, m) log sum_j exp S_ij, so that P_ij = exp(S_ij - log_sum_exp_i); -inf without keys
    largest_score: Tensor  # (h,) max_ij S_ij
    received: Tensor  # (h, n) c_j / m, the mean weight that key j receives
    diagonals: Tensor  # (h, last + n) t_delta for delta = -last ... n - 1, float64; last is the last of `positions`
    visible: Tensor  # (h, m) number of keys that query i may attend to
    output: Tensor  # (h, m, d) P V
    values: Tensor  # (h, n, d) V
    sampled_rows: Tensor  # (h, <= SAMPLED_ROWS, <= SKETCH) rows of P
    positions: Tensor  # (m,) ascending: where on the axis of keys each query stands; 0, 1, ... unless some are left out

    @property
    def m(self) -> int:
        return self.entropy.shape[-1]

    @property
    def n(self) -> int:
        return self.received.shape[-1]

    @cached_property
    def frobenius_squared(self) -> Tensor:
        """(h,) ||P||_F^2"""
        return self.row_squares.double().sum(-1)

    @property
    def last(self) -> int:
        """The position of the last query: the index of offset 0 in `diagonals`."""
        return self.diagonals.shape[-1] - self.n

    @cached_property
    def offsets(self) -> Tensor:
        """(last + n,) the offset j - i of every diagonal, i the position of the query."""
        return torch.arange(-self.last, self.n, dtype=torch.float64)

    @cached_property
    def offset_mass(self) -> Tensor:
        """(h, last + n) t_delta / m: the mean weight at every offset; sums to 1."""
        return self.diagonals / self.m

    @cached_property
    def diagonal_energy(self) -> Tensor:
        """(h, last + n) t_delta^2 / length: what the best constant on each diagonal explains of ||P||_F^2."""
        queries = self.positions.double()
        # the diagonal of offset delta has an entry for each query at -delta ... n - 1 - delta
        lengths = torch.searchsorted(queries, self.n - self.offsets) - torch.searchsorted(queries, -self.offsets)
        return self.diagonals.square() / lengths.clamp(min=1)

    def ranked_entropy(self, rank: int) -> Tensor:
        """(h,) the H_i that has `rank` smaller ones; for a few of them, faster than a sort."""
        return self.entropy.kthvalue(rank + 1, dim=-1).values

    def mass_at(self, offset: int) -> Tensor:
        """(h,) mean weight at one offset; zero if no pair of tokens is that far apart."""
        index = self.last + offset
        inside = 0 <= index < self.offset_mass.shape[-1]
        return self.offset_mass[:, index] if inside else self.offset_mass.new_zeros(len(self.offset_mass))

    def mass_within(self, width: int) -> Tensor:
        """(h,) mean weight at offsets -width ... width."""
        return self.offset_mass[:, max(0, self.last - width) : self.last + width + 1].sum(-1)

    def profile(self) -> Tensor:
        """(h, 2 REACH + 1) mean weight at offsets -REACH ... REACH."""
        return F.pad(self.offset_mass, (REACH - self.last, REACH + 1 - self.n))  # a negative number cuts off


def _empty(*shape: int) -> Tensor:
    """Single precision, whatever the default dtype of the process is."""
    return torch.empty(*shape, dtype=torch.float32)


class Workspace:
    """The three blocks of at most `entries` numbers that `stream` works in, reused from call to call.

    Measured on twelve heads of 512 tokens: allocating them anew took as long as the arithmetic.
    """

    def __init__(self, entries: int = limits.CACHE_ENTRIES) -> None:
        self.entries = entries
        self._flat, self._skew, self._layout = _empty(2, 0), _empty(0), (0, 0, 0)

    def two_blocks(self, h: int, rows: int, columns: int) -> Tensor:
        """Uninitialised (2, h, rows, columns)."""
        size = h * rows * columns
        if self._flat.shape[1] < size:
            self._flat = _empty(2, size)
        return self._flat[:, :size].view(2, h, rows, columns)

    def skewed_block(self, h: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """A block between zeros, and the same memory with one more step a row, so that diagonals become columns."""
        width = columns + rows
        size = rows * width + rows
        if len(self._skew) < h * size:
            self._skew = _empty(h * size)
        if self._layout != (h, rows, columns):
            self._layout = (h, rows, columns)
            self._skew[: h * size].zero_()
        block = self._skew.as_strided((h, rows, columns), (size, width, 1), rows)
        return block, self._skew.as_strided((h, rows, width - 1), (size, width + 1, 1), 1)


def stream(
    scores: Scores, v: Tensor, *, positions: Tensor | None = None, workspace: Workspace | None = None
) -> HeadSums:
    """The sums of one text: q (h, m, k), k (h, n, k), v (h, n, d).

    positions  (m,) ascending: where on the axis of keys each query stands; default 0 ... m - 1
    """
    v = v.float().contiguous()
    scores = Scores(scores.q.float(), scores.k.float(), scores.scale, scores.mask)
    m = scores.m
    positions = torch.arange(m) if positions is None else positions.cpu()
    sampled = torch.linspace(0, m - 1, min(SAMPLED_ROWS, m)).round().long()
    side_by_side = int(positions[-1] - positions[0]) == m - 1
    found = head_statistics(scores, v, sampled) if side_by_side and not _large(scores) else None
    if found is None:
        return _stream(scores, v, positions, sampled.tolist(), workspace or Workspace())
    return HeadSums(
        entropy=found.entropy,
        row_maximum=found.row_maximum,
        row_squares=found.row_squares,
        log_sum_exp=found.log_sum_exp,
        largest_score=found.peak.amax(-1),
        received=(found.received / m).float(),
        diagonals=F.pad(found.diagonals, (0, int(positions[0]))),
        visible=scores.mask.counts().float().expand(scores.shape[:-1]),
        output=found.output,
        values=v,
        sampled_rows=_sketched(found.sample),
        positions=positions,
    )


def _stream(scores: Scores, v: Tensor, positions: Tensor, sampled: list[int], workspace: Workspace) -> HeadSums:
    """The same from torch calls: fewer heads at a time if the text is long.

    Every block of rows reads all keys and values, whatever its height.
    """
    h, _, n = scores.shape
    together = max(1, min(h, workspace.entries // (ROWS * n)))
    parts = [
        _stream_heads(
            _heads(scores, first, first + together), v[first : first + together], positions, sampled, workspace
        )
        for first in range(0, h, together)
    ]
    if len(parts) == 1:
        return parts[0]
    each = [field.name for field in fields(HeadSums) if field.name != "positions"]
    return HeadSums(**{name: torch.cat([getattr(x, name) for x in parts]) for name in each}, positions=positions)


def _large(scores: Scores) -> bool:
    """Whether |S| <= scale max ||q_i|| max ||k_j|| is beyond LARGE_SCORES."""
    longest = [torch.linalg.vector_norm(x, dim=-1).amax().item() for x in (scores.q, scores.k)]
    return abs(scores.scale) * longest[0] * longest[1] > LARGE_SCORES


def _heads(scores: Scores, first: int, stop: int) -> Scores:
    """The scores of heads first:stop."""

    def cut(x: Tensor | None, axes: int) -> Tensor | None:
        return x if x is None or x.dim() < axes or len(x) == 1 else x[first:stop]

    mask = scores.mask
    mask = replace(
        mask, key_mask=cut(mask.key_mask, 2), pair_mask=cut(mask.pair_mask, 3), attn_bias=cut(mask.attn_bias, 3)
    )
    return Scores(scores.q[first:stop], scores.k[first:stop], scores.scale, mask)


def _stream_heads(scores: Scores, v: Tensor, positions: Tensor, sampled: list[int], workspace: Workspace) -> HeadSums:
    large = _large(scores)
    q, k = (x.double() if large else x for x in (scores.q, scores.k.contiguous()))
    mask, (h, m, n) = scores.mask, scores.shape
    some_empty = mask.visible is not None or mask.attn_bias is not None or (mask.ahead or 0) < 0
    peak, z, dot, norm, visible = (_empty(h, m) for _ in range(5))
    last = int(positions[-1])
    received, diagonals = v.new_zeros(h, n), v.new_zeros(h, last + n)
    output, sample = _empty(h, m, v.shape[-1]), v.new_zeros(h, len(sampled), n)
    for start, stop in _blocks(positions, max(1, workspace.entries // (h * n))):
        rows, block = stop - start, slice(start, stop)
        columns = n if mask.ahead is None else max(1, min(stop + mask.ahead, n))  # no query attends beyond
        s, e = workspace.two_blocks(h, rows, columns)
        p, skewed = workspace.skewed_block(h, rows, columns)
        precise = s.double() if large else s
        torch.baddbmm(precise, q[:, block], k[:, :columns].mT, beta=0, alpha=scores.scale, out=precise)
        visible[:, block] = _hide(precise, mask, start)
        peak[:, block] = highest = precise.amax(-1)
        precise.sub_(highest.unsqueeze(-1))
        torch.exp(s.copy_(precise) if large else s, out=e)
        if some_empty:
            e.masked_fill_((highest <= limits.HIDDEN).unsqueeze(-1), 0)
        z[:, block] = total = e.sum(-1).clamp_(min=1)  # it is at least 1, or a row of zeros
        dot[:, block] = s.mul_(e).sum(-1)
        norm[:, block] = torch.linalg.vector_norm(e, dim=-1)
        output[:, block] = e @ v[:, :columns]
        torch.div(e, total.unsqueeze(-1), out=p)
        received[:, :columns] += p.sum(-2)
        first = last - int(positions[stop - 1])  # the block's lowest diagonal is that of its last query
        diagonals[:, first : first + rows + columns - 1] += skewed.sum(-2)
        for place, i in enumerate(sampled):
            if start <= i < stop:
                sample[:, place, :columns] = p[:, i - start]
    empty = peak <= limits.HIDDEN
    return HeadSums(
        entropy=z.log() - dot / z,
        row_maximum=(1 / z).masked_fill_(empty, 0),
        row_squares=(norm / z).square(),
        log_sum_exp=(peak + z.log()).masked_fill_(empty, -math.inf),
        largest_score=peak.amax(-1),
        received=received / m,
        diagonals=diagonals.double(),
        visible=visible,
        output=output.div_(z.unsqueeze(-1)),
        values=v,
        sampled_rows=_sketched(sample),
        positions=positions,
    )


def _blocks(positions: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of at most `most` queries that stand side by side."""
    gaps = ((positions[1:] - positions[:-1] != 1).nonzero().flatten() + 1).tolist()
    for first, last in itertools.pairwise([0, *gaps, len(positions)]):
        step = math.ceil((last - first) / math.ceil((last - first) / most))
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _hide(s: Tensor, mask: Mask, start: int) -> Tensor:
    """Apply the mask to scores s (h, rows, columns) of queries start ...; the number of visible keys of each query.

    Hidden scores are finite: -inf would give NaN where it is multiplied by an exponential of zero.
    """
    rows, columns = s.shape[-2:]
    if mask.visible is not None or mask.attn_bias is not None:
        block = mask.part(start, start + rows, s.device)
        if block.attn_bias is not None:
            s.add_(block.attn_bias).clamp_(min=limits.HIDDEN)
        if block.visible is not None:
            s.masked_fill_(~block.visible, limits.HIDDEN)
        return block.counts()
    if mask.ahead is None:
        return torch.full((rows,), columns)
    # only the last columns have hidden entries: key j is hidden from query i if j > i + ahead
    first = max(0, start + mask.ahead + 1)
    hidden = torch.ones(rows, columns - first, dtype=torch.bool).triu(start + mask.ahead + 1 - first)
    s[..., first:].masked_fill_(hidden, limits.HIDDEN)
    return (torch.arange(start, start + rows) + (mask.ahead + 1)).clamp(0, columns)


def _sketched(sample: Tensor) -> Tensor:
    """Rows longer than SKETCH by a CountSketch with a fixed seed: inner products of rows keep their expected value."""
    n = sample.shape[-1]
    if n <= SKETCH:
        return sample
    generator = torch.Generator().manual_seed(0)
    slot = torch.randint(SKETCH, (n,), generator=generator)
    sign = torch.randint(2, (n,), generator=generator) * 2.0 - 1
    return sample.new_zeros(*sample.shape[:-1], SKETCH).index_add_(-1, slot, sample * sign)
