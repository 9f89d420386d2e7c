"""|P_q - e_(q + c)|_1 <= 2 (1 - (1 + s)^-D), s = 2 e^-alpha / (1 - e^-3 alpha): how fast a sharp head becomes a shift.

Theorem 1 of Cordonnier, Loukas & Jaggi 2020: K^D heads whose softmax is one-hot at the K^D kernel cells are a
convolution; its lemma: quadratic scores become one-hot as alpha -> infinity.  This file measures the equality and the
rate.  Away from borders one axis has the weights e^(-alpha j^2) / (1 + 2 sum_(j>=1) e^(-alpha j^2)); since
j^2 >= 1 + 3 (j - 1) the sum is at most s / 2.  To first order a row differs from one-hot by 4 D e^-alpha, and its
derivative by a centre is at most 8 alpha e^-alpha / (1 - e^-3 alpha)^2: centres of sharp heads stop learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.nn.kernel_attention import ConvolutionGeometry, ShiftAttention
from headwise.operators.relative.quadratic import log_width, quadratic
from headwise.theory.verdict import Verdict

SOURCE = "Cordonnier, Loukas & Jaggi 2020, Theorem 1"
ROUNDING = 1e-12


def convolution_is_attention(geometry: ConvolutionGeometry, weight: Tensor, bias: Tensor | None, x: Tensor) -> Verdict:
    """max |sum_h P_h X W_h + b - conv(X)| / max |conv(X)| in float64, P_h applied as operators, conv by torch.

    weight (out, in/groups, *kernel), x (b, in, *grid).
    """
    layer = ShiftAttention(geometry, weight.double(), None if bias is None else bias.double())
    expected = layer(x.double())
    change = (layer.sum_over_heads(x.double()) - expected).abs().amax() / expected.abs().amax()
    return Verdict(
        claim="K^D heads that are shifts are a convolution",
        source=SOURCE,
        measured=change.item(),
        bound=ROUNDING,
        premises={"one head per kernel cell": weight[0, 0].numel() == geometry.heads},
    )


def missed_mass(alpha: float, axes: int) -> float:
    """1 - (1 + s)^-D: an upper bound on the weight that a head of sharpness alpha puts outside its centre cell."""
    s = 2 * math.exp(-alpha) / -math.expm1(-3 * alpha)
    return -math.expm1(-axes * math.log1p(s))


def sharp_heads_are_shifts(alpha: float, grid: Sequence[int], centre: Sequence[int]) -> Verdict:
    """max over queries of |P_q - e_(q + centre)|_1 against 2 (1 - (1 + s)^-D), where q + centre is in the grid."""
    p = quadratic(grid, torch.tensor(centre, dtype=torch.float64), log_width(alpha).double()).dense()
    inside, target = _targets(grid, centre)
    off = (1 - p[inside].gather(-1, target[inside, None]).squeeze(-1)) * 2  # rows sum to one
    return Verdict(
        claim=f"a quadratic head of alpha = {alpha:g} is one-hot",
        source=SOURCE + ", its lemma with a rate",
        measured=off.amax().item() if len(off) else math.nan,
        bound=2 * missed_mass(alpha, len(grid)),
        premises={"some query has its centre in the grid": bool(inside.any()), "alpha is positive": alpha > 0},
    )


def soft_output_error(alpha: float, geometry: ConvolutionGeometry, weight: Tensor, x: Tensor) -> float:
    """max_o sum_h |W_h|_1 (1 - (1 + s)^-D) range(X): an upper bound on |soft heads - convolution| of any output.

    The rows of P_h - shift_h sum to zero, so each moves its mass by at most the range of X (padding included).
    """
    padded = geometry.pad(x)
    spread = (padded.amax() - padded.amin()).item()
    return weight.flatten(1).abs().sum(1).amax().item() * missed_mass(alpha, geometry.axes) * spread


def centres_stop_learning(alpha: float, grid: int) -> Verdict:
    """max_q sum_k |dP_qk / dcentre| on a line of `grid` cells against 8 alpha e^-alpha / (1 - e^-3 alpha)^2."""

    def rows(centre: Tensor) -> Tensor:
        return quadratic((grid,), centre, log_width(alpha).double()).dense()

    jacobian = torch.autograd.functional.jacobian(rows, torch.zeros(1, dtype=torch.float64))
    assert isinstance(jacobian, Tensor)
    return Verdict(
        claim=f"at alpha = {alpha:g} a centre's gradient is of order alpha e^-alpha",
        source=SOURCE + ", differentiated",
        measured=jacobian.abs().sum(-2).amax().item(),
        bound=8 * alpha * math.exp(-alpha) / math.expm1(-3 * alpha) ** 2,
        premises={"alpha is positive": alpha > 0},
    )


def encoding_costs(grid: Sequence[int], d: int) -> dict[str, Cost]:
    """Cost of one head of width d on a grid of N cells, from tokens to output, for each positional encoding.

    absolute       N^2 2d + 3 N d^2     tokens are projected once, not once per pair
    relative       as absolute, and t d^2 + N t d for the t = prod(2 g - 1) differences
    quadratic      N^2 (1 + D) + N^2 d + N d^2, dense
    factored       N d sum(g) + N d^2, as a Kronecker product: O(N^1.5 d) on a square grid
    """
    n, axes, t = math.prod(grid), len(grid), math.prod([2 * g - 1 for g in grid])
    absolute = 2 * n * n * d + 3 * n * d * d
    return {
        "absolute": Cost(absolute, n * n),
        "relative": Cost(absolute + t * d * d + n * t * d, n * n + n * t),
        "quadratic": Cost(n * n * (1 + axes) + n * n * d + n * d * d, n * n),
        "factored": Cost(n * d * sum(grid) + n * d * d, n * d),
    }


def _targets(grid: Sequence[int], centre: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Whether q + centre is inside the grid, and its cell number, for every query q."""
    inside, target = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    for g, c in zip(grid, centre, strict=True):
        at = torch.arange(g) + c
        inside = (inside[:, None] & (at >= 0) & (at < g)).flatten()
        target = (target[:, None] * g + at.clamp(0, g - 1)).flatten()
    return inside, target
