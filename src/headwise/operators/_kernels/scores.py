"""S = s Q K^T + attn_bias under a mask: the scores a softmax is taken of, never formed whole.

`attend` uses the compiled tiles of `key_patterns` where they are usable and known to be faster, otherwise torch's fused
kernel; `attend_with_lse` uses torch's and returns the log-sum-exp of every row as well, which is all that entropy,
norms and the transpose of P need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.operators._kernels import key_patterns, limits
from headwise.operators._kernels.key_patterns import KeyPattern, two_batch_axes
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.row_chunks import row_ranges
from headwise.shapes import broadcast_batch, filled, read


@final
@dataclass(frozen=True, eq=False)
class Scores(QueriesKeys):
    """S = scale q k^T + attn_bias where the mask allows, -inf elsewhere.  q (*batch, m, k), k (*batch, n, k)."""

    @classmethod
    def _largest_score(cls, dtype: torch.dtype) -> float:
        # 2 S, S^T - lse and sums over the width stay finite too
        return torch.finfo(torch.promote_types(dtype, torch.float32)).max / 64

    def rows(self, start: int, stop: int) -> Scores:
        """The scores of queries start:stop over the keys that they can reach, without causality (written out)."""
        mask = self.mask.part(start, stop, self.q.device)
        return Scores(self.q[..., start:stop, :], self.k[..., : mask.n, :], self.scale, mask)

    def wide(self) -> Scores:
        """The same scores in at least single precision."""
        return self.to(torch.promote_types(self.q.dtype, torch.float32))

    def to(self, dtype: torch.dtype) -> Scores:
        """The same scores from q, k and attn_bias of another dtype."""
        bias = self.mask.attn_bias
        mask = self.mask if bias is None else self.mask.with_bias(bias.to(dtype))
        return Scores(self.q.to(dtype), self.k.to(dtype), self.scale, mask)

    def dense(self) -> Tensor:
        """S as a tensor (*batch, m, n), in the dtype of q: half precision may overflow, `wide` does not."""
        s = (self.q * self.scale) @ self.k.mT
        if self.mask.attn_bias is not None:
            s = s + self.mask.attn_bias
        visible = self.mask.pairs(s.device)
        return s if visible is None else s.masked_fill(~visible, -math.inf)

    def chunks(self) -> list[tuple[int, int]]:
        """Row ranges whose scores hold at most limits.SCORE_ENTRIES numbers over the whole batch."""
        return row_ranges(self.shape)

    def transposed(self, minus: Tensor) -> Scores:
        """S^T - minus, `minus` one number a query.  If causal, both sequences are reversed to stay causal."""
        q, k, minus = self.q, self.k, minus.unsqueeze(-2)
        if self.mask.causal:
            q, k, minus = q.flip(-2), k.flip(-2), minus.flip(-1)
        mask = self.mask.transposed()
        return Scores(k, q, self.scale, mask.with_bias(-minus if mask.attn_bias is None else mask.attn_bias - minus))

    def doubled(self) -> Scores:
        """2 S: its row-wise log-sum-exp gives the sum of squares of P."""
        bias = self.mask.attn_bias
        return replace(self, scale=2 * self.scale, mask=self.mask.with_bias(None if bias is None else 2 * bias))

    def rising(self) -> Scores:
        """The same scores with a positive scale: torch's causal kernels mask before they scale, and -inf * 0 is NaN."""
        if self.scale > 0:
            return self
        return replace(self, q=-self.q, scale=-self.scale) if self.scale else replace(self, q=0 * self.q, scale=1.0)

    def empty_rows(self) -> Tensor | None:
        """Boolean (*batch, m), True where a query attends to no key; None if that cannot happen."""
        return self.mask.empty_rows(self.q.device)


def attend(scores: Scores, v: Tensor) -> Tensor:
    """softmax(S) v through a fused kernel; rows that attend to no key are zero.

    Values of masked keys count as zero, whatever they hold.
    """
    if v.shape[-1] <= limits.MAX_COLUMNS and _tiles_usable(scores, v):
        return _attend_by_tiles(scores, v)
    return _attend(scores.rising(), scores.mask.hide(v))


