"""S = s Q K^T + bias, with some entries silenced: what a softmax is taken of, never formed whole.

`attend` and `attend_with_lse` are the two ways to use it: the public fused kernel, which autograd knows, and the same
kernel with the log-sum-exp of every row, which is all that entropy, norms and the transpose of P need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.shapes import broadcast_batch, filled

WIDEST = 512
"""Columns in one call of the fused kernel; measured per column, wider calls stop getting cheaper."""

CHUNK = 1 << 22
"""Entries of S, summed over the batch, that a chunked path may hold at once (16 MB in float32)."""


@dataclass(frozen=True, eq=False)
class Scores:
    """S = scale * q k^T + bias where `keep` and `ahead` allow, -inf elsewhere.  q (*batch, m, k), k (*batch, n, k)."""

    q: Tensor
    k: Tensor
    scale: float
    ahead: int | None = None  # causal: row i sees columns j <= i + ahead
    keep: Tensor | None = None  # boolean, broadcasts to (*batch, m, n)
    bias: Tensor | None = None  # additive, broadcasts to (*batch, m, n)

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    def rows(self, start: int, stop: int) -> Scores:
        """The same scores for queries start:stop, their causality written out as a mask over the keys they can see."""
        keep, bias, k = _rows(self.keep, start, stop), _rows(self.bias, start, stop), self.k
        if self.ahead is not None:
            seen = max(1, min(stop + self.ahead, k.shape[-2]))  # no row before `stop` sees beyond this
            k = k[..., :seen, :]
            causal = self.causal_mask(start, stop, seen)
            keep = causal if keep is None else keep[..., :seen] & causal
            bias = None if bias is None else bias[..., :seen]
        return Scores(self.q[..., start:stop, :], k, self.scale, keep=keep, bias=bias)

    def causal_mask(self, start: int, stop: int, n: int) -> Tensor:
        """Boolean (stop - start, n), True where j <= i + ahead."""
        i, j = (torch.arange(*ends, device=self.q.device) for ends in ((start, stop), (0, n)))
        return j <= i[:, None] + (self.ahead or 0)

    def dense(self) -> Tensor:
        """S as a tensor (*batch, m, n)."""
        s = (self.q * self.scale) @ self.k.mT
        if self.bias is not None:
            s = s + self.bias
        if self.keep is not None:
            s = s.masked_fill(~self.keep, -math.inf)
        if self.ahead is not None:
            s = s.masked_fill(~self.causal_mask(0, *s.shape[-2:]), -math.inf)
        return s

    def chunks(self, entries: int = CHUNK) -> list[tuple[int, int]]:
        """Row ranges whose scores hold at most `entries` numbers over the whole batch."""
        *batch, m, n = self.shape
        step = max(1, min(m, entries // (math.prod(batch) * n)))
        return [(start, min(start + step, m)) for start in range(0, m, step)]

    def transposed(self, minus: Tensor) -> Scores:
        """S^T - minus, `minus` one number a query.  Causality is kept by reversing both sequences."""
        m, n = self.shape[-2:]
        q, k, ahead, keep, bias = self.q, self.k, self.ahead, self.keep, self.bias
        keep = None if keep is None else keep.expand(*keep.shape[:-2], m, n).mT
        bias = None if bias is None else bias.expand(*bias.shape[:-2], m, n).mT
        minus = minus.unsqueeze(-2)
        if ahead is not None:
            q, k, minus = q.flip(-2), k.flip(-2), minus.flip(-1)
            keep = None if keep is None else keep.flip(-2, -1)
            bias = None if bias is None else bias.flip(-2, -1)
            ahead += m - n
        bias = -minus if bias is None else bias - minus
        return Scores(k, q, self.scale, ahead, keep, bias)

    def doubled(self) -> Scores:
        """2 S: its row-wise log-sum-exp gives the sum of squares of P."""
        return replace(self, scale=2 * self.scale, bias=None if self.bias is None else 2 * self.bias)

    def silent_rows(self) -> Tensor | None:
        """Boolean (*batch, m), True where a query sees no key at all; None when that cannot happen."""
        *_, m, n = self.shape
        if self.keep is None and self.bias is None:
            if self.ahead is None or self.ahead >= 0:
                return None
            return torch.arange(m, device=self.q.device) < -self.ahead
        allowed = torch.ones(1, n, dtype=torch.bool, device=self.q.device)
        if self.keep is not None:
            allowed = allowed & self.keep
        if self.bias is not None:
            allowed = allowed & (self.bias > -math.inf)
        if self.ahead is None:
            return ~allowed.any(-1).expand(*allowed.shape[:-2], m)
        if allowed.shape[-2] == 1:  # one first visible key for all queries
            first = allowed.squeeze(-2).int().argmax(-1, keepdim=True)
            last = torch.arange(m, device=self.q.device) + self.ahead
            return (first > last) | ~allowed.squeeze(-2).any(-1, keepdim=True)
        return ~(allowed & self.causal_mask(0, m, n)).any(-1)


def attend(scores: Scores, v: Tensor) -> Tensor:
    """softmax(S) v through torch's fused kernel; fully silenced rows are zero."""
    if v.shape[-1] > WIDEST:
        return torch.cat([attend(scores, part) for part in v.split(WIDEST, dim=-1)], dim=-1)
    if scores.ahead is not None and not (scores.ahead == 0 and scores.keep is None and scores.bias is None):
        # the kernel's own causality starts at the top left and goes with no mask
        parts = (attend(part, v[..., : part.k.shape[-2], :]) for part in _row_parts(scores))
        return torch.cat(list(parts), dim=-2)
    batch = broadcast_batch("Softmax", operator=scores.shape[:-2], v=v.shape[:-2])
    q, k, wide = _one_width(scores.q, scores.k, v)
    mask = _mask(scores, q.dtype)
    out = F.scaled_dot_product_attention(
        _four_axes(q, batch),
        _four_axes(k, batch),
        _four_axes(wide, batch),
        attn_mask=None if mask is None else _four_axes(mask, batch, expand=False),
        is_causal=scores.ahead is not None,
        scale=scores.scale,
    )
    return out.reshape(*batch, *out.shape[-2:])[..., : v.shape[-1]]


