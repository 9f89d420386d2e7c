"""What the monitor measures of one attention call: at most a block of P exists at a time.

The largest score is exact, over every query and every visible key.  Entropy, row maximum and sink mass are estimated
from some query rows of every sequence, drawn at random: their means are unbiased.  Effective rank is that of some rows
of one sequence.  Scores are computed in single precision, whatever the model computes in.  Padding, and queries that
attend to nothing, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.linalg.ranks import effective_rank as rank_of_spectrum
from headwise.linalg.spectrum import exact_spectrum
from headwise.models.intercept import AttentionCall
from headwise.operators._kernels import limits
from headwise.operators.masks import Mask

FEWEST_ROWS = 16
"""Query rows of every sequence, if it has as many, however large the batch."""

RANK_ROWS = 128
"""Query rows of one sequence for the effective rank."""

ALL = slice(None)


@dataclass(frozen=True)
class HeadSample:
    """What was measured of the h heads of one attention call; `weight` rows were sampled of each head."""

    max_logit: Tensor  # (h,)
    entropy: Tensor
    entropy_share: Tensor
    lowest_entropy_share: Tensor
    row_maximum: Tensor
    sink_mass: Tensor
    weight: int
    effective_rank: Tensor | None = None

    def merged(self, other: HeadSample) -> HeadSample:
        """Both calls together: maxima, minima, and means weighted by rows; the rank is that of the first."""
        share = self.weight / max(1, self.weight + other.weight)

        def mean(a: Tensor, b: Tensor) -> Tensor:
            return torch.lerp(b, a, share)

        return HeadSample(
            torch.maximum(self.max_logit, other.max_logit),
            mean(self.entropy, other.entropy),
            mean(self.entropy_share, other.entropy_share),
            torch.minimum(self.lowest_entropy_share, other.lowest_entropy_share),
            mean(self.row_maximum, other.row_maximum),
            mean(self.sink_mass, other.sink_mass),
            self.weight + other.weight,
            other.effective_rank if self.effective_rank is None else self.effective_rank,
        )


def measure_call(
    call: AttentionCall, *, rows: int | None, with_rank: bool, generator: torch.Generator
) -> HeadSample | None:
    """The measures of every head of one call, or None if no query attends to anything.

    `rows` query rows are drawn in all, spread over the sequences (None: every row); the call may have a gradient, its
    measures have none.
    """
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        scores = _Scores(call)
        if not scores.real.any():
            return None
        b, m = scores.q.shape[0], scores.m
        each = m if rows is None else min(m, max(FEWEST_ROWS, math.ceil(rows / b)))
        sample = _row_sums(scores, _drawn(m, each, generator))
        rank = _effective_rank(scores, generator) if with_rank else None
        return HeadSample(scores.largest(), *sample, effective_rank=rank)


def _drawn(m: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` of m rows without repetition, in order."""
    return torch.arange(m) if count >= m else torch.randperm(m, generator=generator)[:count].sort().values


