"""Count the multiply-adds torch really performs, to hold an operator's `cost` to its word.

A counted call sits between two numbers:

    products  the multiply-adds of matrix products: mm, bmm, baddbmm, mv, dot, convolution and fused attention (einsum,
              `@` and `F.linear` arrive as these); fused causal attention counts all m n pairs
    sums      what may belong to a weighted sum written by hand: element-wise multiplications, sums, means, pooling,
              running sums and scatter-adds, one for each element read, and a Fourier transform of N numbers as N log2 N

A cost is honest when products <= multiply_adds <= products + sums: no matrix product is left out, and nothing charged
that torch did not do.  Additions, divisions, exponentials, comparisons and copies are free on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """m n (k + d) for each query head; grouped keys are read again by every head of their group."""
    *batch, m, width = q.shape
    return math.prod(batch) * m * k.shape[-2] * (width + v.shape[-1])


# torch's registry counts flops, two to a multiply-add, and does not know these
_PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.mv: lambda a, x, **_: a.numel(),
    aten.addmv: lambda y, a, x, **_: a.numel(),
    aten.dot: lambda a, b, **_: a.numel(),
    aten.vdot: lambda a, b, **_: a.numel(),
    aten.addmm_: lambda y, a, b, **_: a.numel() * b.shape[-1],
    aten.baddbmm_: lambda y, a, b, **_: a.numel() * b.shape[-1],
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
}
_BY_INPUT = {aten.sum, aten.mean, aten.cumsum, aten.logcumsumexp, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d}
_BY_OUTPUT = {aten.mul, aten.mul_, aten.addcmul, aten.addcmul_, aten.lerp}
_BY_SOURCE = {aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_, aten.index_put, aten.index_put_}
_BY_SOURCE |= {aten._index_put_impl_, aten.scatter_reduce, aten.scatter_reduce_}
_FOURIER = {aten._fft_r2c, aten._fft_c2r, aten._fft_c2c}


class MultiplyAdds(TorchDispatchMode):
    """Counts while it is active.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
    >>> with MultiplyAdds() as count:
    ...     _ = 2 * (a @ b)
    >>> count.products, count.sums
    (30, 10)
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in flop_registry and packet not in _PRODUCTS:
            with self:  # a composite operation (matmul, einsum) is counted as the parts it is made of
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if packet in _PRODUCTS:
            self.products += _PRODUCTS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=out) // 2
        elif packet in _BY_OUTPUT:
            self.sums += out.numel()
        elif packet in _BY_INPUT:
            self.sums += args[0].numel()
        elif packet in _BY_SOURCE:
            self.sums += max(x.numel() for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor))
        elif packet in _FOURIER:
            size = max(args[0].numel(), out.numel())
            self.sums += size * max(1, math.ceil(math.log2(size)))
        return out


def count_multiply_adds(function: Callable[[], object]) -> MultiplyAdds:
    """The counts of one call, without gradients.

    >>> count_multiply_adds(lambda: torch.ones(4, 7) @ torch.ones(7)).products
    28
    """
    with torch.no_grad(), MultiplyAdds() as count:
        function()
    return count
