"""E ||P R^T R w - P w||^2 = (||P||_F^2 ||w||^2 + ||P w||^2) / k: the error of a Gaussian sketch of P, exactly.

R is k x n with N(0, 1/k) entries.  For one row p, p R^T R w - p.w has mean zero and variance
(||p||^2 ||w||^2 + (p.w)^2) / k; sum over the rows.  Wang et al. 2020 (Linformer) and Verma bound the error by
eps ||P w||, which is impossible: ||P||_F ||w|| does not shrink with P w.  (Arriaga & Vempala 2006 correctly bound one
row by eps ||p|| ||w||.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def sketch_size(n: int, epsilon: float, constant: float = 5.0) -> int:
    """ceil(5 ln n / (eps^2 - eps^3)), the k of Wang et al. 2020; Verma's has 9 ln d, independent of n."""
    return math.ceil(constant * math.log(n) / (epsilon**2 - epsilon**3))


def first_length(epsilon: float, constant: float = 5.0) -> int:
    """The smallest n with `sketch_size(n)` < n: for shorter sequences the sketch is larger than what it replaces.

    >>> first_length(0.1), sketch_size(4096, 0.1)
    (4699, 4621)
    """
    low, high = 8, 1 << 40  # ln(n) / n decreases from n = 3 on
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sketch_size(middle, epsilon, constant) < middle else (middle + 1, high)
    return low


@dataclass(frozen=True)
class Frequency:
    """The number of failures in independent draws, with a 99 % interval for the rate (Wilson)."""

    failures: int
    draws: int

    @property
    def rate(self) -> float:
        return self.failures / self.draws

    @property
    def interval(self) -> tuple[float, float]:
        z, n, p = 2.5758, self.draws, self.rate
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


def sketch(k: int, n: int, generator: torch.Generator | None = None) -> Tensor:
    """R (k, n) with N(0, 1/k) entries."""
    return torch.randn(k, n, dtype=torch.float64, generator=generator) / math.sqrt(k)


def failures_of_low_rank(
    p: Tensor, w: Tensor, k: int, epsilon: float, draws: int, *, generator: torch.Generator | None = None
) -> Frequency:
    """The frequency of ||P R^T R w - P w|| > eps ||P w|| over `draws` sketches."""
    squares = _squared_errors(p, w, k, draws, generator)
    return Frequency(int((squares.sqrt() > epsilon * (p @ w).norm()).sum()), draws)


def rank_for_all_rows(n: int, *, draws: int, generator: torch.Generator | None = None) -> float:
    """k eps^2 such that half of the sketches keep every row of R^T R w within eps ||w||, for a unit w of length n.

    The error of row i at rank k is (r_i . R w - w_i), of standard deviation about 1 / sqrt(k): the median over draws of
    the largest squared error, times k, is the answer whatever k is.
    """
    k = 64
    w = torch.randn(n, dtype=torch.float64, generator=generator)
    w /= w.norm()
    largest = []
    for _ in range(draws):
        r = sketch(k, n, generator)
        largest.append(k * ((r.mT @ (r @ w)) - w).square().max())
    return torch.stack(largest).median().item()


def best_rank_error(p: Tensor, k: int) -> float:
    """||P - P_k||_F of the best P_k of rank k: sqrt(sum_(i > k) sigma_i^2) (Eckart & Young)."""
    return torch.linalg.svdvals(p)[k:].square().sum().sqrt().item()


def sketch_error(p: Tensor, k: int, draws: int = 20, *, generator: torch.Generator | None = None) -> float:
    """sqrt(mean ||P - P R^T R||_F^2) over sketches of rank k, to compare with `best_rank_error`."""
    squares = [(p - p @ (r := sketch(k, p.shape[-1], generator)).mT @ r).square().sum() for _ in range(draws)]
    return torch.stack(squares).mean().sqrt().item()


def expected_square(p: Tensor, w: Tensor, k: int) -> float:
    """(||P||_F^2 ||w||^2 + ||P w||^2) / k."""
    return ((p.square().sum() * w.square().sum() + (p @ w).square().sum()) / k).item()


def measured_square(
    p: Tensor, w: Tensor, k: int, draws: int, *, generator: torch.Generator | None = None
) -> tuple[float, float]:
    """Mean of ||P R^T R w - P w||^2 over draws, and its standard error."""
    squares = _squared_errors(p, w, k, draws, generator)
    return squares.mean().item(), (squares.std() / math.sqrt(draws)).item()


def _squared_errors(p: Tensor, w: Tensor, k: int, draws: int, generator: torch.Generator | None) -> Tensor:  # (draws,)
    exact = p @ w
    sketches = (sketch(k, p.shape[-1], generator) for _ in range(draws))
    return torch.stack([(p @ (r.mT @ (r @ w)) - exact).square().sum() for r in sketches])
