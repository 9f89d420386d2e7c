"""P v and P^T u from blocks of rows of P: the plain way when an arbitrary mask leaves no structure to use.

    (P v)_block = P_block v          P^T u = sum over blocks of P_block^T u_block

O(m n d) work; at most ENTRIES numbers of P are alive at once, in the backward pass too (blocks are computed again).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ENTRIES = 1 << 22
"""Entries of P, over the whole batch, in one block of rows: 16 MB in float32."""

Rows = Callable[[int, int], Tensor]
"""(start, stop) -> rows start..stop of P: (*batch, stop - start, n)"""


def apply_rows(rows: Rows, shape: Sequence[int], v: Tensor) -> Tensor:
    """P v: (*batch, n, d) -> (*batch, m, d)"""
    blocks = _blocks(shape)
    parts = [_recomputed(lambda v, a=a, b=b: rows(a, b) @ v, v, blocks) for a, b in blocks]
    return torch.cat(parts, dim=-2)


def adjoint_rows(rows: Rows, shape: Sequence[int], u: Tensor) -> Tensor:
    """P^T u: (*batch, m, d) -> (*batch, n, d)"""
    blocks = _blocks(shape)
    parts = (_recomputed(lambda u, a=a, b=b: rows(a, b).mT @ u[..., a:b, :], u, blocks) for a, b in blocks)
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def _blocks(shape: Sequence[int]) -> list[tuple[int, int]]:
    *batch, m, n = shape
    step = max(1, min(m, ENTRIES // (math.prod(batch) * n)))
    return [(start, min(start + step, m)) for start in range(0, m, step)]


def _recomputed(block: Callable[[Tensor], Tensor], x: Tensor, blocks: list[tuple[int, int]]) -> Tensor:
    # torch.func cannot differentiate through a checkpoint; there the blocks stay alive until the backward pass
    if len(blocks) == 1 or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return block(x)
    return checkpoint(block, x, use_reentrant=False)
