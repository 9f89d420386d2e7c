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
"""Default: of 100 texts, each of another new kind, 99 are expected to stay below the bound."""

LEAST_CONFIDENCE = 0.5
"""Below it, most texts of a new kind are expected to drift by more than the bound."""

STEPS = 2000
"""Of the integral for a quantile, which it makes right to three digits."""

FLOOR = 0.25
"""Drifts below this share of the mean count as this share: how small the smallest are says little about large ones."""


def prediction_bound(drifts: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE) -> float:
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
    exponent = statistics.fmean(means) + quantile(variance**2 / scatter, confidence) * math.sqrt(variance)
    return max(*every, math.exp(min(exponent, 100.0)))


def bound_over_lengths(drifts: Mapping[str, Mapping[int, Sequence[float]]], confidence: float = CONFIDENCE) -> float:
    """Largest bound over lengths for one text of a new kind; {kind: {length: drift of every text}}.

    If some length has texts of a single kind, texts of all lengths together are bounded too.
    """
    lengths = sorted({n for rows in drifts.values() for n in rows})
    groups = [{kind: rows[n] for kind, rows in drifts.items() if n in rows} for n in lengths]
    if any(len(group) == 1 for group in groups):
        groups.append({kind: [d for row in rows.values() for d in row] for kind, rows in drifts.items()})
    return max(prediction_bound(group, confidence) for group in groups if len(group) > 1)


def quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """t with P(T <= t) = confidence for Student's T = sqrt(nu) cot(angle); the angle has density sin(angle)^(nu - 1).

    >>> round(quantile(4), 3), round(quantile(6, 0.95), 3), round(quantile(math.inf), 3)
    (3.747, 1.943, 2.326)
    """
    freedom = max(freedom, 1.0)
    if freedom > 100:  # the first term of the expansion of Cornish and Fisher
        z = statistics.NormalDist().inv_cdf(confidence)
        return z + (z**3 + z) / (4 * freedom)
    step = math.pi / STEPS
    weights = [math.sin((i + 0.5) * step) ** (freedom - 1) for i in range(STEPS)]
    beyond, index = (1 - confidence) * math.fsum(weights), 0
    while beyond > weights[index]:
        beyond -= weights[index]
        index += 1
    return math.sqrt(freedom) / math.tan((index + beyond / weights[index]) * step)
