"""y_1 = x_1 + f(x_2), y_2 = x_2 + g(y_1): residual blocks whose inputs are recomputed from their outputs.

x_2 = y_2 - g(y_1), x_1 = y_1 - f(x_2).  Gomez et al. 2017; Reformer (Kitaev et al. 2020) with f attention and g the
feed-forward part.  Gradients equal the plain ones up to rounding; activation memory does not grow with depth, but f and
g run once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError
from headwise.shapes import same_kind


class Reversible(nn.Module):
    """A stack of pairs (f, g); `options`, such as masks, are passed to every f.  Dropout is the same in both passes."""

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        super().__init__()
        if not isinstance(pairs, (list, tuple)) or not all(map(_is_pair, pairs)):
            raise InputError("Reversible: pairs must be a sequence of pairs (f, g) of nn.Modules")
        if not pairs:
            raise InputError("Reversible: needs at least one pair (f, g), got none")
        self.f = nn.ModuleList(f for f, _ in pairs)
        self.g = nn.ModuleList(g for _, g in pairs)

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        same_kind("Reversible", x1=x1, x2=x2)
        if x1.shape != x2.shape:
            raise ShapeError(f"Reversible: x1 and x2 must agree, but have {tuple(x1.shape)} and {tuple(x2.shape)}")
        return _Reversible.apply(self, options, x1, x2, *self.parameters())

    def plain(self, x1: Tensor, x2: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """The same function with ordinary autograd, which stores every activation."""
        for f, g in zip(self.f, self.g, strict=True):
            x1 = x1 + f(x2, **options)
            x2 = x2 + g(x1)
        return x1, x2


def _is_pair(pair: object) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, nn.Module) for part in pair)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stack: Reversible, options: Mapping[str, Any], x1: Tensor, x2: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.stack, ctx.options, ctx.states = stack, options, []
        for f, g in zip(stack.f, stack.g, strict=True):
            ctx.states.append(_random_state(x1))
            x1 = x1 + f(x2, **options)
            ctx.states.append(_random_state(x1))
            x2 = x2 + g(x1)
        ctx.save_for_backward(x1, x2, *parameters)
        return x1, x2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        y1, y2, *parameters = ctx.saved_tensors
        d1, d2 = grad_outputs
        gradients: dict[int, Tensor] = {}
        pairs = list(zip(ctx.stack.f, ctx.stack.g, ctx.states[::2], ctx.states[1::2], strict=True))
        for f, g, state_f, state_g in reversed(pairs):
            output, gradient = _recompute(g, y1, d2, {}, state_g, gradients)
            y2, d1 = y2 - output, d1 + gradient
            output, gradient = _recompute(f, y2, d1, ctx.options, state_f, gradients)
            y1, d2 = y1 - output, d2 + gradient
        return (None, None, d1, d2, *(gradients.get(id(p)) for p in parameters))


def _recompute(
    part: nn.Module,
    x: Tensor,
    grad_output: Tensor,
    options: Mapping[str, Any],
    state: tuple[Tensor, Tensor | None],
    gradients: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """part(x) and the gradient of <part(x), grad_output> in x; those of its parameters are added to `gradients`."""
    x = x.detach().requires_grad_()
    parameters = [p for p in part.parameters() if p.requires_grad]
    devices = [] if state[1] is None else [x.device]
    with torch.enable_grad(), torch.random.fork_rng(devices=devices):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], x.device)
        out = part(x, **options)
    first, *rest = torch.autograd.grad(out, (x, *parameters), grad_output, allow_unused=True)
    for p, gradient in zip(parameters, rest, strict=True):
        if gradient is not None:
            gradients[id(p)] = gradients[id(p)] + gradient if id(p) in gradients else gradient
    return out.detach(), torch.zeros_like(x) if first is None else first


def _random_state(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None
