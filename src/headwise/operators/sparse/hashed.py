"""P = softmax over the keys whose hash is near the query's: angular locality-sensitive hashing, O(n log n).

Reformer, Kitaev et al. 2020 (arXiv:2001.04451).  A round hashes x to argmax [x R; -x R] for a random R, sorts the
positions by it and cuts the order into chunks; a query meets its own chunk and the one before.  Over several rounds P
is one softmax over the union of all pairs: a pair found twice counts once.  Every query attends to itself.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels import autograd_functions, limits
from headwise.operators._kernels.hash_rounds import Rounds, in_groups
from headwise.operators._kernels.queries_keys import QueriesKeys, QueryKeyOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.shapes import all_finite, autocasting, filled, is_generator, same_axis, same_kind, whole_numbers


@final
@dataclass(frozen=True, eq=False)
class Hashed(QueryKeyOperator):
    """Softmax over the pairs that hashing found, which happens when the operator is built."""

    qk: QueriesKeys
    shared: bool
    chunk: int
    order_q: Tensor  # (*batch, rounds, t * chunk), positions in the order of their hashes
    order_k: Tensor  # (*batch, rounds, chunk + t * chunk), one chunk of padding indices before the first
    place_q: Tensor  # (*batch, rounds, n), where in the order a position is
    place_k: Tensor
    masks: Tensor  # (*batch, rounds, t, chunk, 2 chunk)

    @property
    def claims(self) -> frozenset[Claim]:
        return weights_claim(stochastic=self.qk.key_mask is None, causal=self.qk.mask.causal)

    def apply(self, v: Tensor) -> Tensor:
        if v.shape[-1] > limits.MAX_COLUMNS:
            return torch.cat([self.apply(part) for part in v.split(limits.MAX_COLUMNS, dim=-1)], dim=-1)
        q, k, x, own, others, batch = self._flat(v, hide=True)
        width = max(q.shape[-1], x.shape[-1])  # the kernel takes one width only
        q, k, x = (filled(y, (0, width - y.shape[-1])) for y in (q, k, x))
        out = autograd_functions.run(Rounds(self.chunk, self.qk.scale), q, k, x, own, *others)[..., : v.shape[-1]]
        out = out.reshape(*batch, *out.shape[-2:])
        return self._zero_empty_rows(out).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        q, k, x, own, others, batch = self._flat(u, hide=False)
        x = self._zero_empty_rows(x.reshape(*batch, *x.shape[-2:])).reshape(x.shape)
        out = Rounds(self.chunk, self.qk.scale).plain_adjoint(x, q, k, own, *others)
        out = out.reshape(*batch, *out.shape[-2:])
        return self.qk.mask.hide(out).to(u.dtype)

    def cost(self, d: int) -> Cost:
        """Blocks in full, hidden entries included.  The sort is as deep as log n comparisons."""
        widths = [
            max(self.qk.q.shape[-1], min(limits.MAX_COLUMNS, d - start)) for start in range(0, d, limits.MAX_COLUMNS)
        ]
        rounds, length = self.order_q.shape[-2:]
        copies = self.qk.batch.numel()
        work = copies * rounds * length * 2 * self.chunk * 2 * sum(widths)
        depth = rounds + max(1, math.ceil(math.log2(self.qk.n)))
        return Cost(work, copies * length * (2 * self.chunk + 5 * max(widths)), depth)

    def adjoint_cost(self, d: int) -> Cost:
        rounds, length = self.order_q.shape[-2:]
        work = self.qk.batch.numel() * rounds * length * 2 * self.chunk * (self.qk.q.shape[-1] + d)
        return Cost(work, self.cost(d).scalars, self.cost(d).depth)

    def _flat(self, x: Tensor, *, hide: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], torch.Size]:
        """Everything with one batch axis, in at least single precision; keys of unit length where they are shared."""
        compute = torch.promote_types(x.dtype, torch.float32)
        q, k, x = self.qk.q.to(compute), self.qk.k.to(compute), x.to(compute)
        if self.shared:
            k = F.normalize(k, dim=-1) * math.sqrt(k.shape[-1])
            own = q.new_full(q.shape[:-1], limits.SELF_SCORE)
        else:
            own = self.qk.scale * (q * k).sum(-1)
        if self.qk.key_mask is not None:
            own = own.masked_fill(~self.qk.key_mask, limits.HIDDEN)
            x = self.qk.mask.hide(x) if hide else x
        batch = torch.broadcast_shapes(self.qk.batch, x.shape[:-2])
        q, k, x = (y.expand(*batch, *y.shape[-2:]).reshape(-1, *y.shape[-2:]) for y in (q, k, x))
        own = own.expand(*batch, own.shape[-1]).reshape(-1, own.shape[-1])
        inner = len(self.qk.batch)
        others = [
            y.expand(*batch, *y.shape[inner:]).reshape(-1, *y.shape[inner:])
            for y in (self.order_q, self.order_k, self.place_q, self.place_k, self.masks)
        ]
        return q, k, x, own, others, batch

    def _zero_empty_rows(self, x: Tensor) -> Tensor:
        """Rows without keys set to zero: padding that met nothing but padding."""
        if self.qk.key_mask is None:
            return x
        found = self.masks.any(-1).flatten(-2).gather(-1, self.place_q).any(-2)
        nonempty = found | self.qk.key_mask
        return x.masked_fill(~nonempty.unsqueeze(-1), 0)


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
    same_kind("Hashed", q=q, rotations=rotations.to(q.dtype))  # hashes are computed in float32
    all_finite("Hashed", rotations=rotations)
    if rotations.dim() not in (3, 4) or 0 in rotations.shape:
        raise ShapeError(
            f"Hashed: rotations must be (rounds, k, buckets / 2) or (2, rounds, k, root / 2), but have shape "
            f"{tuple(rotations.shape)}"
        )
    same_axis("Hashed", "k", q=q.shape[-1], rotations=rotations.shape[-2])
    chunk = min(chunk, n)
    with torch.no_grad():
        order_q, place_q = _sorted(qk.q, rotations, qk, chunk)
        order_k, place_k = (order_q, place_q) if shared else _sorted(qk.k, rotations, qk, chunk)
        order_k = F.pad(order_k, (chunk, 0), value=n)
        masks = _masks(qk, order_q, order_k, place_q // chunk, place_k // chunk, chunk, causal)
        order_q, order_k = order_q.clamp(max=n - 1), order_k.clamp(max=n - 1)
    return Hashed(qk, shared, chunk, order_q, order_k, place_q, place_k, masks)


def random_rotations(width: int, buckets: float, rounds: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers for about `buckets` buckets; beyond 128, two hashes of sqrt(buckets) are cheaper."""
    if buckets <= 128:
        return torch.randn(rounds, width, max(1, round(buckets / 2)), generator=generator)
    return torch.randn(2, rounds, width, max(1, round(math.sqrt(buckets) / 2)), generator=generator)


