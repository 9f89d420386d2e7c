"""Numbers of every head from one pass over blocks of rows of P: entropy, scores, norms, masses, offsets, output.

For E = exp(S - max) and Z = E 1, a block of rows gives in a few sweeps

    entropy_i  = log Z_i + sum_j E_ij (max_i - S_ij) / Z_i        all terms positive, so no cancellation
    ||P_i||^2  = sum_j E_ij^2 / Z_i^2
    t_delta    = sum_i P_(i, i+delta)                             every diagonal at once, by a skewed view of the block
    c_j        = sum_i P_ij                                       what key j receives
    O          = P V

and everything else follows from these: the best Toeplitz matrix has the diagonal means for entries, so its squared
error is ||P||_F^2 - sum_delta t_delta^2 / length_delta, and the mean and spread of the offset j - i are moments of t.
At most `CHUNK` entries of P exist at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.operators._kernels.scores import Scores

CHUNK = 1 << 19
"""Entries of P alive at once, over all heads: larger blocks leave the cache, smaller ones do not feed the threads."""

REACH = 64
"""Offsets -REACH ... REACH of the profile are kept one by one."""

WINDOWS = (1, 4, 16, 64)
"""Half-widths w for the mass within +-w of the query."""

SAMPLED = 32
"""Query rows kept of every head, evenly spaced, to compare heads with one another."""

SKETCH = 512
"""Columns to which longer sampled rows are hashed."""

_SILENT = -1e30
"""In place of -inf: its exponential is zero and zero times it is zero, where -inf would give NaN."""


@dataclass(frozen=True, eq=False)
class Streamed:
    """Per head of one attention call on one text: named numbers (h,), and a few arrays."""

    numbers: dict[str, Tensor]
    profile: Tensor  # (h, 2 REACH + 1) mean mass at each offset j - i
    sample: Tensor  # (h, SAMPLED, <= SKETCH) rows of P
    output_gram: Tensor  # (h, d, d) O^T O


class Memory:
    """The three blocks of at most `entries` numbers that `stream` works in, kept from call to call.

    Measured on twelve heads of 512 tokens: fetching their pages from the system anew took as long as the arithmetic.
    """

    def __init__(self, entries: int = CHUNK) -> None:
        self.entries = entries
        self._flat, self._skew, self._layout = torch.empty(2, 0), torch.empty(0), (0, 0, 0)

    def two(self, h: int, rows: int, columns: int) -> Tensor:
        """(2, h, rows, columns), whatever is in it."""
        size = h * rows * columns
        if self._flat.shape[1] < size:
            self._flat = torch.empty(2, size)
        return self._flat[:, :size].view(2, h, rows, columns)

    def skew(self, h: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Rows between zeros, and the same memory read with one more step a row: diagonals become columns."""
        width = columns + rows
        each = rows * width + rows
        if len(self._skew) < h * each:
            self._skew = torch.empty(h * each)
        if self._layout != (h, rows, columns):
            self._layout = (h, rows, columns)
            self._skew[: h * each].zero_()
        plain = self._skew.as_strided((h, rows, columns), (each, width, 1), rows)
        return plain, self._skew.as_strided((h, rows, width - 1), (each, width + 1, 1), 1)


