"""P = (Q K^T o M) / C: attention without exponentials, so that P V = Q (K^T V) / n in O((m + n) k d).

M_ij = 1 where query i may attend to key j, C_i = sum_j M_ij.  P may be negative and its rows
need not sum to one: it claims neither.  Wang et al. 2018 (dot product); Shen et al. 2021 (scaling normalisation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels import limits
from headwise.operators._kernels.row_chunks import adjoint_rows, apply_rows, causal_adjoint, causal_apply
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.masks import CAUSAL, KEY_MASK, PAIR_MASK, Mask, supports
from headwise.operators.similarity import Embedding, embed
from headwise.shapes import all_finite, broadcast_batch, filled, no_empty_axis, same_axis, same_kind


@final
@dataclass(frozen=True, eq=False)
class DotProduct(AttentionOperator):
    """P_ij = M_ij q_i . k_j / C_i from q (*batch, m, k) and k (*batch, n, k).

    apply and adjoint: one product over the keys and one over the queries; causal, the same in blocks with running sums
    of K^T V; with an arbitrary mask, rows of P in blocks, O(m n (k + d)).
    """

    q: Tensor
    k: Tensor
    mask: Mask

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    @property
    def claims(self) -> frozenset[Claim]:
        return frozenset({Claim.CAUSAL}) if self.mask.causal else frozenset()

    def apply(self, v: Tensor) -> Tensor:
        q, k, x = self._in_one_dtype(v)
        x = self.mask.hide(x)
        if self.mask.pair_mask is not None:
            out = apply_rows(self._rows(q, k), self.shape, x)
        else:
            out = causal_apply(_product, _triangle, q, k, x) if self.mask.causal else _product(q, k, x)
        return self.mask.average(out).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        """K (Q^T (u / C)): queries and keys change roles."""
        q, k, x = self._in_one_dtype(u)
        x = self.mask.average(x)
        if self.mask.pair_mask is not None:
            out = adjoint_rows(self._rows(q, k), self.shape, x)
        elif self.mask.causal:
            out = causal_adjoint(_product, _triangle, q, k, x)
        else:
            out = _product(k, q, x)
        return self.mask.hide(out).to(u.dtype)

    def cost(self, d: int) -> Cost:
        *batch, m, n = self.shape
        width = self.q.shape[-1]
        if self.mask.pair_mask is not None:
            return Cost(m * n * (width + d), m * n).times(math.prod(batch))
        if not self.mask.causal:
            return Cost((m + n) * width * d, width * d).times(math.prod(batch))
        block, blocks = _blocks(min(m, n), width)
        inside = Cost(blocks * block**2 * (width + d), blocks * block**2)
        between = Cost(2 * (blocks - 1) * block * width * d, (blocks - 1) * width * d, blocks)
        total = inside.beside(between)
        if n > m:  # the keys that every query attends to
            total = total.beside(Cost(n * width * d, width * d))
        return total.times(math.prod(batch))

    def _in_one_dtype(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K^T V sums n products: half precision would overflow, so it goes through float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.q.to(dtype), self.k.to(dtype), x.to(dtype)

    def _rows(self, q: Tensor, k: Tensor):
        def rows(start: int, stop: int) -> Tensor:
            scores = q[..., start:stop, :] @ k.mT
            return scores.masked_fill(~self.mask.rows(start, stop, q.device), 0)

        return rows


def _product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(Q K^T) V in the cheap order"""
    return q @ (k.mT @ v)


def _triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """tril(Q K^T) V: inside a block as written, between blocks through the running sum of K^T V."""
    n = q.shape[-2]
    block, blocks = _blocks(n, q.shape[-1])
    q, k, v = (filled(x, (0, 0, 0, blocks * block - n)).unflatten(-2, (blocks, block)) for x in (q, k, v))
    out = (q @ k.mT).tril() @ v
    if blocks > 1:
        sums = (k[..., :-1, :, :].mT @ v[..., :-1, :, :]).cumsum(-3)
        out = out + F.pad(q[..., 1:, :, :] @ sums, (0, 0, 0, 0, 1, 0))
    return out.flatten(-3, -2)[..., :n, :]


def _blocks(n: int, width: int) -> tuple[int, int]:
    """Size and number of blocks: at least as long as keys are wide, so that the running sums are no larger than v."""
    block = min(n, max(limits.DIAGONAL_BLOCK, width))
    return block, -(-n // block)


@supports(CAUSAL, KEY_MASK, PAIR_MASK)
def dot_product(
    q: Tensor,
    k: Tensor,
    *,
    theta: Embedding = None,
    phi: Embedding = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
) -> DotProduct:
    """P_ij = θ(q_i) . φ(k_j) / C_i, C_i the number of keys that query i attends to (n without masks).

    >>> dot_product(torch.eye(2), torch.eye(2)).dense()
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    q, k = embed("DotProduct", "q", q, theta), embed("DotProduct", "k", k, phi)
    no_empty_axis("DotProduct", q=q, k=k)
    same_kind("DotProduct", q=q, k=k)
    same_axis("DotProduct", "k", q=q.shape[-1], k=k.shape[-1])
    all_finite("DotProduct", q=q, k=k)
    batch = broadcast_batch("DotProduct", q=q.shape[:-2], k=k.shape[:-2])
    m, n = q.shape[-2], k.shape[-2]
    masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask}
    return DotProduct(q, k, Mask.checked("DotProduct", m, n, **masks, batch=batch, device=q.device))
