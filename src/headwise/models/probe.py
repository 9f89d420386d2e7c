"""max |new(x) - old(x)| on a probe x, and the multiply-adds of both: how a rewrite is measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.cost import Cost
from headwise.errors import InputError
from headwise.nn.taps import Taps
from headwise.testing.counting import count_multiply_adds


def layer_probe(taps: Taps, like: Tensor) -> Tensor:
    """Standard normal numbers (seeded) on the smallest map with three queries an axis."""
    sides = []
    for r, s, (before, after) in zip(taps.reach, taps.stride, taps.padding, strict=True):
        # reflect and circular borders also need a map wider than their padding
        sides.append(max(1, r + 1 + 2 * s - before - after, before + 1, after + 1))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, taps.channels, *sides, generator=generator).to(like)


def largest_change(old: nn.Module, new: nn.Module, probe: Tensor) -> tuple[float, float]:
    """(max |new - old|, max |old|) over every tensor of the output, in evaluation mode and without gradients."""
    return change_of(lambda: run(old, probe), lambda: run(new, probe))


def change_of(old: Callable[[], object], new: Callable[[], object]) -> tuple[float, float]:
    with torch.no_grad():
        expected, found = _tensors(old()), _tensors(new())
    change = max(((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)), default=0.0)
    return change, max((x.abs().max().item() for x in expected), default=0.0)


def run(module: nn.Module, probe: Tensor) -> object:
    """One call in evaluation mode; the training flags of all parts are as before afterwards."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            return module(probe)
    except RuntimeError as error:
        raise InputError(
            f"{type(module).__name__} does not run on a probe of shape {tuple(probe.shape)}: {error}"
        ) from error
    finally:
        for part, flag in flags:
            part.training = flag


def multiply_adds(module: nn.Module, probe: Tensor) -> Cost:
    return multiply_adds_of(lambda: run(module, probe))


def multiply_adds_of(call: Callable[[], object]) -> Cost:
    """Counted, not derived: the products torch performs in one call."""
    return Cost(count_multiply_adds(call).products)


def parameters(module: nn.Module) -> int:
    # a lazy layer that has not run has parameters of no size yet
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.detach()] if output.numel() else []
    if isinstance(output, dict):
        return [x for value in output.values() for x in _tensors(value)]
    if isinstance(output, (tuple, list)):
        return [x for value in output for x in _tensors(value)]
    return []
