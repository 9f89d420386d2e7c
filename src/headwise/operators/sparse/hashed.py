"""P = softmax over the keys whose hash is near the query's: angular locality-sensitive hashing, O(n log n).

Reformer, Kitaev et al. 2020 (arXiv:2001.04451).  A round hashes x to argmax [x R; -x R] for a random R, sorts the
positions by it and cuts the order into chunks; a query meets its own chunk and the one before.  Over several rounds P
is one softmax over the union of all pairs: a pair found twice counts once.  Every query attends to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels import autograd_functions, hashed_attention, limits
from headwise.operators._kernels.hashed_attention import HashedAttention, hash_numbers, hash_order
from headwise.operators._kernels.key_patterns import two_batch_axes
from headwise.operators._kernels.queries_keys import QueriesKeys, QueryKeyOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.shapes import all_finite, autocasting, is_generator, same_axis, same_kind, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Hashed(QueryKeyOperator):
    """Softmax over the pairs that hashing found; queries and keys are hashed and sorted when the operator is built."""

    qk: QueriesKeys
    shared: bool
    chunk: int
    order_q: Tensor  # (*batch, rounds, n), positions in the order of their hashes
    order_k: Tensor
    rotations: Tensor

    @property
    def claims(self) -> frozenset[Claim]:
        return weights_claim(stochastic=self.qk.key_mask is None, causal=self.qk.mask.causal)

    def apply(self, v: Tensor) -> Tensor:
        if v.dtype == self.qk.q.dtype and hashed_attention.usable(self.qk.q, self.qk.k, v, self.qk.key_mask):
            return self._two_axes(partial(autograd_functions.run, self._attention), v, self.qk.q, self.qk.k)
        if v.shape[-1] > limits.MAX_COLUMNS:
            return torch.cat([self.apply(part) for part in v.split(limits.MAX_COLUMNS, dim=-1)], dim=-1)
        return self._in_single_precision(self._attention.by_torch, v)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._in_single_precision(self._attention.adjoint, u)

    def cost(self, d: int) -> Cost:
        """Blocks in full, hidden entries included.  The sort is as deep as log n comparisons."""
        widths = [
            max(self.qk.q.shape[-1], min(limits.MAX_COLUMNS, d - start)) for start in range(0, d, limits.MAX_COLUMNS)
        ]
        rounds, length = self.order_q.shape[-2], self._length
        copies = self.qk.batch.numel()
        work = copies * rounds * length * 2 * self.chunk * 2 * sum(widths)
        depth = rounds + max(1, math.ceil(math.log2(self.qk.n)))
        return Cost(work, copies * length * (2 * self.chunk + 5 * max(widths)), depth)

    def adjoint_cost(self, d: int) -> Cost:
        rounds = self.order_q.shape[-2]
        work = self.qk.batch.numel() * rounds * self._length * 2 * self.chunk * (self.qk.q.shape[-1] + d)
        return Cost(work, self.cost(d).scalars, self.cost(d).depth)

    @property
    def _length(self) -> int:
        """Positions of all chunks, the last one filled up."""
        return -(-self.qk.n // self.chunk) * self.chunk

    @property
    def _attention(self) -> HashedAttention:
        own = limits.SELF_SCORE if self.shared else None
        return HashedAttention(self.chunk, self.qk.scale, self.qk.mask.causal, own)

    def _in_single_precision(self, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        """`run` in at least single precision, where sorted parts are merged."""
        compute = torch.promote_types(x.dtype, torch.float32)
        return self._two_axes(run, x.to(compute), self.qk.q.to(compute), self.qk.k.to(compute)).to(x.dtype)

    def _two_axes(self, run: Callable[..., Tensor], x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """run(q, k, x, orders, mask) with two batch axes; keys of length sqrt(k) where they are shared."""
        if self.shared:
            k = F.normalize(k.to(torch.promote_types(k.dtype, torch.float32)), dim=-1) * math.sqrt(k.shape[-1])
        batch = torch.broadcast_shapes(self.qk.batch, x.shape[:-2])
        tensors = [two_batch_axes(y, batch) for y in (q, k, x, self.order_q, self.order_k)]
        if self.qk.key_mask is not None:
            tensors.append(two_batch_axes(self.qk.key_mask, batch, trailing=1))
        out = run(*tensors)
        return out.reshape(*batch, *out.shape[-2:])


@supports(CAUSAL, KEY_MASK, one_length="its chunks are cut for one length")
def hashed(
    q: Tensor,
    k: Tensor | None = None,
    rotations: Tensor | None = None,
    *,
    rounds: int = 4,
    chunk: int = 64,
    generator: torch.Generator | None = None,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Hashed:
    """Reformer attention; without k, queries and keys are shared: keys are the queries at length sqrt(k), and a
    position attends to itself only where there is no other key, both as in the paper.

    rotations  (rounds, k, buckets / 2), or (2, rounds, k, root / 2) for two hashes that make root^2 buckets together;
               drawn for about n / chunk buckets from `generator` unless given
    chunk      positions of a sorted chunk; a query meets at most 2 chunk keys a round
    key_mask   boolean (*batch, n), True = attend; masked positions are sorted last, so that real rows equal those of
               the shorter sequence under the same rotations
    """
    shared = k is None
    qk = QueriesKeys.checked("Hashed", q, q if k is None else k, scale=scale, causal=causal, key_mask=key_mask)
    n = qk.require_square("Hashed", "window for new queries against a cache, or softmax")
    whole_numbers("Hashed", chunk=chunk, rounds=rounds)
    is_generator("Hashed", generator)
    if rotations is None:
        rotations = random_rotations(q.shape[-1], n / chunk, rounds, generator=generator).to(q)
    same_kind("Hashed", rotations=rotations)
    # hashes are computed in float32; queries without values may meet rotations that have some
    same_kind("Hashed", q=q, rotations=rotations.to(q if q.is_meta else q.dtype))
    all_finite("Hashed", rotations=rotations)
    if rotations.dim() not in (3, 4) or 0 in rotations.shape:
        raise ShapeError(
            f"Hashed: rotations must be (rounds, k, buckets / 2) or (2, rounds, k, root / 2), but have shape "
            f"{tuple(rotations.shape)}"
        )
    same_axis("Hashed", "k", q=q.shape[-1], rotations=rotations.shape[-2])
    chunk = min(chunk, n)
    with torch.no_grad():
        order_q = _sorted(qk.q, rotations, qk)
        order_k = order_q if shared else _sorted(qk.k, rotations, qk)
    return Hashed(qk, shared, chunk, order_q, order_k, rotations)


def random_rotations(width: int, buckets: float, rounds: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers for about `buckets` buckets; beyond 128, two hashes of sqrt(buckets) are cheaper."""
    if buckets <= 128:
        return torch.randn(rounds, width, max(1, round(buckets / 2)), generator=generator)
    return torch.randn(2, rounds, width, max(1, round(math.sqrt(buckets) / 2)), generator=generator)


