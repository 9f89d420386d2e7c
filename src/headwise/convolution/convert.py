"""conv(X) = sum over taps t of shift_t(X) W_t + b: any trained convolution as attention with one head a tap, and back.

Theorem 1 of Cordonnier, Loukas & Jaggi 2020, for every kernel, stride, dilation, padding, border and grouping of
`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`.  The heads are hard shifts (`exact`, equal to rounding) or quadratic softmax
heads with trainable centres (`soft(alpha)`, error about 20 exp(-alpha)).  What is given is never changed: a new module
comes back, and a receipt.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from headwise.convolution.kernel_heads import Mode, exact, rewritten, taps_of
from headwise.cost import Cost
from headwise.errors import InputError, UnsupportedError
from headwise.models.probe import largest_change, layer_probe, multiply_adds, parameters
from headwise.models.receipt import Left, Receipt
from headwise.nn.tap_layers import ShiftAttention, TapLayer
from headwise.nn.taps import FILL

CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WHY_NOT_TRANSPOSED = (
    "a transposed convolution spreads each input over the kernel, so an output cell adds up a varying number of taps: "
    "its heads are columns of P, not rows, and no softmax over the keys is equal to it; upsample and convolve instead"
)


def convert(module: nn.Module, mode: Mode = exact, *, probe: Tensor | None = None) -> tuple[nn.Module, Receipt]:
    """One convolution, or every convolution inside a model, as attention; and what changed.

    `probe` is an input of the module: the receipt's costs and its largest change are measured on it.  Without one, each
    layer is probed by itself with standard normal numbers.

    >>> layer, receipt = convert(nn.Conv2d(3, 8, 3, padding=1))
    >>> receipt.largest_change < 1e-5, receipt.parameters_before == receipt.parameters_after
    (True, True)
    """
    why = refusal(module)
    if isinstance(module, TRANSPOSED):
        raise UnsupportedError(f"convert: {type(module).__name__}: {why}")
    if why is None:
        return _convert_layer("convolution", module, mode, probe)
    if isinstance(module, tuple(CONVOLUTIONS)):
        raise UnsupportedError(f"convert: {type(module).__name__}: {why}")
    return _convert_model(module, mode, probe)


def refusal(module: nn.Module) -> str | None:
    """Why this module is not converted, None where it is a convolution that is."""
    if isinstance(module, TRANSPOSED):
        return WHY_NOT_TRANSPOSED
    if isinstance(module, LazyModuleMixin):
        return "it has no weights yet: run it once on an input"
    if is_parametrized(module):
        return "its weight is computed by a parametrization: remove it with torch.nn.utils.parametrize first"
    axes = CONVOLUTIONS.get(type(module))
    if axes is None:
        return f"{type(module).__name__} may compute something else than nn.Conv1d, nn.Conv2d or nn.Conv3d"
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    if not module.weight.dtype.is_floating_point:
        return f"its weights are {module.weight.dtype}, not real floating point"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "it carries hooks, which would be lost: remove them first (weight_norm and spectral_norm are hooks)"
    if module.padding_mode not in FILL:
        return f"its padding mode {module.padding_mode!r} is not one of {', '.join(FILL)}"
    return None


def to_convolution(module: nn.Module) -> nn.Module:
    """Back to convolutions, with the same kernel bit by bit, where all heads are shifts; models are walked."""
    if isinstance(module, ShiftAttention):
        return _to_layer(module)
    if isinstance(module, TapLayer):
        raise UnsupportedError(
            f"to_convolution: the heads of {type(module).__name__} spread over several cells, and no kernel of the "
            "same size does that; convert with mode=exact, or read its rounded centres"
        )
    found = [name for name, part in module.named_modules() if isinstance(part, ShiftAttention)]
    if not found:
        raise InputError(f"to_convolution: {type(module).__name__} holds no ShiftAttention layer")
    return _replaced(module, {name: _to_layer(module.get_submodule(name)) for name in found})


def _convert_layer(what: str, module: nn.Module, mode: Mode, probe: Tensor | None) -> tuple[TapLayer, Receipt]:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    taps = taps_of(module)
    probe = layer_probe(taps, module.weight) if probe is None else probe
    taps.extend(f"convert: {what}", probe, module.weight)  # complains of a probe that does not fit
    with torch.no_grad():
        expected = module(probe)
    new, receipt = rewritten(what, taps, module.weight, module.bias, mode, probe=probe, expected=expected)
    return new.train(module.training), receipt


def _convert_model(model: nn.Module, mode: Mode, probe: Tensor | None) -> tuple[nn.Module, Receipt]:
    new_layers: dict[str, nn.Module] = {}
    parts: list[Receipt] = []
    left: list[Left] = []
    tied = _tied(model)
    for name, part in model.named_modules():
        why = refusal(part)
        if why is not None:
            if isinstance(part, (*CONVOLUTIONS, *TRANSPOSED)):
                left.append(Left(name, why))
        elif name in tied:
            left.append(Left(name, f"its weight is also that of {tied[name]}, and a converted one would not be"))
        else:
            new_layers[name], receipt = _convert_layer(name, part, mode, None)
            parts.append(receipt)
    if not new_layers:
        said = "; ".join(f"{entry.what}: {entry.why}" for entry in left) or "it holds no nn.Conv1d, Conv2d or Conv3d"
        raise InputError(f"convert: nothing to convert in {type(model).__name__}: {said}")
    new = _replaced(model, new_layers)
    if probe is None:
        # the whole was not run: its change is that of the layer that changed most
        worst = max(parts, key=lambda receipt: receipt.largest_change)
        change, scale = worst.largest_change, worst.scale
        costs = (
            Cost(sum(part.cost_before.multiply_adds for part in parts)),
            Cost(sum(part.cost_after.multiply_adds for part in parts)),
        )
        notes = ("no probe was given: costs are sums and the change is the largest over the layers, each by itself",)
    else:
        change, scale = largest_change(model, new, probe)
        costs, notes = (multiply_adds(model, probe), multiply_adds(new, probe)), ()
    receipt = Receipt(
        what=type(model).__name__,
        parameters_before=parameters(model),
        parameters_after=parameters(new),
        cost_before=costs[0],
        cost_after=costs[1],
        largest_change=change,
        scale=scale,
        parts=tuple(parts),
        left=tuple(left),
        notes=notes,
    )
    return new, receipt


def _replaced(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """A copy of the model with some of its layers replaced; a layer used in several places stays one layer."""
    memo: dict[int, object] = {id(model.get_submodule(name)): layer for name, layer in layers.items()}
    return copy.deepcopy(model, memo)


def _tied(model: nn.Module) -> dict[str, str]:
    """Names of convolutions whose parameters are also another module's -> the other's name."""
    owners: dict[int, list[str]] = {}
    for name, part in model.named_modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {
        name: next(other for other in names if other != name)
        for names in owners.values()
        if len(names) > 1
        for name in names
    }


def _to_layer(module: nn.Module) -> nn.Module:
    assert isinstance(module, ShiftAttention)
    t = module.taps
    kind = {axes: cls for cls, axes in CONVOLUTIONS.items()}[len(t.kernel)]
    even = all(before == after for before, after in t.padding)
    conv = kind(
        t.channels,
        module.outputs,
        t.kernel,
        stride=t.stride,
        padding=tuple(before for before, _ in t.padding) if even else "same",
        dilation=t.dilation,
        groups=t.groups,
        bias=module.bias is not None,
        padding_mode=t.border,
        device="meta",
    )
    conv.weight = nn.Parameter(
        module.weight.detach().permute(1, 2, 0).unflatten(-1, t.kernel).clone(), module.weight.requires_grad
    )
    if module.bias is not None:
        conv.bias = nn.Parameter(module.bias.detach().clone(), module.bias.requires_grad)
    if not even and taps_of(conv) != t:
        raise UnsupportedError(
            f"to_convolution: padding {t.padding} differs before and after, which no nn.Conv{len(t.kernel)}d has"
        )
    return conv.train(module.training)