def _sorted(x: Tensor, rotations: Tensor, qk: QueriesKeys, chunk: int) -> tuple[Tensor, Tensor]:
    """The order (*batch, rounds, t * chunk) of positions by hash, ties by position, n for padding; and the inverse."""
    n = x.shape[-2]
    hashes = rotations.float().reshape(-1, *rotations.shape[-3:])  # (1 or 2, rounds, k, half)
    half = hashes.shape[-1]
    # one product for all rounds: (*batch, n, hashes, rounds, half)
    with torch.autocast(x.device.type, enabled=False) if autocasting(x.device) else nullcontext():
        turned = x.float() @ hashes.movedim(-2, 0).flatten(1)
    turned = turned.unflatten(-1, (*hashes.shape[:2], half))
    # argmax [y; -y] is the argmax of |y|, in the second half where y is negative
    best = turned.abs().argmax(-1, keepdim=True)
    negative = turned.gather(-1, best).squeeze(-1) < 0
    first, *second = (best.squeeze(-1) + half * negative).int().unbind(-2)
    bucket = (first * (2 * half) + second[0] if second else first).mT  # (*batch, rounds, n)
    if qk.key_mask is not None:
        bucket = bucket.masked_fill(~qk.key_mask.unsqueeze(-2), (2 * rotations.shape[-1]) ** 2)
    bucket = bucket.expand(*qk.batch, *bucket.shape[-2:])
    order = torch.sort(bucket, dim=-1, stable=True).indices
    place = torch.zeros_like(order).scatter(-1, order, torch.arange(n, device=x.device).expand(order.shape))
    return filled(order, (0, -n % chunk), value=n), place


def _masks(
    qk: QueriesKeys, order_q: Tensor, order_k: Tensor, chunk_q: Tensor, chunk_k: Tensor, chunk: int, causal: bool
) -> Tensor:
    """Which pairs count in which round (*batch, rounds, t, chunk, 2 chunk), a few members of the batch at a time."""
    n, lead = qk.n, len(qk.batch)
    flat = [x.reshape(-1, *x.shape[lead:]) for x in (order_q, order_k, chunk_q, chunk_k)]
    if qk.key_mask is not None:
        flat.append(F.pad(qk.key_mask, (0, 1)).expand(*qk.batch, n + 1).reshape(-1, n + 1))
    (masks,) = in_groups(partial(_group_masks, n, chunk, causal), n * 2 * chunk, tuple(flat))
    return masks.reshape(*qk.batch, *masks.shape[1:])


def _group_masks(n: int, chunk: int, causal: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """A pair counts if it is real, not later if causal, not a position with itself, and in no earlier round."""
    order_q, order_k, chunk_q, chunk_k, *key_mask = tensors
    rounds = order_q.shape[1]
    # the smaller the numbers, the faster they are compared
    small = torch.int8 if n // chunk <= 100 else torch.int16 if n // chunk < 2**14 else torch.int32
    chunk_q, chunk_k = (F.pad(x.to(small), (0, 1), value=-9) for x in (chunk_q, chunk_k))
    order_k = order_k.unfold(-1, 2 * chunk, chunk)  # (b, rounds, t, 2 chunk)
    order_q = order_q.unflatten(-1, (-1, chunk))  # (b, rounds, t, chunk)
    found = []
    for i in range(rounds):
        there, here = order_q[:, i], order_k[:, i]
        real = key_mask[0].gather(-1, here.flatten(1)).reshape(here.shape) if key_mask else here < n
        rows, columns = there.int().unsqueeze(-1), here.int().unsqueeze(-2)
        mask = columns < rows if causal else columns != rows
        mask = mask & real.unsqueeze(-2)
        mask = mask & (rows < n) if n % chunk else mask
        for earlier in range(i):  # met then: the key's chunk was the query's, or the one before
            a = chunk_q[:, earlier].gather(-1, there.flatten(1)).reshape(there.shape).unsqueeze(-1)
            b = chunk_k[:, earlier].gather(-1, here.flatten(1)).reshape(here.shape).unsqueeze(-2)
            mask = mask & ((a - b) >> 1 != 0)
        found.append(mask)
    return (torch.stack(found, dim=1),)
