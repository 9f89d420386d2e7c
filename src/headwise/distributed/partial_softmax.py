"""softmax(scale q k^T) v over some of the keys, for sums over parts that are held by different ranks:

    out = sum_p exp(lse_p - lse) out_p,    lse = log sum_p exp(lse_p),    out_p and lse_p of part p alone

The gradient of part p is that of attention over its keys alone with `out` and `lse` in place of its own, for
exp(S_p - lse) are its entries of the merged P.  Causal: the last query is at the last key.  By the compiled kernel
where it is usable, by torch's on other CPUs, otherwise by products.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.operators._kernels import key_patterns, limits
from headwise.operators._kernels.key_patterns import KeyPattern, PatternAttention, two_batch_axes
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators._kernels.scores import Scores, attend_with_lse
from headwise.operators.masks import Mask
from headwise.shapes import filled


class Part(NamedTuple):
    """Queries, and some of the keys and values; k may have fewer heads than q (grouped queries)."""

    q: Tensor  # (*batch, m, k)
    k: Tensor  # (*batch, n, k)
    v: Tensor  # (*batch, n, d)
    key_mask: Tensor | None = None  # (*batch, n), True = attend

    def wide(self) -> Part:
        """At least single precision, and heads of k repeated."""
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in self[:3])
        return Part(q, repeat_heads(k, q, "Softmax"), v, self.key_mask)

    @property
    def suits_tiles(self) -> bool:
        rows, columns = min(self.q.shape[-2], self.k.shape[-2]), self.v.shape[-1]
        return rows >= limits.TILES_FROM and columns <= limits.MAX_COLUMNS and key_patterns.usable(*self[:3])


def attend_part(part: Part, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out_p (*batch, m, d) and lse_p (*batch, m) in at least single precision; a row without keys: zeros and -inf."""
    q, k, v, mask = wide = part.wide()
    if wide.suits_tiles:
        tensors, batch = _for_tiles(q, k, v, mask)
        out, top, total = _tiles(tensors[0], scale, causal).forward(*tensors)
        lse = (top + total.log()).masked_fill(total == 0, -math.inf)
        return out.reshape(*batch, *out.shape[-2:]), lse.reshape(*batch, -1)
    if not k.shape[-2]:
        out = v.new_zeros(*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), q.shape[-2], v.shape[-1])
        return out, out.new_full(out.shape[:-1], -math.inf)
    return attend_with_lse(_scores(q, k, mask, scale, causal), v)


def part_gradients(
    pull: Tensor, part: Part, scale: float, causal: bool, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of <out, pull> in q, k and v of one part, from the merged out and lse; of their own shapes."""
    if not part.k.shape[-2]:
        return torch.zeros_like(part.q), torch.zeros_like(part.k), torch.zeros_like(part.v)
    q, k, v, mask = wide = part.wide()
    batch = out.shape[:-2]
    lse = lse.masked_fill(lse == -math.inf, 0)  # a row without any key: its scores are all hidden
    if wide.suits_tiles:
        tensors, _ = _for_tiles(q, k, v, mask)
        g, rows = (two_batch_axes(x, batch) for x in (pull, out))
        top = two_batch_axes(lse, batch, trailing=1)
        found = _tiles(tensors[0], scale, causal).pull(g, *tensors, rows, top, torch.ones_like(top))
        found = [x.reshape(*batch[:-1], *x.shape[1:]) if batch else x[0, 0] for x in found]
    else:
        scores, v = _scores(q, k, mask, scale, causal), v if mask is None else torch.where(mask.unsqueeze(-1), v, 0)
        plain_causality = not causal or (scores.m == scores.n and mask is None)
        by_torch = q.device.type == "cpu" and plain_causality and scale > 0 and v.shape[-1] <= limits.MAX_COLUMNS
        found = (_by_torch if by_torch else _by_products)(pull, scores, v, out, lse)
    dq, dk, dv = (fold(x, like) for x, like in zip(found, part[:3], strict=True))
    return dq, dk, dv


def fold(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of repeating heads and of broadcasting: sums of x over the axes along which `like` was repeated."""
    if like.dim() > 2 and like.shape[-3] not in (1, x.shape[-3]):
        x = x.unflatten(-3, (like.shape[-3], -1)).sum(-3)
    return x.sum_to_size(like.shape)


def _tiles(q: Tensor, scale: float, causal: bool) -> PatternAttention:
    return PatternAttention((KeyPattern(),) * q.shape[1], scale, causal, 0, _not_again)


def _not_again(*tensors: Tensor) -> Tensor:
    raise AssertionError("gradients of parts are computed once")


def _for_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[list[Tensor], torch.Size]:
    """The tensors of the kernel, with two batch axes, and the batch axes of the result."""
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    tensors = [two_batch_axes(x, batch) for x in (q, k, v)]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return tensors if mask is None else [*tensors, two_batch_axes(mask, batch, trailing=1)], batch


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Scores:
    masks = Mask(q.shape[-2], k.shape[-2], causal, mask)
    return Scores(q, masks.hide(k), scale, masks)


def _by_torch(pull: Tensor, scores: Scores, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """By the backward pass of torch's fused kernel, whose causality is that of as many queries as keys."""
    batch, mask = out.shape[:-2], scores.mask.key_mask
    width = max(scores.q.shape[-1], v.shape[-1])
    tensors = [two_batch_axes(filled(x, (0, width - x.shape[-1])), batch) for x in (pull, scores.q, scores.k, v, out)]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    hidden = None
    if mask is not None:
        hidden = pull.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
        hidden = two_batch_axes(hidden, batch, trailing=1).unsqueeze(-2).expand(-1, -1, scores.m, -1)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors,
        two_batch_axes(lse, batch, trailing=1),
        0.0,
        scores.mask.causal,
        attn_mask=hidden,
        scale=scores.scale,
    )
    widths = scores.q.shape[-1], scores.k.shape[-1], v.shape[-1]
    return tuple(x[..., :w].reshape(*batch, *x.shape[-2:-1], w) for x, w in zip(found, widths, strict=True))


def _by_products(pull: Tensor, scores: Scores, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """dq = s dS K, dk = s dS^T Q, dv = P^T g with dS = P * (g v^T - <g, out>), in chunks of rows."""
    batch = out.shape[:-2]
    delta = (pull * out).sum(-1, keepdim=True)
    dq, dk, dv = (x.new_zeros(*batch, *x.shape[-2:]) for x in (scores.q, scores.k, v))
    for start, stop in scores.chunks():
        rows = scores.rows(start, stop)
        p = (rows.dense() - lse[..., start:stop, None]).exp()
        g = pull[..., start:stop, :]
        ds = p * (g @ v[..., : rows.n, :].mT - delta[..., start:stop, :]) * scores.scale
        dq[..., start:stop, :] = ds @ rows.k
        dk[..., : rows.n, :] += ds.mT @ rows.q
        dv[..., : rows.n, :] += p.mT @ g
    return dq, dk, dv
