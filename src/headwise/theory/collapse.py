"""||res SAN(X)|| <= (4 H beta / sqrt(d_qk))^((3^L - 1) / 2) ||res X||^(3^L): pure attention loses rank, and how fast.

In the composite "norm" sqrt(||.||_1 ||.||_inf), with beta >= ||W_QK^l||_1 ||W_V^l||_(1,inf) for all layers and heads
(Dong, Cordonnier & Loukas 2021, Theorem 2.2, and H heads).  All in log space, since 3^L overflows at once.
The right side tends to zero only if sqrt(4 H beta / sqrt(d_qk)) ||res X|| < 1; otherwise the bound is true and says
nothing.  With skip connections there is no such bound: the path that skips every layer keeps res X whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.linalg.norms import composite_norm, one_norm
from headwise.theory.residual import relative_residual, residual
from headwise.theory.stack import Stack
from headwise.theory.verdict import Verdict

ROUNDING = 1e-14
"""Relative size of a residual that is rounding and nothing else."""

SOURCE = "S0, Theorem 2.2 (Dong, Cordonnier & Loukas 2021)"


@dataclass(frozen=True)
class Collapse:
    """Layer by layer: log of the measured left side and of the bound, and the premises by name."""

    log_measured: list[float]
    log_bound: list[float]
    beta: float
    premises: dict[str, bool]

    @property
    def tightness(self) -> list[float]:
        """log(left / right) for each depth: 0 is attained, -10 is loose by e^10."""
        return [left - right for left, right in zip(self.log_measured, self.log_bound, strict=True)]

    def verdict(self) -> Verdict:
        worst = max(self.tightness[1:])
        return Verdict("the residual of pure attention falls under its bound", SOURCE, worst, 0.0, {})


def beta_of(stack: Stack) -> float:
    """max over layers and heads of ||W_Q W_K^T||_1 ||W_V W_O||_(1,inf)."""
    found = [one_norm(layer.wq @ layer.wk.mT) * composite_norm(layer.w) for layer in stack.layers]
    return torch.cat(found).max().item()


def log_bound(depth: int, *, beta: float, heads: int, key_width: int, log_residual: float) -> float:
    """log of (4 H beta / sqrt(d_qk))^((3^L - 1) / 2) ||res X||^(3^L)."""
    rate = math.log(4 * heads * beta / math.sqrt(key_width)) if beta > 0 else -math.inf
    power = 3.0**depth
    return (power - 1) / 2 * rate + power * log_residual if depth else log_residual


def collapse(stack: Stack, x: Tensor) -> Collapse:
    """Both sides of the bound for every depth up to L, on one input (n, d)."""
    beta, heads, width = beta_of(stack), stack.layers[0].wq.shape[0], stack.layers[0].wq.shape[-1]
    start = composite_norm(residual(x)).log().item()
    measured = [_log_residual(y) for y in stack.states(x)]
    bound = [
        log_bound(depth, beta=beta, heads=heads, key_width=width, log_residual=start)
        for depth in range(len(stack.layers) + 1)
    ]
    shrinking = math.log(4 * heads * beta / math.sqrt(width)) / 2 + start < 0
    premises = {
        "no skip connections": not stack.skip,
        "sqrt(4 H beta / sqrt(d_qk)) ||res X|| < 1, so that the bound shrinks": shrinking,
    }
    return Collapse(measured, bound, beta, premises)


def _log_residual(x: Tensor) -> float:
    """-inf once the tokens differ by rounding alone: the true residual is then smaller than float64 can hold."""
    size = composite_norm(residual(x)).item()
    return math.log(size) if size > ROUNDING * composite_norm(x).item() else -math.inf


def collapse_curve(model: Any, x: Tensor) -> list[float]:
    """Relative residual before and after every block of a stack of our modules (anything that iterates over blocks)."""
    found = [relative_residual(x).item()]
    with torch.no_grad():
        for block in model:
            x = block(x)
            found.append(relative_residual(x).item())
    return found
