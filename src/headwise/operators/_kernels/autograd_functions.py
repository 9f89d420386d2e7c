"""Hand-written forward and backward passes that still work with autograd, vmap and second derivatives.

A kernel is (b, rows, width) tensors in, one tensor out, with what its backward needs beside it.  The first derivative
is the kernel's own `pull`; the second goes through `plain`, the same function in differentiable operations; vmap folds
the mapped axis into the batch axis b, which every kernel treats alike.  Integer and boolean inputs come last.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The result, then what `pull` needs; all with the batch axis first."""
        ...

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients of <result, pull> in the floating inputs; `tensors` are the inputs, then all of `forward`."""
        ...

    def plain(self, *tensors: Tensor) -> Tensor:
        """The result again, from operations that can be differentiated any number of times and on any device."""
        ...


def run(kernel: Kernel, *tensors: Tensor) -> Tensor:
    """kernel(*tensors): fast on a CPU, plain elsewhere and where torch.compile traces (and fuses by itself)."""
    if tensors[0].device.type != "cpu" or torch.compiler.is_compiling():
        return kernel.plain(*tensors)
    return Forward.apply(kernel, sum(x.is_floating_point() for x in tensors), *tensors)[0]


def rounded(out: Tensor, v: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
    """The result in the dtype of v, `kept`, and for half precision the result before it was rounded.

    Gradients need more digits than the result: <result, pull> of a row is subtracted from what nearly cancels it.
    """
    return (out, *kept) if out.dtype == v.dtype else (out.to(v.dtype), *kept, out)


def unrounded(
    tensors: tuple[Tensor, ...], v: Tensor, kept: int
) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
    """Inputs, the result with all its digits and what was kept, from inputs followed by what `rounded` returned."""
    if v.dtype.itemsize > 2:
        return tensors[: -kept - 1], tensors[-kept - 1], tensors[-kept:]
    return tensors[: -kept - 2], tensors[-1], tensors[-kept - 1 : -1]


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, floating: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return kernel.forward(*_by_rows(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel, ctx.floating, *tensors = inputs
        ctx.inputs = len(tensors)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(pulls[0].device.type, enabled=False):  # backward may be called inside autocast
            gradients = Pull.apply(ctx.kernel, ctx.inputs, pulls[0], *ctx.saved_tensors)
        return (None, None, *gradients, *(None,) * (ctx.inputs - ctx.floating))

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, dims: Any, kernel: Kernel, floating: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = Forward.apply(kernel, floating, *_folded(info.batch_size, dims[2:], tensors))
        return _unfolded(info.batch_size, out)


class Pull(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, inputs: int, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return kernel.pull(*_by_rows((pull, *tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel, count, pull, *tensors = inputs
        ctx.floating, ctx.rest = len(output), len(tensors) - len(output)
        ctx.save_for_backward(pull, *tensors[:count])

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        pull, *tensors = ctx.saved_tensors
        floating, others = tensors[: ctx.floating], tensors[ctx.floating :]

        def first(pull: Tensor, *floating: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(lambda *xs: ctx.kernel.plain(*xs, *others), *floating)[1](pull)

        return (None, None, *torch.func.vjp(first, pull, *floating)[1](pulls), *(None,) * ctx.rest)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, dims: Any, kernel: Kernel, inputs: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = Pull.apply(kernel, inputs, *_folded(info.batch_size, dims[2:], tensors))
        return _unfolded(info.batch_size, out)


def _by_rows(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Each laid out row after row: torch's fused kernel, called directly, takes the last axis for contiguous."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _folded(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The mapped axis moved into the batch axis."""
    moved = [
        x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0) for x, axis in zip(tensors, dims, strict=True)
    ]
    return [x.flatten(0, 1) for x in moved]


def _unfolded(size: int, out: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)