def _tiles_usable(scores: Scores, v: Tensor) -> bool:
    """Whether the tiles know the mask, and no TorchFunctionMode wants to see a call of torch's kernel."""
    mask = scores.mask
    return (
        min(scores.m, scores.n) >= limits.TILES_FROM
        and mask.pair_mask is None
        and mask.attn_bias is None
        and mask.ahead in (None, scores.n - scores.m)
        and scores.q.dtype == scores.k.dtype == v.dtype
        and not torch._C._len_torch_function_stack()
        and key_patterns.usable(scores.q, scores.k, v)
    )


def _attend_by_tiles(scores: Scores, v: Tensor) -> Tensor:
    batch = broadcast_batch("Softmax", operator=scores.shape[:-2], v=v.shape[:-2])
    q, k, values = (two_batch_axes(x, batch) for x in (scores.q, scores.k, v))
    key_mask = scores.mask.key_mask
    key_mask = None if key_mask is None else two_batch_axes(key_mask, batch, trailing=1)

    def plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        mask = replace(scores.mask, key_mask=key_mask)
        return weights(Scores(q, mask.hide(k), scores.scale, mask)) @ mask.hide(v)

    out = key_patterns.attend(
        q,
        k,
        values,
        [KeyPattern()] * q.shape[1],
        scale=scores.scale,
        causal=scores.mask.causal,
        key_mask=key_mask,
        plain=plain,
    )
    return out.reshape(*batch, *out.shape[-2:])


def _attend(scores: Scores, v: Tensor) -> Tensor:
    if v.shape[-1] > limits.MAX_COLUMNS:
        return torch.cat([_attend(scores, part) for part in v.split(limits.MAX_COLUMNS, dim=-1)], dim=-1)
    visible, ahead = scores.mask.visible, scores.mask.ahead
    if ahead is not None and not (ahead == 0 and visible is None and scores.mask.attn_bias is None):
        # the kernel's own causality is aligned to the top left and cannot be combined with a mask
        parts = (_attend(part, v[..., : part.k.shape[-2], :]) for part in _row_parts(scores))
        return torch.cat(list(parts), dim=-2)
    batch = broadcast_batch("Softmax", operator=scores.shape[:-2], v=v.shape[:-2])
    q, k, wide = _one_width(scores.q, scores.k, v)
    mask = scores.mask.kernel_mask(visible, q.dtype)
    empty = None
    if mask is not None and visible is not None and scores.mask.attn_bias is not None:
        # with an additive mask, the kernel's gradient of a row of -inf is NaN
        empty = ~visible.any(-1, keepdim=True)
        mask = mask.masked_fill(empty, 0)
    out = F.scaled_dot_product_attention(
        _four_axes(q, batch),
        _four_axes(k, batch),
        _four_axes(wide, batch),
        attn_mask=None if mask is None else _four_axes(mask, batch, expand=False),
        is_causal=ahead is not None,
        scale=scores.scale,
    )
    out = out.reshape(*batch, *out.shape[-2:])[..., : v.shape[-1]]
    return out if empty is None else out.masked_fill(empty, 0)


