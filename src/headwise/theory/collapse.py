"""||res SAN(X)|| <= (4 H beta / sqrt(d_qk))^((3^L - 1) / 2) ||res X||^(3^L): pure attention loses rank, and how fast.

    res(X) = X - 1 mean(X)^T      the part of X in which tokens differ

||.|| is the composite "norm" sqrt(||.||_1 ||.||_inf), and beta >= ||W_QK^l||_1 ||W_V^l||_(1,inf) for all layers and
heads (Dong, Cordonnier & Loukas 2021, Theorem 2.2, with H heads).  Computed in logarithms, since 3^L overflows.  The
right side tends to zero only if sqrt(4 H beta / sqrt(d_qk)) ||res X|| < 1; otherwise the bound is true but vacuous.

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
from headwise.linalg.norms import composite_norm, one_norm
from headwise.nn.encoder import Encoder, Residual
from headwise.nn.multihead import MultiHead
from headwise.theory.stack import Stack
from headwise.theory.verdict import Verdict

SOURCE = "Dong, Cordonnier & Loukas 2021, Theorem 2.2"
SHRINKS = "sqrt(4 H beta / sqrt(d_qk)) ||res X|| < 1, so that the bound shrinks"
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


def beta_of(stack: Stack) -> float:
    """max over layers and heads of ||W_Q W_K^T||_1 ||W_V W_O||_(1,inf)."""
    return max((one_norm(layer.wq @ layer.wk.mT) * composite_norm(layer.w)).max().item() for layer in stack.layers)


def log_bound(depth: int, *, beta: float, heads: int, key_width: int, log_residual: float) -> float:
    """log of (4 H beta / sqrt(d_qk))^((3^L - 1) / 2) ||res X||^(3^L)."""
    power = 3.0**depth
    return (power - 1) / 2 * _rate(beta, heads, key_width) + power * log_residual if depth else log_residual


def log_bound_with_skips(
    depth: int, *, beta: float, heads: int, key_width: int, log_residual: float, shape: tuple[int, int]
) -> float:
    """log of the bound on ||res X_L|| for X of `shape` (n, d), where every layer adds its input."""
    root = math.sqrt(shape[0] * shape[1])
    crossed, rate = math.log(root + 1 / root), _rate(beta, heads, key_width)
    for _ in range(depth):
        added = rate + 3 * log_residual
        parts = (2 * log_residual, 2 * added, crossed + log_residual + added)
        log_residual = torch.tensor(parts, dtype=torch.float64).logsumexp(0).item() / 2
    return log_residual


def _rate(beta: float, heads: int, key_width: int) -> float:
    return math.log(4 * heads * beta / math.sqrt(key_width)) if beta > 0 else -math.inf


def collapse(stack: Stack, x: Tensor) -> Collapse:
    """Both sides of the bound for every depth up to L, for one input (n, d)."""
    beta = beta_of(stack)
    heads = max(layer.wq.shape[0] for layer in stack.layers)
    width = min(layer.wq.shape[-1] for layer in stack.layers)
    measured = [composite_norm(rest).log().item() for rest in stack.residuals(x.double())]
    known = {"beta": beta, "heads": heads, "key_width": width, "log_residual": measured[0]}
    depths = range(len(stack.layers) + 1)
    if stack.skip:
        shape = (x.shape[-2], x.shape[-1])
        bound = [log_bound_with_skips(depth, shape=shape, **known) for depth in depths]
    else:
        bound = [log_bound(depth, **known) for depth in depths]
    premises = {NO_SKIPS: not stack.skip, SHRINKS: _rate(beta, heads, width) / 2 + measured[0] < 0}
    return Collapse(measured, bound, beta, premises)


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
