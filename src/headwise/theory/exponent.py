"""cost ~ c n^a: the exponent a by least squares of log cost on log n, with a 95 % interval from the residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# two-sided 95 % quantiles of Student's t by degrees of freedom; beyond ten the normal one is near enough
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


@dataclass(frozen=True)
class Exponent:
    value: float
    half_width: float  # NaN where two points leave no residual
    points: int

    def near(self, claimed: float, slack: float) -> bool:
        return abs(self.value - claimed) <= slack

    def __str__(self) -> str:
        return f"n^{self.value:.2f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.2f}")


def exponent(n: Sequence[int], cost: Sequence[float]) -> Exponent:
    """
    >>> exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0])
    Exponent(value=2.0, half_width=0.0, points=4)
    """
    x, y = [math.log2(v) for v in n], [math.log2(v) for v in cost]
    count = len(x)
    if count < 2:
        return Exponent(math.nan, math.nan, count)
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if count == 2:
        return Exponent(slope, math.nan, count)
    left = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(left / (count - 2) / spread)
    return Exponent(slope, _STUDENT.get(count - 2, 1.96) * error, count)
