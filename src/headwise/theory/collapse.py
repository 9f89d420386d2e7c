"""||res SA(X)|| <= C beta / sqrt(d_qk) ||res X||^3: a layer of pure attention loses rank, and how fast.

    res(X) = X - 1 mean(X)^T      the part of X in which tokens differ
    beta   = sqrt(sum_h w_h ||W_h||_1  sum_h w_h ||W_h||_inf),   w_h = ||W_Q,h W_K,h^T||_1,   W_h = W_V,h W_O,h
    C      = (1 - 1/n) sqrt(min(n / 2, d, kappa(D))),   kappa(D) = (e^D - 1) / D + (e^(2D) - 1) / (2D)

for n tokens of width d, where ||.|| is the composite "norm" sqrt(||.||_1 ||.||_inf) and D is the largest spread
max_j E_ij - min_j E_ij of a row of E = R W_Q W_K^T R^T / sqrt(d_qk), R = res X.  The proof is in
docs/explanation/rank-collapse.md.  Over L layers it gives (C beta / sqrt(d_qk))^((3^L - 1) / 2) ||res X||^(3^L).

Dong, Cordonnier & Loukas 2021 (Theorem 2.2) have C = 4 and H max_h w_h ||W_h|| in place of beta.  C <= 4 if n <= 33, or
d <= 16, or D <= 1.97; without any of these, and for several heads, their bound fails (`long_layer`, `two_wide_heads` in
headwise.theory.collapse_counterexamples).  The right side tends to zero only if C beta / sqrt(d_qk) ||res X||^2 < 1;
otherwise the bound is true but vacuous.  Everything is computed in logarithms, since 3^L overflows.

The mean is the best row to subtract in every unitarily invariant norm (spectral, Frobenius): with J = 11^T/n,
res X = (I - J) X, and for any row x, (I - J)(X - 1 x^T) = res X with ||I - J|| = 1.  In ||.||_1 and ||.||_inf medians
are better.

With skip connections the residual of a layer is the sum of the incoming r and of what attention adds, b <= c r^3.  The
composite "norm" has no triangle inequality, but its two factors have: with x = ||A||_1 / ||A||_inf between 1/d and n,

    ||A + B||^2 <= r^2 + b^2 + r b (sqrt(n d) + 1 / sqrt(n d))

so this bound never falls below ||res X||: skip connections keep tokens apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.linalg.norms import composite_norm, infinity_norm, one_norm
from headwise.nn.encoder import Encoder, Residual
from headwise.nn.multihead import MultiHead
from headwise.theory.stack import Layer, Stack
from headwise.theory.verdict import Verdict

SOURCE = "Dong, Cordonnier & Loukas 2021, Theorem 2.2, with the constants of docs/explanation/rank-collapse.md"
SHRINKS = "C beta / sqrt(d_qk) ||res X||^2 < 1, so that the bound shrinks"
NO_SKIPS = "no skip connections"

Norm = Callable[[Tensor], Tensor]


def residual(x: Tensor) -> Tensor:  # (*batch, n, d)
    """res(X) = X - 1 mean(X)^T: x minus its row mean."""
    return x - x.mean(dim=-2, keepdim=True)


def relative_residual(x: Tensor, norm: Norm = composite_norm) -> Tensor:  # (*batch, n, d) -> (*batch,)
    """||res X|| / ||X||: 0 when all tokens are equal.  Computed in float64; float32 cannot go below 2e-7.

    >>> relative_residual(torch.ones(4, 3)).item()
    0.0
    """
    x = x.double()
    return norm(residual(x)) / norm(x).clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class Collapse:
    """For every depth, the logarithms of the measured residual and of its bound; and the premises of collapse."""

    log_measured: list[float]
    log_bound: list[float]
    beta: float
    premises: dict[str, bool]

    @property
    def tightness(self) -> list[float]:
        """log(left / right) for each depth: 0 where the bound is attained, -10 where it is loose by e^10."""
        sides = zip(self.log_measured, self.log_bound, strict=True)
        return [left - right if left > -math.inf else left for left, right in sides]

    @property
    def shrinks(self) -> bool:
        """Whether the bound tends to zero with depth."""
        return all(self.premises.values())

    def verdict(self) -> Verdict:
        worst = max(self.tightness[1:])
        return Verdict("log(residual / bound), at the depth where it is largest", SOURCE, worst, 0.0, {})


def layer_constant(n: int, width: int, spread: float = math.inf) -> float:
    """C = (1 - 1/n) sqrt(min(n / 2, d, kappa(D))) for n tokens of width d and scores whose rows E_i spread by D.

    >>> layer_constant(32, 768), layer_constant(4096, 768, spread=1.2564)
    (3.875, 2.55...)
    """
    limits = [n / 2, float(width)]
    if spread < 300:  # beyond, e^(2D) overflows and does not matter
        limits.append(math.expm1(spread) / spread + math.expm1(2 * spread) / (2 * spread) if spread > 0 else 2.0)
    return (1 - 1 / n) * math.sqrt(min(limits))


def beta_of(layer: Layer) -> float:
    """sqrt(sum_h w_h ||W_h||_1 sum_h w_h ||W_h||_inf), w_h = ||W_Q,h W_K,h^T||_1; for one head, w ||W||_(1,inf)."""
    scores = one_norm(layer.wq @ layer.wk.mT)
    return ((scores * one_norm(layer.w)).sum().sqrt() * (scores * infinity_norm(layer.w)).sum().sqrt()).item()


def published_log_bound(depth: int, *, beta: float, heads: int, key_width: int, log_residual: float) -> float:
    """log of (4 H beta / sqrt(d_qk))^((3^L - 1) / 2) ||res X||^(3^L), beta = max_h w_h ||W_h||, as published."""
    power = 3.0**depth
    rate = math.log(4 * heads * beta / math.sqrt(key_width)) if beta > 0 else -math.inf
    return (power - 1) / 2 * rate + power * log_residual if depth else log_residual


def _log_rate(layer: Layer, n: int, residual_norm: float) -> float:
    """log of C beta / sqrt(d_qk), with the spread D <= ||W_Q W_K^T||_1 ||R||^2 / sqrt(d_qk) of any such residual."""
    root, beta = math.sqrt(layer.wq.shape[-1]), beta_of(layer)
    spread = one_norm(layer.wq @ layer.wk.mT).max().item() * residual_norm**2 / root
    return math.log(layer_constant(n, layer.wq.shape[1], spread) * beta / root) if beta > 0 and n > 1 else -math.inf


def _next_log_bound(layer: Layer, n: int, log_residual: float, *, skip: bool) -> float:
    """The bound on log ||res X|| after a layer from the one before it."""
    if log_residual == -math.inf:
        return -math.inf
    added = _log_rate(layer, n, math.exp(min(log_residual, 300.0))) + 3 * log_residual
    if not skip:
        return added
    root = math.sqrt(n * layer.wq.shape[1])
    parts = (2 * log_residual, 2 * added, math.log(root + 1 / root) + log_residual + added)
    return torch.tensor(parts, dtype=torch.float64).logsumexp(0).item() / 2


def collapse(stack: Stack, x: Tensor) -> Collapse:
    """Both sides of the bound for every depth up to L, for one input (n, d)."""
    n, rests = x.shape[-2], stack.residuals(x.double())
    measured = [composite_norm(rest).log().item() for rest in rests]
    bound = [measured[0]]
    for layer in stack.layers:
        bound.append(_next_log_bound(layer, n, bound[-1], skip=stack.skip))
    start = math.exp(min(measured[0], 300.0))
    shrinks = max(_log_rate(layer, n, start) for layer in stack.layers) + 2 * measured[0] < 0
    premises = {NO_SKIPS: not stack.skip, SHRINKS: shrinks}
    return Collapse(measured, bound, max(beta_of(layer) for layer in stack.layers), premises)


def collapse_curve(
    model: Encoder | Iterable[nn.Module], x: Tensor, *, skip: bool = True, mlp: bool = True, norm: Norm = composite_norm
) -> list[float]:
    """Relative residual before and after every layer of an Encoder or of MultiHead layers, computed in float64.

    `skip=False` removes the skip connections and `mlp=False` the MLPs; the model itself does not change.
    """
    x = x.detach().double()
    curve = [relative_residual(x, norm).item()]
    with torch.no_grad():
        for parts in _layers(model):
            for part in parts if mlp else parts[:1]:
                x = _apply(copy.deepcopy(part).double().eval(), x, skip=skip)
            curve.append(relative_residual(x, norm).item())
    return curve


def _layers(model: Encoder | Iterable[nn.Module]) -> list[tuple[nn.Module, ...]]:
    """Attention and, in an Encoder, the MLP of every layer."""
    if isinstance(model, Encoder):
        if model.layers is None:
            raise UnsupportedError(
                "collapse_curve: a reversible Encoder carries two streams, neither of which has the residual of one "
                "sequence; build it with reversible=False"
            )
        parts = [*model.layers]
        return list(zip(parts[::2], parts[1::2], strict=True))
    layers = [*model]
    for layer in layers:
        if not isinstance(layer, MultiHead):
            raise UnsupportedError(
                f"collapse_curve: takes an Encoder or MultiHead layers, not {type(layer).__name__}; "
                "headwise examine measures any model"
            )
    return [(layer,) for layer in layers]


def _apply(layer: nn.Module, x: Tensor, *, skip: bool) -> Tensor:
    """A part of a layer with its skip connection removed or added."""
    skipped = x if skip else 0
    if not isinstance(layer, Residual):
        return layer(x) + skipped
    part, norm = layer.part, layer.norm  # of an Encoder: the norm is before the part or after the sum
    return part(norm(x)) + skipped if layer.norm_first else norm(part(x) + skipped)
