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
from headwise.operators._kernels.prefix_sums import blocked
from headwise.operators._kernels.row_chunks import AveragedOperator
from headwise.operators.claims import Claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, PAIR_MASK, supports
from headwise.operators.masks import Mask
from headwise.operators.similarity import Embedding, embed
from headwise.shapes import broadcast_batch, no_empty_axis, products_fit, same_axis, same_kind, symbolic


@final
@dataclass(frozen=True, eq=False)
class DotProduct(AveragedOperator):
    """P_ij = M_ij q_i . k_j / C_i from q (*batch, m, k) and k (*batch, n, k).

    One product over the keys and one over the queries; causal, the same in blocks with running sums of K^T V.
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

    def _sides(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.q.to(dtype), self.k.to(dtype)  # K^T V sums n products: half precision would overflow

    @staticmethod
    def full(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return a @ (b.mT @ v)

    @staticmethod
    def triangle(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        """tril(Q K^T) V: inside a block as written, between blocks through the running sum of K^T V."""
        n = a.shape[-2]
        if symbolic(n):
            return (a @ b.mT).tril() @ v
        block, blocks = _blocks(n, a.shape[-1])
        q, k, v = (blocked(x, block) for x in (a, b, v))
        out = (q @ k.mT).tril() @ v
        if blocks > 1:
            sums = (k[..., :-1, :, :].mT @ v[..., :-1, :, :]).cumsum(-3)
            out = out + F.pad(q[..., 1:, :, :] @ sums, (0, 0, 0, 0, 1, 0))
        return out.flatten(-3, -2)[..., :n, :]

    @staticmethod
    def entries(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.mT

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
    batch = broadcast_batch("DotProduct", q=q.shape[:-2], k=k.shape[:-2])
    masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask}
    mask = Mask.checked("DotProduct", q.shape[-2], k.shape[-2], **masks, batch=batch, device=q.device)
    mask = mask.settled("DotProduct")
    k = mask.hide(k)
    products_fit("DotProduct", 1.0, torch.finfo(torch.promote_types(q.dtype, torch.float32)).max / 64, q=q, k=k)
    return DotProduct(q, k, mask)
