"""Measure what a call really does, to check an operator's `cost`: multiply-adds, and bytes alive at once.

Multiply-adds are bounded from both sides:

    products  multiply-adds of matrix products: mm, bmm, baddbmm, mv, dot, convolution and fused attention (einsum,
              `@` and `F.linear` dispatch to these); fused causal attention counts all m n pairs
    sums      operations that may belong to a hand-written weighted sum: element-wise multiplications, sums, means,
              pooling, running sums and scatter-adds, one for each element read; a Fourier transform of N numbers
              counts N log2 N

A cost is correct when products <= multiply_adds <= products + sums.  Additions, divisions, exponentials, comparisons
and copies are not counted on either side.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """m n (k + d) for each query head; grouped keys are read once by every head of their group."""
    *batch, m, width = q.shape
    return math.prod(batch) * m * k.shape[-2] * (width + v.shape[-1])


# missing in torch's registry, which counts flops: two for each multiply-add
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
    """Counts while active.

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
            with self:  # a composite operation (matmul, einsum) is counted by its parts
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


class _LiveBytes(TorchDispatchMode):
    """Adds the bytes of a storage when an operation returns it, and subtracts them when its last tensor is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._allocated(x.untyped_storage(), given)
        return out

    def _allocated(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        address = storage._cdata
        if address in self.alive or address in given:  # a view, or written in place
            return
        self.alive.add(address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, address, storage.nbytes())

    def _freed(self, address: int, size: int) -> None:
        self.alive.discard(address)
        self.now -= size


def peak_bytes(function: Callable[[], object]) -> int:
    """The largest number of bytes alive at once during a call without gradients, beyond those alive before it.

    Every tensor is traced, none sampled, so that the result is reproducible and small sizes are exact.  Memory that a
    kernel allocates and frees itself (a few blocks per thread in fused attention) is not seen.

    >>> x = torch.zeros(1000, dtype=torch.float32)
    >>> peak_bytes(lambda: (x + 1).exp_().sum())  # one copy of x, and the sum
    4004
    """
    with torch.no_grad(), _LiveBytes() as live:
        function()
    return live.peak


_BY_LOGARITHM = {aten.sort, aten.argsort, aten.cumsum, aten.logcumsumexp, aten.cummax}
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.index_copy_, aten.index_put_, aten._index_put_impl_}


class LongestChain(TorchDispatchMode):
    """The longest chain of operations each of which needs the result of the one before it, while active.

    Every operation of torch is one step, whatever its size, as in the published tables; a sort or a running sum of n
    numbers is ceil(log2 n) steps.  Views are no step.  Overwriting a part of a tensor does not wait for what was there.

    >>> x = torch.ones(4)
    >>> with LongestChain() as chain:
    ...     y = (x + 1) * (x + 2)
    >>> chain.steps
    2
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._depth: dict[int, int] = {}  # of every storage
        self._alive: list[Any] = []  # storages, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        packet = func._overloadpacket
        read = inputs[1:] if packet in _OVERWRITES else inputs
        start = max((self._depth.get(x.untyped_storage()._cdata, 0) for x in read), default=0)
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in inputs}
        is_view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in outputs)
        if not is_view:
            longest = max((x.numel() and max(x.shape, default=1) for x in inputs), default=1)
            start += math.ceil(math.log2(max(2, longest))) if packet in _BY_LOGARITHM else 1
            for x in outputs:
                place = x.untyped_storage()._cdata
                self._alive.append(x.untyped_storage())
                self._depth[place] = max(self._depth.get(place, 0), start)
            self.steps = max(self.steps, start)
        return out
