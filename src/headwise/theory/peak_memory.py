"""Peak of the bytes that a call has alive at once, beyond what was alive before it: every tensor traced, none sampled.

Each result of an operation adds the bytes of its storage when it appears, and takes them away when the last tensor that
shares it dies.  So the answer is the same every time, and small sizes are not lost in the noise of a whole process.
What a kernel allocates and frees within itself (a few blocks per thread in the fused attention) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Live(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._born(x.untyped_storage(), before)
        return out

    def _born(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        name = storage._cdata
        if name in self.seen or name in before:  # a view, or written in place
            return
        self.seen.add(name)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._died, name, storage.nbytes())

    def _died(self, name: int, size: int) -> None:
        self.seen.discard(name)
        self.now -= size


@torch.no_grad()
def peak_bytes(call: Callable[[], object]) -> int:
    """
    >>> x = torch.zeros(1000, dtype=torch.float32)
    >>> peak_bytes(lambda: (x + 1).exp_().sum())  # one copy of x, and the sum
    4004
    """
    with _Live() as live:
        call()
    return live.peak