def stream(scores: Scores, v: Tensor, *, memory: Memory | None = None) -> tuple[Streamed, Tensor]:
    """All streaming measures of one text, and its P V: q (h, m, k), k (h, n, k), v (h, n, d)."""
    memory = memory or Memory()
    q, k, v = scores.q.float(), scores.k.float().contiguous(), v.float().contiguous()
    scores = Scores(q, k, scores.scale, scores.mask)
    h, m, n = scores.shape
    sampled = torch.linspace(0, m - 1, min(SAMPLED, m)).round().long().tolist()
    peak, z, dot, norm = (torch.empty(h, m) for _ in range(4))
    received, diagonals = torch.zeros(h, n), torch.zeros(h, m + n - 1)
    output, seen, sample = torch.empty(h, m, v.shape[-1]), torch.empty(h, m), torch.zeros(h, len(sampled), n)
    blocks = math.ceil(m / max(1, min(m, memory.entries // (h * n))))
    step = math.ceil(m / blocks)
    for start in range(0, m, step):
        stop = min(start + step, m)
        part, block = scores.rows(start, stop), slice(start, stop)
        rows, columns = stop - start, part.k.shape[-2]
        s, e = memory.two(h, rows, columns)
        p, skewed = memory.skew(h, rows, columns)
        peak[:, block] = highest = _finite_scores(part, s).amax(-1)
        torch.exp(s.sub_(highest.unsqueeze(-1)), out=e)
        z[:, block] = total = e.sum(-1)
        dot[:, block] = s.mul_(e).sum(-1)
        norm[:, block] = torch.linalg.vector_norm(e, dim=-1)
        output[:, block] = e @ v[:, :columns]
        torch.div(e, total.unsqueeze(-1), out=p)
        received[:, :columns] += p.sum(-2)
        first = m - stop  # the block's lowest diagonal, j - i = -(stop - 1), in the order of `diagonals`
        diagonals[:, first : first + rows + columns - 1] += skewed.sum(-2)
        seen[:, block] = _keys_seen(part, columns, rows)
        for place, i in enumerate(sampled):
            if start <= i < stop:
                sample[:, place, :columns] = p[:, i - start]
    output /= z.unsqueeze(-1)
    entropy, top, squares = z.log() - dot / z, 1 / z, (norm / z).square()
    largest, diagonals = peak.amax(-1), diagonals.double()
    found = _numbers(scores, v, entropy, top, squares, largest, received, diagonals, output, seen, sample)
    return found, output


def _numbers(
    scores: Scores,
    v: Tensor,
    entropy: Tensor,
    top: Tensor,
    squares: Tensor,
    largest: Tensor,
    received: Tensor,
    diagonals: Tensor,
    output: Tensor,
    seen: Tensor,
    sample: Tensor,
) -> Streamed:
    _, m, n = scores.shape
    frobenius = squares.double().sum(-1)
    offsets = torch.arange(-(m - 1), n, dtype=torch.float64)
    lengths = torch.minimum(torch.minimum(offsets + m, n - offsets), torch.tensor(float(min(m, n))))
    mass = diagonals / m
    mean = mass @ offsets
    spread = (mass @ offsets.square() - mean.square()).clamp(min=0).sqrt()
    toeplitz = 1 - (diagonals.square() / lengths).sum(-1) / frobenius
    # the best c * shift: c is the diagonal's mean, so the energy explained is t^2 / length
    best = (diagonals.square() / lengths).argmax(-1)
    one_offset = 1 - (diagonals.square() / lengths).amax(-1) / frobenius
    received = received / m
    uniform = seen.clamp(min=1).log()
    ordered = entropy.sort(-1).values
    share = torch.where(uniform > 0, entropy / uniform.clamp(min=1e-9), torch.ones(()))
    numbers = {
        "entropy": entropy.mean(-1),
        "entropy_min": ordered[:, 0],
        "entropy_q10": ordered[:, round(0.1 * (m - 1))],
        "entropy_median": ordered[:, (m - 1) // 2],
        "entropy_q90": ordered[:, round(0.9 * (m - 1))],
        "entropy_share": share.mean(-1),
        "distance_to_uniform": (uniform - entropy).clamp(min=0).mean(-1),
        "largest_score": largest,
        "row_maximum": top.mean(-1),
        "frobenius": frobenius.sqrt(),
        "sink_mass": received.amax(-1),
        "sink_position": received.argmax(-1),
        "first_mass": received[:, 0],
        "diagonal_mass": _at(mass, m, 0),
        "previous_mass": _at(mass, m, -1),
        "next_mass": _at(mass, m, 1),
        "offset_mean": mean,
        "offset_spread": spread,
        "best_offset": offsets[best],
        "best_offset_mass": mass.gather(-1, best.unsqueeze(-1)).squeeze(-1),
        "best_offset_error": one_offset.clamp(min=0).sqrt(),
        "toeplitz_error": toeplitz.clamp(min=0).sqrt(),
        "output_norm": torch.linalg.matrix_norm(output),
        "value_norm": torch.linalg.matrix_norm(v),
    }
    for w in WINDOWS:
        numbers[f"mass_within_{w}"] = mass[:, max(0, m - 1 - w) : m + w].sum(-1)
    profile = torch.zeros(len(mass), 2 * REACH + 1, dtype=torch.float64)
    low, high = max(0, m - 1 - REACH), min(m + n - 1, m + REACH)
    profile[:, low - (m - 1 - REACH) : high - (m - 1 - REACH)] = mass[:, low:high]
    # cloned: a view of one number would keep the whole array it was taken from
    numbers = {name: x.double().clone() for name, x in numbers.items()}
    return Streamed(numbers, profile, _hashed(sample), output.mT @ output)


def _finite_scores(part: Scores, out: Tensor) -> Tensor:
    s = torch.baddbmm(out, part.q, part.k.mT, beta=0, alpha=part.scale, out=out)
    if part.bias is not None:
        s += part.bias
    return s if part.keep is None else s.masked_fill_(~part.keep, _SILENT)


def _keys_seen(part: Scores, columns: int, rows: int) -> Tensor:
    if part.keep is None:
        return torch.tensor(float(columns))
    return part.keep.expand(*part.keep.shape[:-2], rows, columns).sum(-1).float()


def _at(mass: Tensor, m: int, offset: int) -> Tensor:
    index = m - 1 + offset
    return mass[:, index] if 0 <= index < mass.shape[-1] else torch.zeros(len(mass), dtype=mass.dtype)


def _hashed(sample: Tensor) -> Tensor:
    """Rows longer than SKETCH by a CountSketch drawn from a fixed seed: inner products of rows keep their mean."""
    n = sample.shape[-1]
    if n <= SKETCH:
        return sample
    generator = torch.Generator().manual_seed(0)
    slot = torch.randint(SKETCH, (n,), generator=generator)
    sign = torch.randint(2, (n,), generator=generator) * 2.0 - 1
    return sample.new_zeros(*sample.shape[:-1], SKETCH).index_add_(-1, slot, sample * sign)
