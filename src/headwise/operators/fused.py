"""A fast forward and a fast backward written by hand, that autograd, vmap and second derivatives still understand.

A kernel is (b, rows, width) tensors in, one tensor out, with what its backward needs beside it.  The first derivative
is the kernel's own `pull`; the second goes through `plain`, the same function in differentiable operations; vmap folds
the mapped axis into the batch axis b, which every kernel treats alike.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The result, then what `pull` wants kept; all with the batch axis first."""
        ...

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients of <result, pull> with respect to the inputs; `tensors` are the inputs, then all of `forward`."""
        ...

    def plain(self, *tensors: Tensor) -> Tensor:
        """The result again, from operations that can be differentiated any number of times and on any device."""
        ...


def run(kernel: Kernel, *tensors: Tensor) -> Tensor:
    """kernel(*tensors): fast on a CPU, plain elsewhere and where torch.compile traces (and fuses by itself)."""
    if tensors[0].device.type != "cpu" or torch.compiler.is_compiling():
        return kernel.plain(*tensors)
    return Forward.apply(kernel, *tensors)[0]


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
        return kernel.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel, *tensors = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *Pull.apply(ctx.kernel, pulls[0], *ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, dims: Any, kernel: Kernel, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = Forward.apply(kernel, *_folded(info.batch_size, dims[1:], tensors))
        return _unfolded(info.batch_size, out)


class Pull(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return kernel.pull(pull, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel, pull, *tensors = inputs
        ctx.kept = len(tensors) - len(output)
        ctx.save_for_backward(pull, *tensors[: len(output)])

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        def first(pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(ctx.kernel.plain, *tensors)[1](pull)

        return (None, *torch.func.vjp(first, *ctx.saved_tensors)[1](pulls), *(None,) * ctx.kept)

    @staticmethod
    def vmap(info: Any, dims: Any, kernel: Kernel, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = Pull.apply(kernel, *_folded(info.batch_size, dims[1:], tensors))
        return _unfolded(info.batch_size, out)


def _folded(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The mapped axis moved into the batch axis."""
    moved = [
        x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0) for x, axis in zip(tensors, dims, strict=True)
    ]
    return [x.flatten(0, 1) for x in moved]


def _unfolded(size: int, out: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)
