"""P_ij = sum_c H_ic exp(s k_jc) / sum_(j' <= i) exp(s k_j'c) for j <= i: efficient attention over the past, exactly.

The softmax over keys has another normaliser at every query, so the means are running sums.  They are carried from one
block of positions to the next, and inside a block the weights are formed: O(n k d + n b (k + d)) for blocks of b.
Efficient attention is Shen et al. 2018; the split into a state and a block is that of chunked linear attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import NonFiniteError
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.pair import Pair, pair

BLOCK = 64
"""Positions in a block: the work inside blocks then equals that on the states when k = d = 64."""

RISE = {torch.float32: 120.0, torch.float64: 1200.0}
"""How much a running maximum may rise inside a block: exponentials of half of it stay far from overflow."""

RANGE = 600.0
"""How much it may rise over the whole sequence: states are summed in double precision."""


@final
@dataclass(frozen=True, eq=False)
class EfficientCausal(AttentionOperator):
    """Row i sees columns j <= i + n - m.  A query that sees no real key gives a row of zeros."""

    both: Pair

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.both.batch, self.both.m, self.both.n))

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        promised = frozenset({Claim.NONNEGATIVE, Claim.CAUSAL})
        first = max(0, self.both.n - self.both.m)  # the last key that the first query sees
        seen = self.both.keep is None or bool(self.both.keep[..., : first + 1].any(-1).all())
        return promised | {Claim.STOCHASTIC} if seen and self.both.m <= self.both.n else promised

    def apply(self, v: Tensor) -> Tensor:
        dtype, m, n = v.dtype, self.both.m, self.both.n
        compute = torch.promote_types(dtype, torch.float32)
        block = min(BLOCK, n)
        keys, hidden = blocked_keys(self.both, block, compute)  # (*batch, t, b, k), (*batch or 1, t, b, 1)
        shift = reference(keys, hidden)  # (*batch, t, 1, k)
        top = shift.amax(-3, keepdim=True)
        weights = (keys - shift).masked_fill(hidden, 0).exp().masked_fill(hidden, 0)
        v = v.to(compute) if self.both.keep is None else v.to(compute).masked_fill(~self.both.keep.unsqueeze(-1), 0)
        v = F.pad(v, (0, 0, 0, keys.shape[-3] * block - n)).unflatten(-2, (-1, block))

        # what earlier blocks leave behind, relative to this block's shift
        scale = (shift - top).double().exp()
        sums = _before(weights.sum(-2, keepdim=True) * scale) / scale
        means = _before((weights.mT @ v) * scale.mT) / scale.mT
        inside = weights.cumsum(-2)
        total = sums.to(compute) + inside

        # queries sit at the last positions, so those before them are cut off again
        features = torch.softmax(self.both.q.to(compute) * self.both.scale, dim=-1)
        features = features[..., max(0, m - n) :, :]
        features = F.pad(features, (0, 0, max(0, n - m), keys.shape[-3] * block - n)).unflatten(-2, (-1, block))
        empty = total <= 0
        shares = (features / total.masked_fill(empty, 1)).masked_fill(empty, 0)
        out = shares @ means.to(compute) + (shares @ weights.mT).tril() @ v
        out = out.flatten(-3, -2)[..., max(0, n - m) : n, :]
        return F.pad(out, (0, 0, max(0, m - n), 0)).to(dtype)

    def cost(self, d: int) -> Cost:
        """States read and written, and the weights inside blocks, of which half are hidden."""
        k, copies = self.both.k.shape[-1], self.both.batch.numel()
        block = min(BLOCK, self.both.n)
        count = -(-self.both.n // block)
        work = count * block * (2 * k * d + block * (k + d))
        return Cost(work, count * (2 * k * d + block * (block + 4 * k)), count).times(copies)

    def adjoint_cost(self, d: int) -> Cost:
        """The derivative of `apply`: once forward, and back through all but the weights inside blocks."""
        k, copies = self.both.k.shape[-1], self.both.batch.numel()
        block = min(BLOCK, self.both.n)
        count = -(-self.both.n // block)
        return self.cost(d) + Cost(count * block * (2 * k * d + block * d), count * 2 * k * d, count).times(copies)


def blocked_keys(both: Pair, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """scale k in blocks (*batch, t, b, k), and which of them are not there: padding, or beyond the end."""
    n = both.n
    extra = -n % block
    real = torch.arange(n + extra, device=both.k.device) < n
    if both.keep is not None:
        real = real & F.pad(both.keep, (0, extra))
    keys = F.pad(both.k.to(dtype) * both.scale, (0, 0, 0, extra)).unflatten(-2, (-1, block))
    return keys, ~real.unflatten(-1, (-1, block)).unsqueeze(-1)


def reference(keys: Tensor, hidden: Tensor) -> Tensor:
    """Half way between the running maximum at the start and at the end of each block, (*batch, t, 1, k)."""
    first, last = running_maximum(keys, hidden)
    return (first + last) / 2


def running_maximum(keys: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Of each feature over all real keys up to the first and up to the last of each block, (*batch, t, 1, k)."""
    keys = keys.detach()
    least = keys.masked_fill(hidden, math.inf).amin((-3, -2), keepdim=True)
    # where no key has been seen yet any finite number will do: there the least of all, or zero
    least = least.masked_fill(least == math.inf, 0)
    keys = torch.where(hidden, least, keys)
    last = keys.amax(-2, keepdim=True).cummax(-3).values
    before = torch.cat([least, last[..., :-1, :, :]], dim=-3)
    return torch.maximum(before, keys[..., :1, :]), last


def efficient_causal(
    q: Tensor, k: Tensor, *, scale: float | None = None, padding: Tensor | None = None
) -> EfficientCausal:
    """Efficient attention in which row i sees columns j <= i + n - m; `padding` (*batch, n) is True at real keys.

    Real rows of a padded sequence equal those of the shorter one, wherever the padding is.

    >>> efficient_causal(torch.zeros(3, 2), torch.zeros(3, 2)).dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    both = pair("EfficientCausal", q, k, scale=scale, padding=padding)
    _check_range(both)
    return EfficientCausal(both)


def _check_range(both: Pair) -> None:
    """Running sums of exponentials hold a limited range of keys.  Silent while tracing, where values are not known."""
    if torch.compiler.is_compiling():
        return
    compute = torch.promote_types(both.k.dtype, torch.float32)
    keys, hidden = blocked_keys(both, min(BLOCK, both.n), compute)
    first, last = running_maximum(keys, hidden)
    try:
        rise = (last - first).amax().item()
        span = (last.amax(-3) - first.amin(-3)).amax().item()
    except RuntimeError:  # vmap refuses .item()
        return
    if rise > RISE[compute] or span > RANGE:
        raise NonFiniteError(
            f"EfficientCausal: a key feature times scale rises by {rise:.0f} within {BLOCK} positions and by "
            f"{span:.0f} in all, but running sums in {compute} hold {RISE[compute]:.0f} and {RANGE:.0f}; use a smaller scale"
        )


def _before(x: Tensor) -> Tensor:
    """Sums over earlier blocks (axis -3), zero for the first."""
    return F.pad(x.cumsum(-3)[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