def attend_with_lse(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax(S) v, log-sum-exp of the rows of S), O(n) memory; a silenced row gives zeros and -inf.

    The fused kernel's log-sum-exp has no gradient, so where one is wanted the rows are computed in chunks instead.
    """
    wanted = (scores.q, scores.k, v) if scores.bias is None else (scores.q, scores.k, v, scores.bias)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in wanted)
    if needs_gradient or v.device.type != "cpu" or v.dtype not in (torch.float32, torch.float64):
        return attend_with_lse_in_chunks(scores, v)
    return _attend_with_lse_fused(scores, v)


def attend_with_lse_in_chunks(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same from plain torch, any device, differentiable, at most CHUNK scores alive."""
    parts = [scores.rows(start, stop) for start, stop in scores.chunks()]
    if len(parts) == 1 or not torch.is_grad_enabled():
        pairs = [_attend_with_lse_dense(part, v[..., : part.k.shape[-2], :]) for part in parts]
    else:
        pairs = [
            checkpoint(_attend_with_lse_dense, part, v[..., : part.k.shape[-2], :], use_reentrant=False)
            for part in parts
        ]
    return torch.cat([out for out, _ in pairs], dim=-2), torch.cat([lse for _, lse in pairs], dim=-1)


def _attend_with_lse_dense(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(v.dtype, torch.float32)
    s = scores.dense().to(compute)
    lse = torch.logsumexp(s, dim=-1)
    # a silenced row has lse = -inf; any finite shift makes its exponentials exact zeros
    p = (s - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
    return (p @ v.to(compute)).to(v.dtype), lse


def _attend_with_lse_fused(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    if v.shape[-1] > WIDEST:
        pairs = [_attend_with_lse_fused(scores, part) for part in v.split(WIDEST, dim=-1)]
        return torch.cat([out for out, _ in pairs], dim=-1), pairs[0][1]
    if scores.ahead:
        parts = _row_parts(scores)
        pairs = [_attend_with_lse_fused(part, v[..., : part.k.shape[-2], :]) for part in parts]
        return torch.cat([out for out, _ in pairs], dim=-2), torch.cat([lse for _, lse in pairs], dim=-1)
    batch = torch.broadcast_shapes(scores.shape[:-2], v.shape[:-2])
    q, k, wide = _one_width(scores.q, scores.k, v)
    mask = _mask(scores, q.dtype)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _four_axes(q, batch),
        _four_axes(k, batch),
        _four_axes(wide, batch),
        0.0,
        scores.ahead is not None,
        attn_mask=None if mask is None else _four_axes(mask, batch, expand=False),
        scale=scores.scale,
    )
    out, lse = out.reshape(*batch, *out.shape[-2:])[..., : v.shape[-1]], lse.reshape(*batch, lse.shape[-1])
    silent = scores.silent_rows()
    if silent is not None:  # the kernel reports 0 for them, which is a possible log-sum-exp
        lse = lse.masked_fill(silent, -math.inf)
    return out, lse


def row_maxima(scores: Scores) -> Tensor:
    """max_j S_ij, (*batch, m), in chunks; -inf where a row is silenced."""
    maxima = [scores.rows(start, stop).dense().amax(dim=-1) for start, stop in scores.chunks()]
    return torch.cat(maxima, dim=-1)


def _row_parts(scores: Scores) -> list[Scores]:
    """Row chunks for the fused kernel: only their masks are formed, once for all heads that share them."""
    masks = [x.shape[:-2] for x in (scores.keep, scores.bias) if x is not None]
    copies = math.prod(torch.broadcast_shapes(*masks)) if masks else 1
    m, n = scores.shape[-2:]
    step = max(1, min(m, CHUNK // (copies * n)))
    return [scores.rows(start, min(start + step, m)) for start in range(0, m, step)]


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns added until q, k and v are equally wide, and rows in one piece: otherwise the CPU kernel forms P.

    Zeros change neither q.k nor the wanted columns of the result, and one wide call shares its exponentials, which
    several narrow ones would repeat.
    """
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (filled(x, (0, width - x.shape[-1])) for x in (q, k, v))
    # the kernel called directly does not look: it takes every last axis for contiguous
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _mask(scores: Scores, dtype: torch.dtype) -> Tensor | None:
    """`keep` and `bias` as the one argument the kernel takes."""
    if scores.bias is None:
        return scores.keep
    bias = scores.bias.to(dtype)
    return bias if scores.keep is None else torch.where(scores.keep, bias, -math.inf)


def _four_axes(x: Tensor, batch: torch.Size, *, expand: bool = True) -> Tensor:
    """(*batch, rows, width) as (b, h, rows, width): the fused kernel takes nothing else.

    A mask is not expanded when the batch has at most two axes; the kernel reads a size-one axis as shared.
    """
    if len(batch) <= 2:
        x = x.reshape(*(1,) * (4 - x.dim()), *x.shape) if x.dim() < 4 else x
        return x.expand(*(1,) * (2 - len(batch)), *batch, *x.shape[-2:]) if expand else x
    return x.expand(*batch, *x.shape[-2:]).flatten(0, -4)


def _rows(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    return x if x is None or x.shape[-2] == 1 else x[..., start:stop, :]