def attend_with_lse(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax(S) v, log-sum-exp of the rows of S), O(n) memory; an empty row gives zeros and -inf.

    The fused kernel's log-sum-exp has no gradient, so if one is needed the rows are computed in chunks.
    """
    v = scores.mask.hide(v)
    inputs = (scores.q, scores.k, v, *(() if scores.mask.attn_bias is None else (scores.mask.attn_bias,)))
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if needs_gradient or v.device.type != "cpu" or v.dtype not in (torch.float32, torch.float64):
        return attend_with_lse_in_chunks(scores, v)
    return _attend_with_lse_fused(scores.rising(), v)


def attend_with_lse_in_chunks(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same from plain torch, any device, differentiable, at most limits.SCORE_ENTRIES scores at once."""
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
    s = scores.to(compute).dense()
    lse = torch.logsumexp(s, dim=-1)
    # an empty row has lse = -inf; any finite shift makes its exponentials exact zeros
    p = (s - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
    return (p @ v.to(compute)).to(v.dtype), lse


def _attend_with_lse_fused(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    if v.shape[-1] > limits.MAX_COLUMNS:
        pairs = [_attend_with_lse_fused(scores, part) for part in v.split(limits.MAX_COLUMNS, dim=-1)]
        return torch.cat([out for out, _ in pairs], dim=-1), pairs[0][1]
    if scores.mask.ahead:
        parts = _row_parts(scores)
        pairs = [_attend_with_lse_fused(part, v[..., : part.k.shape[-2], :]) for part in parts]
        return torch.cat([out for out, _ in pairs], dim=-2), torch.cat([lse for _, lse in pairs], dim=-1)
    batch = torch.broadcast_shapes(scores.shape[:-2], v.shape[:-2])
    q, k, wide = _one_width(scores.q, scores.k, v)
    mask = scores.mask.kernel_mask(scores.mask.visible, q.dtype)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    if mask is not None and mask.stride(-1) != 1:  # torch up to 2.7 takes the last axis for contiguous
        mask = mask.contiguous()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _four_axes(q, batch),
        _four_axes(k, batch),
        _four_axes(wide, batch),
        0.0,
        scores.mask.causal,
        attn_mask=None if mask is None else _four_axes(mask, batch, expand=False),
        scale=scores.scale,
    )
    out, lse = out.reshape(*batch, *out.shape[-2:])[..., : v.shape[-1]], lse.reshape(*batch, lse.shape[-1])
    empty = scores.empty_rows()
    if empty is not None:  # the kernel reports 0 for them, which is a possible log-sum-exp
        lse = lse.masked_fill(empty, -math.inf)
    return out, lse


def row_maxima(scores: Scores) -> Tensor:
    """max_j S_ij, (*batch, m), in chunks; -inf where a row is empty."""
    scores = scores.wide()
    maxima = [scores.rows(start, stop).dense().amax(dim=-1) for start, stop in scores.chunks()]
    return torch.cat(maxima, dim=-1)


def weights(scores: Scores) -> Tensor:
    """P as a tensor (*batch, m, n), from differences to the row maximum; rows that attend to no key are zero."""
    s = scores.dense()
    empty = scores.empty_rows()
    if empty is None:
        return torch.softmax(s, dim=-1)
    empty = empty.unsqueeze(-1)
    # a softmax over only -inf has a NaN gradient
    return torch.softmax(s.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


def keeps_digits(lse: Tensor) -> bool:
    """Whether exp(S - lse) is accurate; taken for granted where values cannot be read."""
    largest = read(lse.detach().masked_fill(lse == -math.inf, 0).abs().amax())
    return largest is None or largest * torch.finfo(lse.dtype).eps < limits.LARGEST_LSE


def _row_parts(scores: Scores) -> list[Scores]:
    """Row chunks for the fused kernel: only their masks are formed, once for all heads that share them."""
    return [scores.rows(start, stop) for start, stop in row_ranges((*scores.mask.batch, scores.m, scores.n))]


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v padded with zero columns to one width, rows contiguous: otherwise the CPU kernel forms P.

    Zeros change neither q.k nor the columns of v, and one wide call shares its exponentials.
    """
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (filled(x, (0, width - x.shape[-1])) for x in (q, k, v))
    # called directly, the kernel assumes without a check that the last axis is contiguous
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _four_axes(x: Tensor, batch: torch.Size, *, expand: bool = True) -> Tensor:
    """(*batch, rows, width) as (b, h, rows, width): the only layout of the fused kernel.

    A mask is not expanded when the batch has at most two axes; the kernel reads a size-one axis as shared.
    """
    if len(batch) <= 2:
        x = x.reshape(*(1,) * (4 - x.dim()), *x.shape) if x.dim() < 4 else x
        return x.expand(*(1,) * (2 - len(batch)), *batch, *x.shape[-2:]) if expand else x
    return x.expand(*batch, *x.shape[-2:]).flatten(0, -4)