class _Scores:
    """S = scale q k^T + bias of a call, in blocks of rows of some of its sequences, hidden pairs at limits.HIDDEN."""

    def __init__(self, call: AttentionCall) -> None:
        self.q, self.k, self.scale, self.mask = call.q, call.k, call.scale, call.mask
        self.m, self.n = self.q.shape[-2], self.k.shape[-2]
        on_cpu = self.q.device.type == "cpu"
        self.entries = limits.CACHE_ENTRIES if on_cpu else limits.SCORE_ENTRIES
        self.real = _real_queries(call)  # (b | 1, h | 1, m)

    def groups(self, rows: int) -> Iterator[slice]:
        """Sequences whose scores of `rows` queries fit into a block together; one at least."""
        b, h = self.q.shape[:2]
        size = max(1, self.entries // (h * rows * self.n))
        for start in range(0, b, size):
            yield slice(start, min(start + size, b))

    def largest(self) -> Tensor:
        """(h,) max_ij S_ij over the visible pairs of queries that are not padding."""
        h = self.q.shape[1]
        highest = []
        for group in self.groups(self.m):
            q, k = self.q[group].float() * self.scale, self.k[group].float()
            real = _take(self.real, group)
            step = max(1, self.entries // (len(q) * h * self.n))
            for start in range(0, self.m, step):
                stop = min(start + step, self.m)
                mask = self.mask.part(start, stop, q.device)
                s = self._scores(q[:, :, start:stop], k[:, :, : mask.n], mask, group)
                s = s.amax(-1).masked_fill(~real[..., start:stop], -math.inf)
                highest.append(s.amax((0, 2)))
        return torch.stack(highest).amax(0)

    def rows(self, index: Tensor, group: slice, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """S of the queries `index` (b, h, r, n), the number of keys of each, and whether it is a query at all."""
        index = index.to(self.q.device)
        mask = _rows_of(self.mask, index)
        real = _take(self.real, group, heads)[..., index]
        q = torch.where(real.unsqueeze(-1), self.q[group, heads].index_select(-2, index).float() * self.scale, 0)
        s = self._scores(q, self.k[group, heads].float(), mask, group, heads)
        hidden = s <= limits.HIDDEN
        return s, self.n - hidden.sum(-1), real.expand(s.shape[:-1])

    def _scores(self, q: Tensor, k: Tensor, mask: Mask, group: slice, heads: slice = ALL) -> Tensor:
        s = q @ k.mT
        if mask.attn_bias is not None:
            bias = _take(mask.attn_bias, group, heads).float()
            s += bias
            s.masked_fill_(bias <= limits.LARGE_NEGATIVE, limits.HIDDEN)
        if mask.visible is not None:
            s.masked_fill_(~_take(mask.visible, group, heads), limits.HIDDEN)
        return s


def _take(x: Tensor, group: slice, heads: slice = ALL) -> Tensor:
    """Some sequences and heads of a tensor that has an entry for each of them, or one for all."""
    if x.dim() < 3:
        return x
    return x[ALL if x.shape[0] == 1 else group, ALL if x.shape[1] == 1 else heads]


def _rows_of(mask: Mask, index: Tensor) -> Mask:
    """The mask of the queries `index`, causality written out."""

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[-2] == 1 else x.index_select(-2, index)

    pairs = cut(mask.pair_mask)
    if mask.ahead is not None:
        earlier = torch.arange(mask.n, device=index.device) <= index.unsqueeze(-1) + mask.ahead
        pairs = earlier if pairs is None else earlier & pairs
    return Mask(len(index), mask.n, False, mask.key_mask, pairs, cut(mask.attn_bias))


def _real_queries(call: AttentionCall) -> Tensor:
    """(b | 1, h | 1, m) True for queries that attend to a key and, in self-attention, are not padding themselves."""
    mask, m = call.mask, call.q.shape[-2]
    empty = mask.empty_rows(call.q.device)
    real = torch.ones(1, 1, m, dtype=torch.bool, device=call.q.device)
    if empty is not None:
        real = real & ~empty
    if call.kind == "self" and mask.key_mask is not None and m == mask.n:
        real = real & mask.key_mask
    return real.reshape(*(1,) * (3 - real.dim()), *real.shape)


def _row_sums(scores: _Scores, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """entropy, its share (mean and lowest), row maximum, sink mass (each (h,)) and the number of rows of a head."""
    totals = torch.zeros(7, scores.q.shape[1], dtype=torch.float64, device=scores.q.device)
    lowest = totals.new_full((scores.q.shape[1],), math.inf)
    for group in scores.groups(len(index)):
        b, h = len(scores.q[group]), scores.q.shape[1]
        received = scores.k.new_zeros(2, b, h, scores.n, dtype=torch.float32)  # by every other row, and by the rest
        counted = scores.k.new_zeros(2, b, h, 1, dtype=torch.float32)
        for part in index.split(max(2, scores.entries // (b * h * scores.n) // 2 * 2)):
            s, keys, real = scores.rows(part, group)
            s -= s.amax(-1, keepdim=True)
            e = s.exp()
            z = e.sum(-1)
            entropy = z.log() - s.mul_(e).sum(-1) / z  # all terms positive, so no cancellation
            share = entropy / keys.clamp(min=2).log()
            choice = real & (keys > 1)  # one key leaves nothing to choose
            weight = torch.where(real, 1 / z, 0)  # the largest weight of a row
            sums = (torch.where(real, entropy, 0), torch.where(choice, share, 0), choice, weight, real)
            totals[:5] += torch.stack([x.sum((0, 2), dtype=torch.float64) for x in sums])
            lowest = torch.minimum(lowest, torch.where(choice, share, math.inf).amin((0, 2)))
            p = e.mul_(weight.unsqueeze(-1))
            for half in (0, 1):
                received[half] += p[..., half::2, :].sum(-2)
                counted[half] += real[..., half::2].sum(-1, keepdim=True)
        mass, told = _sink_mass(received, counted, every_row=len(index) == scores.m)
        totals[5:] += torch.stack([mass.sum(0, dtype=torch.float64), told.sum(0, dtype=torch.float64)])
    entropy, share, choice, maximum, real, sink, told = totals
    return (
        (entropy / real).float(),
        (share / choice).float(),
        torch.where(lowest == math.inf, math.nan, lowest).float(),
        (maximum / real).float(),
        (sink / told).float(),
        int(real.amax()),
    )


def _sink_mass(received: Tensor, counted: Tensor, *, every_row: bool) -> tuple[Tensor, Tensor]:
    """(b, h) max_j c_j, c_j the mean weight that key j receives; and whether there were rows to tell.

    Of a sample, the key is chosen by half of the rows and its mass read off the other half, both ways.  Choosing and
    reading by the same few rows would report 1 / rows for a head that attends to another key in every row.
    """
    if every_row:
        told = counted.sum(0).squeeze(-1) > 0
        mass = (received.sum(0) / counted.sum(0).clamp(min=1)).amax(-1)
    else:
        told = (counted > 0).all(0).squeeze(-1)
        a, b = received / counted.clamp(min=1)
        mass = (a.gather(-1, b.argmax(-1, keepdim=True)) + b.gather(-1, a.argmax(-1, keepdim=True))).squeeze(-1) / 2
    return torch.where(told, mass, 0.0), told


def _effective_rank(scores: _Scores, generator: torch.Generator) -> Tensor:
    """(h,) effective rank of at most RANK_ROWS rows of P of the first sequence that has queries."""
    h = scores.q.shape[1]
    present = scores.real.expand(len(scores.q), h, -1).all(1)
    sequence = int(present.any(-1).int().argmax())
    rows = present[sequence].nonzero().squeeze(-1).cpu()
    if len(rows) == 0:  # every query attends to nothing in some head
        return torch.full((h,), math.nan, device=scores.q.device)
    rows = rows[_drawn(len(rows), RANK_ROWS, generator)]
    ranks = []
    together = max(1, scores.entries // (len(rows) * scores.n))
    for first in range(0, h, together):
        s, _, _ = scores.rows(rows, slice(sequence, sequence + 1), slice(first, first + together))
        p = torch.softmax(s.squeeze(0), -1).double()
        finite = p.isfinite().all(-1).all(-1)
        gram = torch.where(finite[:, None, None], p @ p.mT, 0.0)
        values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1)
        spectrum = exact_spectrum(values, torch.float64, (len(rows), len(rows)), len(rows))
        ranks.append(torch.where(finite, rank_of_spectrum(spectrum), math.nan))
    return torch.cat(ranks).float()
