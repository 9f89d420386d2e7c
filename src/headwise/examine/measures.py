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

from headwise.operators.scores import Scores

CHUNK = 1 << 19
"""Entries of P alive at once, over all heads: half a million floats stay in the cache of one core."""

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
    received: Tensor  # (h, n) mean attention each key receives
    output_gram: Tensor  # (h, d, d) O^T O
    output: Tensor  # (h, m, d)


def stream(scores: Scores, v: Tensor, *, entries: int = CHUNK) -> Streamed:
    """All streaming measures of one text: q (h, m, k), k (h, n, k), v (h, n, d); `entries` of P alive at once."""
    q, k, v = (x.float() for x in (scores.q, scores.k, v))
    scores = Scores(q, k, scores.scale, scores.ahead, scores.keep, scores.bias)
    h, m, n = scores.shape
    sampled = torch.linspace(0, m - 1, min(SAMPLED, m)).round().long()
    entropy, top, squares = (torch.empty(h, m) for _ in range(3))
    largest = torch.full((h,), -math.inf)
    received, diagonals = torch.zeros(h, n), torch.zeros(h, m + n - 1, dtype=torch.float64)
    output, seen, sample = torch.empty(h, m, v.shape[-1]), torch.empty(h, m), []
    with_ones = torch.nn.functional.pad(v, (0, 1), value=1.0)  # the last column of E [V 1] is Z
    step = max(1, min(m, entries // (h * n)))
    padded = v.new_empty(0)
    for start in range(0, m, step):
        stop = min(start + step, m)
        part = scores.rows(start, stop)
        rows, columns = stop - start, part.k.shape[-2]
        s = _finite_scores(part)
        peak = s.amax(-1)
        e = s.sub_(peak.unsqueeze(-1)).exp()
        weighted = e @ with_ones[:, :columns]
        z = weighted[..., -1:]
        entropy[:, start:stop] = z.squeeze(-1).log() - torch.linalg.vecdot(e, s) / z.squeeze(-1)
        squares[:, start:stop] = (torch.linalg.vector_norm(e, dim=-1) / z.squeeze(-1)).square()
        top[:, start:stop] = 1 / z.squeeze(-1)
        largest = torch.maximum(largest, peak.amax(-1))
        received[:, :columns] += (z.reciprocal().mT @ e).squeeze(-2)
        output[:, start:stop] = weighted[..., :-1] / z
        seen[:, start:stop] = _keys_seen(part, columns, rows)
        # P between zeros: read with one more step a row, its diagonals are columns
        width = columns + rows
        if padded.shape[-1] != rows * width + rows:
            padded = v.new_zeros(h, rows * width + rows)
        p = padded.as_strided((h, rows, columns), (padded.stride(0), width, 1), rows)
        torch.div(e, z, out=p)
        skewed = padded.as_strided((h, rows, width - 1), (padded.stride(0), width + 1, 1), 1)
        first = m - stop  # the block's lowest diagonal, j - i = -(stop - 1), in the order of `diagonals`
        diagonals[:, first : first + width - 1] += skewed.sum(-2)
        here = sampled[(sampled >= start) & (sampled < stop)] - start
        if len(here):
            sample.append(torch.nn.functional.pad(p[:, here], (0, n - columns)))
    return _numbers(scores, v, entropy, top, squares, largest, received, diagonals, output, seen, torch.cat(sample, -2))


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
    return Streamed(
        {name: x.double() for name, x in numbers.items()},
        profile,
        _hashed(sample),
        received,
        output.mT @ output,
        output,
    )


def _finite_scores(part: Scores) -> Tensor:
    s = (part.q * part.scale) @ part.k.mT
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
