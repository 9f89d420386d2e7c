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

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.operators._kernels import limits
from headwise.operators._kernels.native.head_statistics import head_statistics
from headwise.operators._kernels.scores import Scores

REACH = 64
"""Largest offset |j - i| of the profile."""

SAMPLED_ROWS = 32
"""Query rows kept of every head, evenly spaced, to compare heads with one another."""

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
    diagonals: Tensor  # (h, m + n - 1) t_delta for delta = -(m - 1) ... n - 1, float64
    visible: Tensor  # (h, m) number of keys that query i may attend to
    output: Tensor  # (h, m, d) P V
    values: Tensor  # (h, n, d) V
    sampled_rows: Tensor  # (h, <= SAMPLED_ROWS, <= SKETCH) rows of P

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

    @cached_property
    def offsets(self) -> Tensor:
        """(m + n - 1,) the offset j - i of every diagonal."""
        return torch.arange(-(self.m - 1), self.n, dtype=torch.float64)

    @cached_property
    def offset_mass(self) -> Tensor:
        """(h, m + n - 1) t_delta / m: the mean weight at every offset; sums to 1."""
        return self.diagonals / self.m

    @cached_property
    def diagonal_energy(self) -> Tensor:
        """(h, m + n - 1) t_delta^2 / length: what the best constant on each diagonal explains of ||P||_F^2."""
        lengths = torch.minimum(self.offsets + self.m, self.n - self.offsets)
        return self.diagonals.square() / lengths.clamp(max=float(min(self.m, self.n)))

    @cached_property
    def sorted_entropy(self) -> Tensor:
        """(h, m) H_i in ascending order, for quantiles."""
        return self.entropy.sort(-1).values

    def mass_at(self, offset: int) -> Tensor:
        """(h,) mean weight at one offset; zero if no pair of tokens is that far apart."""
        index = self.m - 1 + offset
        inside = 0 <= index < self.offset_mass.shape[-1]
        return self.offset_mass[:, index] if inside else self.offset_mass.new_zeros(len(self.offset_mass))

    def mass_within(self, width: int) -> Tensor:
        """(h,) mean weight at offsets -width ... width."""
        return self.offset_mass[:, max(0, self.m - 1 - width) : self.m + width].sum(-1)

    def profile(self) -> Tensor:
        """(h, 2 REACH + 1) mean weight at offsets -REACH ... REACH."""
        return F.pad(self.offset_mass, (REACH + 1 - self.m, REACH + 1 - self.n))  # a negative number cuts off


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


def stream(scores: Scores, v: Tensor, *, workspace: Workspace | None = None) -> HeadSums:
    """The sums of one text: q (h, m, k), k (h, n, k), v (h, n, d)."""
    v = v.float().contiguous()
    scores = Scores(scores.q.float(), scores.k.float(), scores.scale, scores.mask)
    m = scores.m
    sampled = torch.linspace(0, m - 1, min(SAMPLED_ROWS, m)).round().long()
    found = head_statistics(scores, v, sampled)
    if found is None:
        return _stream(scores, v, sampled.tolist(), workspace or Workspace())
    return HeadSums(
        entropy=found.entropy,
        row_maximum=found.row_maximum,
        row_squares=found.row_squares,
        log_sum_exp=found.log_sum_exp,
        largest_score=found.peak.amax(-1),
        received=(found.received / m).float(),
        diagonals=found.diagonals,
        visible=scores.mask.counts().float().expand(scores.shape[:-1]),
        output=found.output,
        values=v,
        sampled_rows=_sketched(found.sample),
    )


def _stream(scores: Scores, v: Tensor, sampled: list[int], workspace: Workspace) -> HeadSums:
    """The same from torch calls."""
    scores = Scores(scores.q, scores.k.contiguous(), scores.scale, scores.mask)
    h, m, n = scores.shape
    peak, z, dot, norm = (_empty(h, m) for _ in range(4))
    received, diagonals = v.new_zeros(h, n), v.new_zeros(h, m + n - 1)
    output, visible, sample = _empty(h, m, v.shape[-1]), _empty(h, m), v.new_zeros(h, len(sampled), n)
    blocks = math.ceil(m / max(1, min(m, workspace.entries // (h * n))))
    step = math.ceil(m / blocks)
    for start in range(0, m, step):
        stop = min(start + step, m)
        part, block = scores.rows(start, stop), slice(start, stop)
        rows, columns = stop - start, part.k.shape[-2]
        s, e = workspace.two_blocks(h, rows, columns)
        p, skewed = workspace.skewed_block(h, rows, columns)
        peak[:, block] = highest = _finite_scores(part, s).amax(-1)
        torch.exp(s.sub_(highest.unsqueeze(-1)), out=e)
        if part.mask.visible is not None or part.mask.attn_bias is not None:
            e.masked_fill_((highest <= limits.HIDDEN).unsqueeze(-1), 0)
        z[:, block] = total = e.sum(-1).clamp_(min=1)  # it is at least 1, or a row of zeros
        dot[:, block] = s.mul_(e).sum(-1)
        norm[:, block] = torch.linalg.vector_norm(e, dim=-1)
        output[:, block] = e @ v[:, :columns]
        torch.div(e, total.unsqueeze(-1), out=p)
        received[:, :columns] += p.sum(-2)
        first = m - stop  # the block's lowest diagonal, j - i = -(stop - 1), in the order of `diagonals`
        diagonals[:, first : first + rows + columns - 1] += skewed.sum(-2)
        visible[:, block] = part.mask.counts()
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
    )


def _finite_scores(part: Scores, out: Tensor) -> Tensor:
    s = torch.baddbmm(out, part.q, part.k.mT, beta=0, alpha=part.scale, out=out)
    # -inf would give NaN where it is multiplied by an exponential of zero
    if part.mask.attn_bias is not None:
        s.add_(part.mask.attn_bias).clamp_(min=limits.HIDDEN)
    return s if part.mask.visible is None else s.masked_fill_(~part.mask.visible, limits.HIDDEN)


def _sketched(sample: Tensor) -> Tensor:
    """Rows longer than SKETCH by a CountSketch with a fixed seed: inner products of rows keep their expected value."""
    n = sample.shape[-1]
    if n <= SKETCH:
        return sample
    generator = torch.Generator().manual_seed(0)
    slot = torch.randint(SKETCH, (n,), generator=generator)
    sign = torch.randint(2, (n,), generator=generator) * 2.0 - 1
    return sample.new_zeros(*sample.shape[:-1], SKETCH).index_add_(-1, slot, sample * sign)