def _sorted(x: Tensor, rotations: Tensor, qk: QueriesKeys) -> Tensor:
    """The order (*batch, rounds, n) of positions by hash."""
    order = hash_order(*_turned(x, rotations, qk.batch, qk.key_mask))
    return order.reshape(*qk.batch, *order.shape[-2:])


def hashes(x: Tensor, rotations: Tensor, batch: torch.Size, key_mask: Tensor | None) -> Tensor:
    """The hashes (*batch, rounds, n) of the positions of x (*batch, n, k); masked ones have a larger one than all."""
    found = hash_numbers(*_turned(x, rotations, batch, key_mask))
    return found.reshape(*batch, *found.shape[-2:])


def _turned(x: Tensor, rotations: Tensor, batch: torch.Size, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The products that are hashed, and the mask, with two batch axes."""
    halves = rotations.to(x.device).float().reshape(-1, *rotations.shape[-3:])  # (1 or 2, rounds, k, half)
    # one product for all rounds: (*batch, n, hashes, rounds, half)
    with torch.autocast(x.device.type, enabled=False) if autocasting(x.device) else nullcontext():
        turned = x.float() @ halves.movedim(-2, 0).flatten(1)
    turned = two_batch_axes(turned.unflatten(-1, (*halves.shape[:2], halves.shape[-1])), batch, trailing=4)
    return turned, None if key_mask is None else two_batch_axes(key_mask, batch, trailing=1)
