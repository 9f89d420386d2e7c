"""A kernel becomes heads: how they look (exact or soft), where, and what that changes on a probe."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import InputError
from headwise.models.probe import parameters
from headwise.models.receipt import Receipt
from headwise.nn.tap_layers import GridQuadraticAttention, QuadraticAttention, ShiftAttention, TapLayer
from headwise.nn.taps import Taps
from headwise.operators.relative.quadratic import log_width

Mode = Callable[[Taps, Tensor, Tensor | None], TapLayer]
"""How the heads look: makes a layer from the taps, the weights (h, out, in/groups) and the bias."""


def exact(taps: Taps, weight: Tensor, bias: Tensor | None) -> ShiftAttention:
    """Hard shifts: equal to the convolution to rounding."""
    return ShiftAttention(taps, weight, bias)


def soft(alpha: float) -> Mode:
    """Quadratic softmax heads of sharpness alpha at the taps; every head's centre and widths are parameters.

    The output is off by about 20 exp(-alpha) of its size; centres get gradients of about alpha exp(-alpha), so 5 or 6
    trains and 20 is frozen.
    """
    _positive(alpha)

    def build(taps: Taps, weight: Tensor, bias: Tensor | None) -> QuadraticAttention:
        places = [torch.arange(k, dtype=torch.float64) * d for k, d in zip(taps.kernel, taps.dilation, strict=True)]
        centres = torch.cartesian_prod(*places).reshape(taps.heads, -1).to(weight)
        return QuadraticAttention(taps, weight, bias, centres=centres, log_widths=log_width(alpha).to(weight))

    return build


def soft_grid(alpha: float) -> Mode:
    """The same heads with shared centres along each axis: K row, one channel and K column products."""
    _positive(alpha)
    return lambda taps, weight, bias: GridQuadraticAttention(taps, weight, bias, alpha=alpha)


def taps_of(module: nn.Module) -> Taps:
    """The geometry of a convolution; 'same' pads one cell more behind than before where the reach is odd."""
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    reach = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if module.padding == "same":
        padding = [(r // 2, r - r // 2) for r in reach]
    elif module.padding == "valid":
        padding = [(0, 0) for _ in reach]
    else:
        padding = [(int(p), int(p)) for p in module.padding]
    return Taps(
        channels=module.in_channels,
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        dilation=tuple(module.dilation),
        padding=tuple(padding),
        border=module.padding_mode,
        groups=module.groups,
    )


def rewritten(
    what: str, taps: Taps, weight: Tensor, bias: Tensor | None, mode: Mode, *, probe: Tensor, expected: Tensor
) -> tuple[TapLayer, Receipt]:
    """The layer of a kernel (out, in/groups, *kernel), and its receipt; `expected` is the convolution of the probe."""
    with torch.no_grad():
        heads = weight.flatten(2).permute(2, 0, 1).contiguous().clone()  # (h, out, in/groups)
        new = mode(taps, heads, None if bias is None else bias.clone())
        found = new(probe)
    new.weight.requires_grad_(weight.requires_grad)
    if new.bias is not None and bias is not None:
        new.bias.requires_grad_(bias.requires_grad)
    axes = len(taps.kernel)
    maps = probe.shape[0] if probe.dim() == axes + 2 else 1
    uneven = any(before != after for before, after in taps.padding)
    receipt = Receipt(
        what=what,
        parameters_before=weight.numel() + (0 if bias is None else bias.numel()),
        parameters_after=parameters(new),
        cost_before=Cost(maps * math.prod(expected.shape[-axes:]) * weight.numel()),
        cost_after=new.cost(tuple(probe.shape[-axes:])).times(maps),
        largest_change=(found - expected).abs().max().item(),
        scale=expected.abs().max().item(),
        notes=("padding='same' with an odd reach: one cell more is padded behind than before",) if uneven else (),
    )
    return new, receipt


def _positive(alpha: float) -> None:
    if not 0 < alpha < float("inf"):
        raise InputError(f"soft: alpha must be a positive number, but is {alpha}")
