"""A bound for the drift of one further text of a kind that was not tried, from a few texts of a few kinds.

    y = log d                               d: drift of one text, at least a quarter of the mean of all
    V = (1 + 1/K) s_b^2 + (1 - 1/n) s_w^2   K kinds of n texts each
    bound = exp(mean of the kinds' means + t(nu) sqrt V)

s_b^2 is the variance of the kinds' means, which contains s_w^2 / n, and s_w^2 the variance of texts within kinds: V
estimates the variance of one new text of one new kind, and of the mean it is compared with.  t is the quantile of
Student's t, nu the degrees of freedom of V (Satterthwaite 1946).  With unequal numbers of texts n is their harmonic
mean.  Premises: kinds are drawn at random, and log drift is normal between and within them, with one variance in all.
Drawn like that, 98.3 to 99.1 % of new texts stayed below it, with spreads s_b and s_w of up to 1.2 and .4.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

CONFIDENCE = 0.99
"""Of 100 texts, each of another new kind, 99 are expected to stay below the bound."""

QUANTILES = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
"""Of Student's t at CONFIDENCE for 1, 2, ... degrees of freedom; 2.326 for infinitely many."""

NORMAL = 2.326

FLOOR = 0.25
"""Drifts below this share of the mean count as this share: how small the smallest are says little about large ones."""


def prediction_bound(drifts: Mapping[str, Sequence[float]]) -> float:
    """Bound from the drifts of the texts of two or more kinds; never below the largest of them.

    >>> round(prediction_bound({"a": [0.01, 0.012], "b": [0.009, 0.013], "c": [0.011, 0.011]}), 3)
    0.019
    >>> prediction_bound({"a": [0.0], "b": [0.0]})
    0.0
    """
    every = [d for row in drifts.values() for d in row]
    mean = statistics.fmean(every)
    if mean <= 0:
        return max(every)
    logs = [[math.log(max(d, FLOOR * mean)) for d in row] for row in drifts.values()]
    means, kinds = [statistics.fmean(row) for row in logs], len(logs)
    inverse = statistics.fmean(1 / len(row) for row in logs)  # 1 / n
    freedom = len(every) - kinds
    squares = sum((y - m) ** 2 for row, m in zip(logs, means, strict=True) for y in row)
    between = (1 + 1 / kinds) * statistics.variance(means)
    within = (1 - inverse) * squares / freedom if freedom else 0.0
    variance = between + within
    if variance == 0:
        return max(every)
    scatter = between**2 / (kinds - 1) + (within**2 / freedom if freedom else 0.0)
    exponent = statistics.fmean(means) + quantile(variance**2 / scatter) * math.sqrt(variance)
    return max(*every, math.exp(min(exponent, 100.0)))


def bound_over_lengths(drifts: Mapping[str, Mapping[int, Sequence[float]]]) -> float:
    """Largest bound over lengths for one text of a new kind; {kind: {length: drift of every text}}.

    If some length has texts of a single kind, texts of all lengths together are bounded too.
    """
    lengths = sorted({n for rows in drifts.values() for n in rows})
    groups = [{kind: rows[n] for kind, rows in drifts.items() if n in rows} for n in lengths]
    if any(len(group) == 1 for group in groups):
        groups.append({kind: [d for row in rows.values() for d in row] for kind, rows in drifts.items()})
    return max(prediction_bound(group) for group in groups if len(group) > 1)


def quantile(freedom: float) -> float:
    """Of Student's t at CONFIDENCE, interpolated linearly in 1 / freedom.

    >>> quantile(4), round(quantile(20), 3), quantile(math.inf)
    (3.747, 2.545, 2.326)
    """
    freedom = max(freedom, 1.0)
    last = len(QUANTILES)
    if freedom >= last:
        return NORMAL + (QUANTILES[-1] - NORMAL) * last / freedom
    low = int(freedom)
    high, share = low + 1, (1 / low - 1 / freedom) / (1 / low - 1 / (low + 1))
    return QUANTILES[low - 1] * (1 - share) + QUANTILES[high - 1] * share
