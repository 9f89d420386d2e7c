"""|P_q - e_(q + c)|_1 <= 2 (1 - (1 + s)^-D), s = 2 e^-alpha / (1 - e^-3 alpha): a sharp head is a shift, and how fast.

Theorem 1 of Cordonnier, Loukas & Jaggi 2020 says that K^D heads whose softmax is one-hot at the K^D shifts are a
convolution; its lemma that quadratic scores get there as alpha -> infinity.  Here both are measured: the equality, and
the rate.  Away from borders one axis has the weights e^(-alpha j^2) / (1 + 2 sum_(j>=1) e^(-alpha j^2)); from
j^2 >= 1 + 3 (j - 1) the sum is at most s / 2.  To first order the row is 4 D e^-alpha from one-hot, and its derivative
by a centre is at most 8 alpha e^-alpha / (1 - e^-3 alpha)^2: sharp heads stop learning where to look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.nn.tap_layers import ShiftAttention
from headwise.nn.taps import Taps
from headwise.operators.relative.quadratic import log_width, quadratic
from headwise.theory.verdict import Verdict

SOURCE = "Cordonnier, Loukas & Jaggi 2020, Theorem 1"
ROUNDING = 1e-12


def convolution_is_attention(taps: Taps, weight: Tensor, bias: Tensor | None, x: Tensor) -> Verdict:
    """max |sum_h P_h X W_h + b - conv(X)| / max |conv(X)| in float64, for weights (out, in/groups, *kernel)."""
    weight, bias, x = weight.double(), None if bias is None else bias.double(), x.double()
    layer = ShiftAttention(taps, weight.flatten(2).permute(2, 0, 1).contiguous(), bias)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(taps.kernel)]
    wide = taps.extend("convolution_is_attention", x, weight)
    expected = convolve(wide, weight, bias, stride=taps.stride, dilation=taps.dilation, groups=taps.groups)
    change = (layer(x) - expected.reshape(layer(x).shape)).abs().amax() / expected.abs().amax()
    return Verdict(
        claim="K^D heads that are shifts are a convolution",
        source=SOURCE,
        measured=change.item(),
        bound=ROUNDING,
        premises={"one head for each tap": weight[0, 0].numel() == taps.heads},
    )


def missed_mass(alpha: float, axes: int) -> float:
    """1 - (1 + s)^-D, an upper bound of the weight a head of sharpness alpha puts elsewhere than on its centre."""
    s = 2 * math.exp(-alpha) / -math.expm1(-3 * alpha)
    return -math.expm1(-axes * math.log1p(s))


def sharp_heads_are_shifts(alpha: float, grid: Sequence[int], centre: Sequence[int]) -> Verdict:
    """max over queries of |P_q - e_(q + centre)|_1 against 2 (1 - (1 + s)^-D), where q + centre is in the grid."""
    p = _rows(alpha, grid, centre)
    inside, target = _targets(grid, centre)
    off = (1 - p[inside].gather(-1, target[inside, None]).squeeze(-1)) * 2  # rows sum to one
    return Verdict(
        claim=f"a quadratic head of alpha = {alpha:g} is one-hot",
        source=SOURCE + ", its lemma with a rate",
        measured=off.amax().item() if len(off) else math.nan,
        bound=2 * missed_mass(alpha, len(grid)),
        premises={"some query sees its centre": bool(inside.any()), "alpha is positive": alpha > 0},
    )


def soft_output_error(alpha: float, taps: Taps, weight: Tensor, x: Tensor) -> float:
    """max_o sum_h |W_h|_1 (1 - (1 + s)^-D) range(X): no output of soft heads is further from the convolution's.

    The rows of P_h - shift_h sum to zero, so each moves its mass by at most the range of X (the padding included).
    """
    wide = taps.extend("soft_output_error", x, weight)
    spread = (wide.amax() - wide.amin()).item()
    return weight.flatten(1).abs().sum(1).amax().item() * missed_mass(alpha, len(taps.kernel)) * spread


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
    """Multiply-adds of one head of width d on a grid of N cells, from tokens to output, by positional encoding.

    absolute       N^2 2d + 3 N d^2     projections once for all pairs (d^3 a pair, as one source has it, is a slip)
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


def _rows(alpha: float, grid: Sequence[int], centre: Sequence[int]) -> Tensor:
    centres = torch.tensor(centre, dtype=torch.float64)
    return quadratic(grid, centres, log_width(alpha).double()).dense()


def _targets(grid: Sequence[int], centre: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which queries have their centre inside the grid, and its number."""
    inside, target = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    for g, c in zip(grid, centre, strict=True):
        at = torch.arange(g) + c
        inside = (inside[:, None] & (at >= 0) & (at < g)).flatten()
        target = (target[:, None] * g + at.clamp(0, g - 1)).flatten()
    return inside, target
