"""conv(X) = sum over kernel cells h of shift_h(X) W_h + b: a convolution as attention with one head per kernel cell.

Theorem 1 of Cordonnier, Loukas & Jaggi 2020, for every kernel, stride, dilation, padding, border and grouping of
`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`.  Modes choose the heads: shifts (`exact`, equal to the convolution), quadratic
softmax heads with trainable centres (`soft(alpha)`, relative error about 20 exp(-alpha)), or the same with queries and
keys of content that start at zero (`with_content(alpha)`).  The given module is not modified: `convert` returns a new
module and a receipt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from headwise.cost import Cost
from headwise.errors import InputError, UnsupportedError
from headwise.models.receipt import Left, Receipt, counted_cost, evaluate, largest_change, parameter_count
from headwise.nn.kernel_attention import (
    PAD_MODES,
    ConvolutionGeometry,
    MapAttention,
    QuadraticAttention,
    SeparableQuadraticAttention,
    ShiftAttention,
    is_channels_last,
)
from headwise.nn.relative_attention import RelativeAttention
from headwise.operators.relative.quadratic import log_width
from headwise.operators.relative.shift import Border

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WHY_NOT_TRANSPOSED = (
    "a transposed convolution spreads each input over the kernel, so an output cell sums a varying number of kernel "
    "cells: its heads are columns of P, not rows, and no softmax over the keys equals it; upsample and convolve instead"
)

Mode = Callable[[ConvolutionGeometry, Tensor, Tensor | None], MapAttention]
"""`(geometry, weight, bias) -> layer` with the weight and bias of the convolution: `exact`, `soft(alpha)`, ..."""


def exact(geometry: ConvolutionGeometry, weight: Tensor, bias: Tensor | None) -> ShiftAttention:
    """Mode: heads that shift, equal to the convolution and as fast."""
    return ShiftAttention(geometry, weight, bias)


def soft(alpha: float) -> Mode:
    """Mode: quadratic softmax heads of sharpness alpha at the kernel cells; centres and widths are parameters.

    The relative error of the output is about 20 exp(-alpha), gradients of centres are of order alpha exp(-alpha): 5 or
    6 can be trained, at 20 the centres no longer move.
    """
    _check_alpha(alpha)

    def build(geometry: ConvolutionGeometry, weight: Tensor, bias: Tensor | None) -> QuadraticAttention:
        axes = zip(geometry.kernel_size, geometry.dilation, strict=True)
        cells = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) * d for k, d in axes))
        centres = cells.reshape(geometry.heads, -1).to(weight)
        return QuadraticAttention(geometry, weight, bias, centres=centres, log_widths=log_width(alpha).to(weight))

    return build


def soft_separable(alpha: float) -> Mode:
    """Mode: as `soft`, with centres shared along each axis: K row, one channel and K column products, not K^2 heads."""
    _check_alpha(alpha)
    return lambda geometry, weight, bias: SeparableQuadraticAttention(geometry, weight, bias, alpha=alpha)


def with_content(alpha: float, key_width: int = 16) -> Mode:
    """Mode: a RelativeAttention that starts as `soft(alpha)`, with W_q = W_k = 0, and can learn to look at content.

    b h m n scores are formed, where the other modes form none.
    """
    _check_alpha(alpha)
    return partial(RelativeAttention.from_kernel, alpha=alpha, key_width=key_width)


def convert(module: nn.Module, mode: Mode = exact, *, probe: Tensor | None = None) -> tuple[nn.Module, Receipt]:
    """A convolution, or a copy of a model with every convolution in it, as attention; and a receipt.

    `probe` is an input of the module, on which the receipt's costs and largest change are measured.  Without it, each
    layer is measured by itself on standard normal numbers.

    >>> layer, receipt = convert(nn.Conv2d(3, 8, 3, padding=1))
    >>> receipt.largest_change < 1e-5, receipt.parameters_before == receipt.parameters_after
    (True, True)
    """
    reason = _why_not(module)
    if reason is None:
        return _convert_layer("convolution", cast(Convolution, module), mode, probe)
    if _is_convolution(module):
        raise UnsupportedError(f"convert: {type(module).__name__}: {reason}")
    return _convert_model(module, mode, probe)


def to_convolution(module: nn.Module) -> nn.Module:
    """A copy with every ShiftAttention as a convolution again; the kernels are equal bit by bit."""
    if isinstance(module, ShiftAttention):
        return _convolution_from(module)
    if isinstance(module, MapAttention):
        raise UnsupportedError(
            f"to_convolution: the heads of {type(module).__name__} spread over several cells, which no kernel of the "
            "same size does; convert with mode=exact, or read its rounded centres"
        )
    layers = {name: part for name, part in module.named_modules() if isinstance(part, ShiftAttention)}
    if not layers:
        raise InputError(f"to_convolution: {type(module).__name__} holds no ShiftAttention layer")
    return _with_layers(module, {name: _convolution_from(layer) for name, layer in layers.items()})


def geometry_of(module: Convolution) -> ConvolutionGeometry:
    return ConvolutionGeometry.from_torch(
        module.in_channels,
        module.kernel_size,
        module.stride,
        module.dilation,
        cast("str | tuple[int, ...]", module.padding),
        cast(Border, module.padding_mode),
        module.groups,
    )


def default_probe(geometry: ConvolutionGeometry, like: Tensor) -> Tensor:
    """Standard normal numbers (seeded) on the smallest map with three queries along each axis."""
    sides = []
    for reach, stride, (before, after) in zip(geometry.reach, geometry.stride, geometry.padding, strict=True):
        # reflect and circular borders also need a map wider than their padding
        sides.append(max(1, reach + 1 + 2 * stride - before - after, before + 1, after + 1))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, geometry.in_channels, *sides, generator=generator).to(like)


def attention_from_kernel(
    name: str,
    geometry: ConvolutionGeometry,
    weight: Tensor,
    bias: Tensor | None,
    mode: Mode,
    probe: Tensor,
    expected: Tensor,
) -> tuple[MapAttention, Receipt]:
    """The attention layer of one kernel and its receipt; `expected` is the convolution of the probe."""
    with torch.no_grad():
        layer = mode(geometry, weight.clone(), None if bias is None else bias.clone())
        output = layer(probe)
    layer.weight.requires_grad_(weight.requires_grad)
    if layer.bias is not None and bias is not None:
        layer.bias.requires_grad_(bias.requires_grad)
    maps = probe.shape[0] if probe.dim() == geometry.axes + 2 else 1
    grid = tuple(probe.shape[-geometry.axes :])
    uneven = any(before != after for before, after in geometry.padding)
    layout = "channels last" if is_channels_last(weight) else "contiguous"
    receipt = Receipt(
        what=name,
        parameters_before=weight.numel() + (0 if bias is None else bias.numel()),
        parameters_after=parameter_count(layer),
        cost_before=Cost(maps * math.prod(expected.shape[-geometry.axes :]) * weight.numel()),
        cost_after=layer.cost(grid).times(maps),
        largest_change=(output - expected).abs().max().item(),
        scale=expected.abs().max().item(),
        notes=("padding='same' with an odd reach: one cell more is padded after the map than before it",)
        if uneven
        else (),
        weights=f"{str(weight.dtype).removeprefix('torch.')}, {layout}",
    )
    return layer, receipt


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < float("inf"):
        raise InputError(f"soft: alpha must be a positive number, but is {alpha}")


def _why_not(module: nn.Module) -> str | None:
    """Why this module cannot be converted; None for a convolution that can."""
    if isinstance(module, TRANSPOSED):
        return WHY_NOT_TRANSPOSED
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit: convert before that"
    if _is_quantised(module):
        return f"{type(module).__name__} has quantised weights: convert the float model, and quantise afterwards"
    if isinstance(module, LazyModuleMixin):
        return "it has no weights yet: run it once on an input"
    if is_parametrized(module):
        return "its weight is computed by a parametrization: remove it with torch.nn.utils.parametrize first"
    if type(module) not in CONVOLUTIONS:
        return f"{type(module).__name__} may compute something else than nn.Conv1d, nn.Conv2d or nn.Conv3d"
    module = cast(Convolution, module)
    if "forward" in vars(module):
        return "its forward was replaced, so it may compute something else than a convolution"
    if "weight" not in module._parameters:  # weight_norm and spectral_norm of old, and pruning
        return "its weight is computed by a hook (weight_norm, spectral_norm, prune): make it permanent by remove first"
    if module.weight.is_meta:
        return "its weights are on the meta device: load them first"
    if not module.weight.dtype.is_floating_point:
        return f"its weights are {module.weight.dtype}, not real floating point"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it carries hooks, which would be lost: remove them first"
    if module.padding_mode not in PAD_MODES:
        return f"its padding mode {module.padding_mode!r} is not one of {', '.join(PAD_MODES)}"
    return None


def _convert_layer(name: str, module: Convolution, mode: Mode, probe: Tensor | None) -> tuple[MapAttention, Receipt]:
    geometry = geometry_of(module)
    probe = default_probe(geometry, module.weight) if probe is None else probe
    geometry.check_input(f"convert: {name}", probe, module.weight)
    with torch.no_grad():
        expected = module(probe)
    layer, receipt = attention_from_kernel(name, geometry, module.weight, module.bias, mode, probe, expected)
    for attribute in (*module.__constants__, "transposed"):
        if not hasattr(layer, attribute):
            setattr(layer, attribute, getattr(module, attribute))
    return layer.train(module.training), receipt


def _convert_model(model: nn.Module, mode: Mode, probe: Tensor | None) -> tuple[nn.Module, Receipt]:
    layers: dict[str, nn.Module] = {}
    parts: list[Receipt] = []
    left: list[Left] = []
    tied = _tied(model)
    for name, part in model.named_modules():
        reason = _why_not(part)
        if reason is None and name in tied:
            reason = f"its weight is also that of {tied[name]}, and a converted one would not be"
        if reason is None:
            layers[name], receipt = _convert_layer(name, cast(Convolution, part), mode, None)
            parts.append(receipt)
        elif _is_convolution(part):
            left.append(Left(name, reason))
    if not layers:
        reasons = "; ".join(f"{entry.what}: {entry.why}" for entry in left)
        reasons = reasons or "it holds no nn.Conv1d, nn.Conv2d or nn.Conv3d"
        raise InputError(f"convert: nothing to convert in {type(model).__name__}: {reasons}")
    new = _with_layers(model, layers)
    if probe is None:
        worst = max(parts, key=lambda receipt: receipt.largest_change)
        change, scale = worst.largest_change, worst.scale
        cost_before = Cost(sum(part.cost_before.multiply_adds for part in parts))
        cost_after = Cost(sum(part.cost_after.multiply_adds for part in parts))
        notes = ("no probe was given: costs are sums, and the change is the largest, over layers measured separately",)
    else:
        old_run, new_run = partial(evaluate, model, probe), partial(evaluate, new, probe)
        change, scale = largest_change(old_run, new_run)
        cost_before, cost_after = counted_cost(old_run), counted_cost(new_run)
        notes = ()
    receipt = Receipt(
        what=type(model).__name__,
        parameters_before=parameter_count(model),
        parameters_after=parameter_count(new),
        cost_before=cost_before,
        cost_after=cost_after,
        largest_change=change,
        scale=scale,
        parts=tuple(parts),
        left=tuple(left),
        notes=notes,
        weights="; ".join(dict.fromkeys(part.weights for part in parts)),
    )
    return new, receipt


def _is_convolution(module: nn.Module) -> bool:
    """Whether this is a convolution of some kind; torch.jit keeps only the name of a class."""
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name in {kind.__name__ for kind in (*CONVOLUTIONS, *TRANSPOSED)}
    return isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) or _is_quantised(module)


def _is_quantised(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("torch.ao.nn.") and ".quantized" in kind.__module__ and "Conv" in kind.__name__


def _with_layers(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """A copy of the model with some layers replaced; a layer used in several places stays one layer."""
    memo: dict[int, object] = {id(model.get_submodule(name)): layer for name, layer in layers.items()}
    for part in model.modules():  # weights that a hook computes anew in every forward; deepcopy refuses them
        computed = [value for value in vars(part).values() if isinstance(value, Tensor) and not value.is_leaf]
        memo.update((id(value), value.detach().clone()) for value in computed)
    return copy.deepcopy(model, memo)


def _tied(model: nn.Module) -> dict[str, str]:
    """Names of modules that share a parameter with another module -> the other's name."""
    owners: dict[int, list[str]] = {}
    for name, part in model.named_modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {name: next(n for n in names if n != name) for names in owners.values() if len(names) > 1 for name in names}


def _convolution_from(layer: ShiftAttention) -> nn.Module:
    g = layer.geometry
    even = all(before == after for before, after in g.padding)
    kind: Any = CONVOLUTIONS[g.axes - 1]
    conv = kind(
        g.in_channels,
        layer.out_channels,
        g.kernel_size,
        stride=g.stride,
        padding=tuple(before for before, _ in g.padding) if even else "same",
        dilation=g.dilation,
        groups=g.groups,
        bias=layer.bias is not None,
        padding_mode=g.border,
        device="meta",
    )
    if geometry_of(conv) != g:
        raise UnsupportedError(
            f"to_convolution: padding {g.padding} differs before and after, which nn.Conv{g.axes}d does not support"
        )
    conv.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
    if layer.bias is not None:
        conv.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return conv.train(layer.training)
