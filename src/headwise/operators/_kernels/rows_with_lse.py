"""Rows of P v beside the log-sum-exps of their scores: what merging with rows over other keys needs.

    rows_with_lse(union, v)            (P v, lse), (*batch, m, d + 1), of a `Union`
    blocks_with_lse(q, k, v, mask)     the same of many small blocks, each with a mask of its own
    merged(rows, index, m)             softmax over the keys of all rows: sum_p exp(lse_p - lse) out_p

All are differentiable.  With dS = P * (g v^T - <g, P v>) for P v and dS = P * g for lse, a gradient in lse is one more
column, in which v is 0 and P v counts as 1; so the kernels' own backward passes give both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from headwise.operators._kernels import autograd_functions, limits
from headwise.operators._kernels.hash_rounds import additive, in_groups
from headwise.operators._kernels.key_patterns import PatternAttention
from headwise.operators._kernels.sparse_blocks import Merge, Union, one_width, plain_with_lse
from headwise.shapes import filled


def rows_with_lse(union: Union, v: Tensor) -> Tensor:
    """P v and the log-sum-exp of each row as a last column, in at least single precision.

    A row without a key has zeros, and about limits.HIDDEN.
    """
    if v.shape[-1] >= limits.MAX_COLUMNS:
        parts = [rows_with_lse(union, part) for part in v.split(limits.MAX_COLUMNS - 1, dim=-1)]
        return torch.cat([*(part[..., :-1] for part in parts), parts[0][..., -1:]], dim=-1)
    compute = torch.promote_types(v.dtype, torch.float32)
    union, v = replace(union, q=union.q.to(compute), k=union.k.to(compute)), v.to(compute)
    if union.pattern is not None and union._kernel_usable(v):
        tensors, options, batch = union._for_kernel(v)
        mask = () if union.key_mask is None else (options["key_mask"],)
        attention = PatternAttention(tuple(options["patterns"]), union.scale, union.causal, 0, union._plain)
        out = autograd_functions.run(_PatternWithLse(attention, union), *tensors, *mask)
        return out.reshape(*batch, *out.shape[-2:])
    q, k, values, batch = union._prepared(
        v if union.key_mask is None else v.masked_fill(~union.key_mask.unsqueeze(-1), 0)
    )
    out = autograd_functions.run(_MergeWithLse(Merge(union.scale, union.pieces)), q, k, values)
    return out.reshape(*batch, *out.shape[-2:])


def blocks_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(b, s, d + 1) for q (b, s, k), k and v (b, l, ·) in at least single precision, and mask (b, s, l)."""
    return autograd_functions.run(_BlocksWithLse(scale), q, k, v, mask)


def merged(rows: Tensor, index: Tensor, m: int) -> Tensor:
    """m rows (m, d + 1), each one softmax of the rows (l, d + 1) whose `index` (l,) it is; zeros if there are none."""
    lse = rows[:, -1]
    top = lse.detach().new_full((m,), limits.HIDDEN).scatter_reduce(0, index, lse.detach(), "amax")
    weights = (lse - top[index]).exp()
    total = weights.new_zeros(m).index_add(0, index, weights)
    total = total.masked_fill(total == 0, 1)
    out = rows.new_zeros(m, rows.shape[1] - 1).index_add(0, index, weights.unsqueeze(-1) * rows[:, :-1])
    return _joined(out / total.unsqueeze(-1), top + total.log())


def _joined(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1)


def _one_more_column(pull: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, values and result with the column of the log-sum-exps."""
    g = torch.cat([pull[..., :-1], -pull[..., -1:]], dim=-1)
    return g, filled(v, (0, 1)), torch.cat([rows[..., :-1], torch.ones_like(rows[..., -1:])], dim=-1)


@final
@dataclass(frozen=True, eq=False)
class _MergeWithLse:
    """(P v, lse) for q (b, m, c), k and v (b, n, ·), by the fused kernel of torch."""

    merge: Merge

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, lse = self.merge.forward(*one_width(*tensors))
        return (_joined(out[..., : tensors[2].shape[-1]], lse),)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, rows = tensors
        g, values, out = _one_more_column(pull, v, rows)
        g, wide_q, wide_k, values, out = one_width(g, q, k, values, out)
        found = self.merge.pull(g, wide_q, wide_k, values, out, rows[..., -1].contiguous())
        return tuple(x[..., : like.shape[-1]] for x, like in zip(found, (q, k, v), strict=True))

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v = tensors
        return _joined(*plain_with_lse(q, k, v, self.merge.scale, self.merge.pieces))


@final
@dataclass(frozen=True, eq=False)
class _PatternWithLse:
    """(P v, lse) for q (b, h, m, c), k and v (b, h, n, ·) and a mask (b, h, n) if any, by the compiled kernel."""

    attention: PatternAttention
    union: Union

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, top, total = self.attention.forward(*tensors)
        return (_joined(out, (top + total.log()).masked_fill(total == 0, limits.HIDDEN)),)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *mask, rows = tensors
        g, values, out = _one_more_column(pull, v, rows)
        lse = rows[..., -1].masked_fill(rows[..., -1] < limits.HIDDEN / 2, 0)  # of a row whose scores are all hidden
        dq, dk, dv = self.attention.pull(g, q, k, values, *mask, out, lse, torch.ones_like(lse))
        return dq, dk, dv[..., : v.shape[-1]]

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v, *mask = tensors
        union = replace(self.union, q=q, k=k, key_mask=mask[0] if mask else None)
        v = v.masked_fill(~mask[0].unsqueeze(-1), 0) if mask else v
        q, k, v, batch = union._prepared(v)
        return _joined(*plain_with_lse(q, k, v, union.scale, union.pieces)).unflatten(0, batch)


@final
@dataclass(frozen=True)
class _BlocksWithLse:
    """The same of blocks under masks."""

    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return in_groups(self._forward, tensors[3][0].numel(), tensors) if len(tensors[0]) else self._forward(*tensors)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return in_groups(self._pull, tensors[3][0].numel(), (pull, *tensors))

    def _forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mask = tensors
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.unsqueeze(1) for x in one_width(q, k, v)),
            0.0,
            False,
            attn_mask=additive(mask, q.dtype).unsqueeze(1),
            scale=self.scale,
        )
        lse = lse.squeeze(1)
        empty = lse < limits.HIDDEN / 2
        out = out.squeeze(1)[..., : v.shape[-1]].masked_fill(empty.unsqueeze(-1), 0)
        return (_joined(out, lse),)

    def _pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mask, rows = tensors
        g, values, out = _one_more_column(pull, v, rows)
        lse = rows[..., -1].contiguous()
        g = g.masked_fill((lse < limits.HIDDEN / 2).unsqueeze(-1), 0)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.unsqueeze(1) for x in one_width(g, q, k, values, out)),
            lse.unsqueeze(1),
            0.0,
            False,
            attn_mask=additive(mask, q.dtype).unsqueeze(1),
            scale=self.scale,
        )
        return tuple(x.squeeze(1)[..., : like.shape[-1]] for x, like in zip(found, (q, k, v), strict=True))

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v, mask = tensors
        s = (self.scale * (q @ k.mT)).masked_fill(~mask, limits.HIDDEN)
        top = s.detach().amax(-1)
        p = (s - top.unsqueeze(-1)).exp().masked_fill(~mask, 0)
        total = p.sum(-1)
        empty = total == 0
        total = total.masked_fill(empty, 1)
        return _joined(p @ v / total.unsqueeze(-1), (top + total.log()).masked_fill(empty, limits.HIDDEN))
