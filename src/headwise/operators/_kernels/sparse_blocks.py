"""softmax over a union of disjoint sets of keys = the softmaxes over each, weighted by their log-sum-exps:

    P v = sum_p exp(lse_p - lse) P_p v,    lse = log sum_p exp(lse_p),    P_p and lse_p of piece p alone.

A sparse pattern is a union of pieces, and each piece a batch of small dense attentions, which the fused kernel does
without forming a score twice or gathering a position.  The gradient of piece p is the kernel's own with the merged
output and the merged log-sum-exp in place of the piece's (exp(S_p - lse) are the piece's entries of the merged P), so
it is exact.  A plain path does the same from matrix products: it is differentiable again, runs on any device, and is
what torch.compile traces, for it bans the overlapping views that the fast one writes through.  Where the compiled
kernels are, a union that is also a `KeyPattern` is one call of theirs instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels import autograd_functions, key_patterns, limits
from headwise.operators._kernels.key_patterns import KeyPattern, two_batch_axes
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators._kernels.tiles import Tiles
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.shapes import filled


@final
@dataclass(frozen=True, eq=False)
class Piece:
    """Block b of `rows` attends to block b of `columns`, where `mask` (size, size) or plain causality allow.

    `first` says that no earlier piece has any of these rows: there is nothing to merge with.
    """

    rows: Tiles
    columns: Tiles
    first: bool
    causal: bool = False  # row t of a block attends to columns <= t
    mask: Tensor | None = None  # boolean, one for all blocks

    def hidden(self, device: torch.device) -> Tensor | None:
        """Boolean (size, size), True where a row may not attend; None if nothing is hidden."""
        if self.causal:
            return torch.ones(self.rows.size, self.columns.size, dtype=torch.bool, device=device).triu_(1)
        return None if self.mask is None else ~self.mask

    def runs(self, most: int) -> list[Piece]:
        """The same piece in pieces of at most `most` blocks."""
        if self.rows.blocks <= most:
            return [self]
        starts = range(0, self.rows.blocks, most)
        return [replace(self, rows=self.rows.run(i, most), columns=self.columns.run(i, most)) for i in starts]

    def multiply_adds(self, width: int) -> int:
        return self.rows.blocks * self.rows.size * self.columns.size * 2 * width


@final
@dataclass(frozen=True, eq=False)
class Union:
    """P = softmax of scale q k^T over the union of the pieces; `key_mask` (*batch, n), True = attend.

    `make_pieces` is called where pieces are needed; the compiled kernel is given the same keys as `pattern`.
    """

    q: Tensor
    k: Tensor
    scale: float
    make_pieces: Callable[[], Iterable[Piece]]
    key_mask: Tensor | None = None
    pattern: KeyPattern | None = None
    causal: bool = False  # of the pattern

    @classmethod
    def of(
        cls,
        qk: QueriesKeys,
        make_pieces: Callable[[], Iterable[Piece]],
        pattern: KeyPattern | None = None,
        causal: bool = False,
    ) -> Union:
        return cls(qk.q, qk.k, qk.scale, make_pieces, qk.key_mask, pattern, causal)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self.make_pieces())

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    def apply(self, v: Tensor) -> Tensor:
        if self.pattern is not None and self._kernel_usable(v):
            tensors, options, batch = self._for_kernel(v)
            return key_patterns.attend(*tensors, **options, plain=self._plain).reshape(*batch, self.shape[-2], -1)
        if v.shape[-1] > limits.MAX_COLUMNS:
            return torch.cat([self.apply(part) for part in v.split(limits.MAX_COLUMNS, dim=-1)], dim=-1)
        q, k, values, batch = self._prepared(
            v if self.key_mask is None else v.masked_fill(~self.key_mask.unsqueeze(-1), 0)
        )
        q, k, values = one_width(q, k, values)
        out = autograd_functions.run(Merge(self.scale, self.pieces), q, k, values)[..., : v.shape[-1]]
        return out.unflatten(0, batch).to(v.dtype) if batch else out.squeeze(0).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, u))
        if self.pattern is not None and not needs_gradient and self._kernel_usable(u):
            tensors, options, batch = self._for_kernel(u)
            return key_patterns.adjoint(*tensors, **options).reshape(*batch, self.shape[-1], -1)
        if u.shape[-1] > limits.MAX_COLUMNS:
            return torch.cat([self.adjoint(part) for part in u.split(limits.MAX_COLUMNS, dim=-1)], dim=-1)
        q, k, rows, batch = self._prepared(u)
        if u.device.type != "cpu" or torch.compiler.is_compiling() or needs_gradient:
            out = plain_adjoint(q, k, rows, self.scale, self.pieces)
        else:
            # the kernel's gradient with respect to values that are zero is P^T u
            q, k, rows = one_width(q, k, rows)
            merge, zeros = Merge(self.scale, self.pieces), torch.zeros_like(k)
            kept = autograd_functions.Forward.apply(merge, 3, q, k, zeros)
            out = autograd_functions.Pull.apply(merge, 3, rows, q, k, zeros, *kept)[2][..., : u.shape[-1]]
        if self.key_mask is not None:
            out = out.masked_fill(
                ~self.key_mask.expand(*batch, self.shape[-1]).reshape(out.shape[:-1]).unsqueeze(-1), 0
            )
        return out.unflatten(0, batch).to(u.dtype) if batch else out.squeeze(0).to(u.dtype)

    def cost(self, d: int) -> Cost:
        *batch, m, _ = self.shape
        k = self.q.shape[-1] + (self.key_mask is not None)
        widths = [max(k, min(limits.MAX_COLUMNS, d - start)) for start in range(0, d, limits.MAX_COLUMNS)]
        work = sum(piece.multiply_adds(width) for piece in self.pieces for width in widths)
        return Cost(math.prod(batch) * work, math.prod(batch) * m * (max(widths) + 2))

    def empty_rows(self) -> Tensor:
        """Boolean (*batch, m), True where a query attends to no key."""
        *batch, m, n = self.shape
        visible = torch.ones(n, device=self.q.device) if self.key_mask is None else self.key_mask.float()
        total = visible.new_zeros(*visible.shape[:-1], m)
        for piece in self.pieces:
            hidden = piece.hidden(visible.device)
            keys = visible[..., piece.columns.index(visible.device)]
            weights = keys.new_ones(piece.rows.size, piece.columns.size) if hidden is None else (~hidden).float()
            counts = keys @ weights.mT
            total = total.index_add(-1, piece.rows.index(visible.device).flatten(), counts.flatten(-2))
        return (total == 0).expand(*batch, m)

    def _kernel_usable(self, x: Tensor) -> bool:
        return x.dtype == self.q.dtype and key_patterns.usable(self.q, self.k, x)

    def _for_kernel(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], torch.Size]:
        """q, k and x with two batch axes, the other arguments of the kernel, and the batch axes of the result."""
        batch = torch.broadcast_shapes(self.shape[:-2], x.shape[:-2])
        q, k, x = (two_batch_axes(y, batch) for y in (self.q, self.k, x))
        mask = None if self.key_mask is None else two_batch_axes(self.key_mask, batch, trailing=1)
        patterns = [self.pattern] * q.shape[1]
        return (q, k, x), {"patterns": patterns, "scale": self.scale, "causal": self.causal, "key_mask": mask}, batch

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """What the kernel computes, from matrix products."""
        union = replace(self, q=q, k=k, key_mask=key_mask)
        v = v if key_mask is None else v.masked_fill(~key_mask.unsqueeze(-1), 0)
        q, k, v, batch = union._prepared(v)
        return plain(q, k, v, self.scale, self.pieces).unflatten(0, batch)

    def _prepared(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        """q, k and x with one batch axis, in at least single precision, masked keys at score limits.HIDDEN."""
        compute = torch.promote_types(x.dtype, torch.float32)  # merged weights are not half-precision numbers
        batch = torch.broadcast_shapes(self.shape[:-2], x.shape[:-2])
        q, k, x = (y.to(compute) for y in (self.q, self.k, x))
        if self.key_mask is not None:
            hidden = ~self.key_mask.unsqueeze(-1)
            # one more column holds what a masked key adds to its scores: no mask with a head axis is ever formed
            k = torch.cat([k, self._column(k, hidden)], dim=-1)
            q = F.pad(q, (0, 1), value=1.0)
        q, k, x = (y.expand(*batch, *y.shape[-2:]).reshape(-1, *y.shape[-2:]) for y in (q, k, x))
        return q, k, x, batch

    def _column(self, k: Tensor, hidden: Tensor) -> Tensor:
        column = k.new_zeros(()).masked_fill(hidden, limits.HIDDEN / self.scale)
        return column.expand(*torch.broadcast_shapes(k.shape[:-1], hidden.shape[:-1]), 1)


class BlockOperator(AttentionOperator):
    """What every operator made of a `union` of pieces has in common."""

    union: Union
    causal: bool

    @property
    def shape(self) -> torch.Size:
        return self.union.shape

    @property
    def claims(self) -> frozenset[Claim]:
        empty = self.union.key_mask is not None and bool(self.union.empty_rows().any())
        return weights_claim(stochastic=not empty, causal=self.causal)

    def apply(self, v: Tensor) -> Tensor:
        return self.union.apply(v)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.union.adjoint(u)

    def cost(self, d: int) -> Cost:
        """Scores and weighted sums of every block in full, hidden entries included, keys and values equally wide."""
        return self.union.cost(d)


@final
@dataclass(frozen=True, eq=False)
class Merge:
    """(P v, lse) for q (b, m, c), k and v (b, n, c), by the fused kernel of torch and its own backward."""

    scale: float
    pieces: tuple[Piece, ...]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v = tensors
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), limits.HIDDEN)
        pieces, groups = self._in_turn(q)
        for some in groups:
            by_query, by_key = [x[some] for x in (q, out, lse)], [x[some] for x in (k, v)]
            for piece in pieces:
                mask, hidden = _float_mask(piece, q)
                queries, total, total_lse = (piece.rows.view(x) for x in by_query)
                keys, values = (piece.columns.view(x) for x in by_key)
                part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries, keys, values, 0.0, piece.causal, attn_mask=mask, scale=self.scale
                )
                if hidden is not None:  # the kernel reports 0 for a row without a key, which is a possible sum
                    part_lse = part_lse.masked_fill(hidden.all(-1), limits.HIDDEN)
                part_lse = part_lse.unsqueeze(-1)
                if piece.first:
                    total.copy_(part)
                    total_lse.copy_(part_lse)
                else:
                    merged = torch.logaddexp(total_lse, part_lse)
                    total.mul_((total_lse - merged).exp_()).addcmul_(part, (part_lse - merged).exp_())
                    total_lse.copy_(merged)
        empty = lse < limits.HIDDEN / 2
        return out.masked_fill_(empty, 0) if empty.any() else out, lse.squeeze(-1)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = tensors
        totals = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        empty = lse < limits.HIDDEN / 2
        pull = pull.masked_fill(empty.unsqueeze(-1), 0) if empty.any() else pull
        pieces, groups = self._in_turn(q)
        for some in groups:
            by_query = [x[some] for x in (pull, q, out, lse.unsqueeze(-1))]
            by_key = [x[some] for x in (k, v)]
            for piece in pieces:
                g, queries, result, sums = (piece.rows.view(x) for x in by_query)
                keys, values = (piece.columns.view(x) for x in by_key)
                mask = _float_mask(piece, q)[0]
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g,
                    queries,
                    keys,
                    values,
                    result,
                    sums.squeeze(-1),
                    0.0,
                    piece.causal,
                    attn_mask=mask,
                    scale=self.scale,
                )
                for tiles, total, part in zip((piece.rows, piece.columns, piece.columns), totals, parts, strict=True):
                    tiles.add_to(total[some], part)
        return totals

    def _in_turn(self, q: Tensor) -> tuple[list[Piece], list[slice]]:
        """Pieces of a few blocks, a few members of the batch: the buffers of one are reused by the next."""
        b, n, c = q.shape
        room = limits.CACHE_ENTRIES * torch.get_num_threads()
        size = max(1, room // (n * c))
        pieces = [run for piece in self.pieces for run in piece.runs(max(1, room // (size * piece.columns.size * c)))]
        return pieces, [slice(start, start + size) for start in range(0, b, size)]

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v = tensors
        return plain(q, k, v, self.scale, self.pieces)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, pieces: tuple[Piece, ...]) -> Tensor:
    """P v from matrix products: q (b, m, c), k (b, n, c), v (b, n, d)."""
    return plain_with_lse(q, k, v, scale, pieces)[0]


def plain_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float, pieces: tuple[Piece, ...]) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp (b, m) of every row, limits.HIDDEN where there is no key."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    weights, lse = _weights(q, k, scale, pieces)
    for piece, p in zip(pieces, weights, strict=True):
        part = p @ v[:, piece.columns.index(v.device)]
        out = out.index_add(1, piece.rows.index(v.device).flatten(), part.flatten(1, 2))
    return out, lse


def plain_adjoint(q: Tensor, k: Tensor, u: Tensor, scale: float, pieces: tuple[Piece, ...]) -> Tensor:
    """P^T u from matrix products: q (b, m, c), k (b, n, c), u (b, m, d)."""
    out = k.new_zeros(k.shape[0], k.shape[1], u.shape[-1])
    for piece, p in zip(pieces, _weights(q, k, scale, pieces)[0], strict=True):
        part = p.mT @ u[:, piece.rows.index(u.device)]
        out = out.index_add(1, piece.columns.index(u.device).flatten(), part.flatten(1, 2))
    return out


def _weights(q: Tensor, k: Tensor, scale: float, pieces: tuple[Piece, ...]) -> tuple[list[Tensor], Tensor]:
    """The entries of P in each piece, (b, blocks, size of a row block, size of a column block), and lse (b, m)."""
    scores, top = [], q.detach().new_full(q.shape[:-1], limits.HIDDEN)
    for piece in pieces:
        rows = piece.rows.index(q.device)
        s = scale * (q[:, rows] @ k[:, piece.columns.index(q.device)].mT)
        hidden = piece.hidden(q.device)
        s = s if hidden is None else s.masked_fill(hidden, limits.HIDDEN)
        # P does not depend on the shift, so its derivatives need not know of it
        top = top.index_copy(1, rows.flatten(), torch.maximum(top[:, rows], s.detach().amax(-1)).flatten(1))
        scores.append(s)
    weights, total = [], q.new_zeros(q.shape[:-1])
    for piece, s in zip(pieces, scores, strict=True):
        rows = piece.rows.index(q.device)
        w = (s - top[:, rows].unsqueeze(-1)).exp().masked_fill(s < limits.HIDDEN / 2, 0)
        total = total.index_add(1, rows.flatten(), w.sum(-1).flatten(1))
        weights.append(w)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (top + total.log()).masked_fill(empty, limits.HIDDEN)
    total = total.unsqueeze(-1)
    return [w / total[:, piece.rows.index(q.device)] for piece, w in zip(pieces, weights, strict=True)], lse


def _float_mask(piece: Piece, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The mask as the kernel wants it, and what is hidden."""
    if piece.causal or piece.mask is None:
        return None, None
    hidden = ~piece.mask
    return like.new_zeros(1, 1, *hidden.shape).masked_fill_(hidden, -math.inf), hidden


def one_width(*tensors: Tensor) -> list[Tensor]:
    """Zero columns added until all are as wide as the widest: the kernel takes one width only."""
    width = max(x.shape[-1] for x in tensors)
    return [filled(x, (0, width - x.shape[-1])) for x in tensors]
