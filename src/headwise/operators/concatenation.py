"""P_ij = M_ij relu(w . [q_i; k_j]) / C_i, a sum of two numbers under a kink, applied in O((m + n)(k + d + log n)).

w . [q; k] = a_i + b_j with a = Q w_q, b = K w_k.  With the keys sorted by b, those with b_j > -a_i come first, and the
running sums of v_j and of b_j v_j up to there are all that query i needs:

    sum_j relu(a_i + b_j) v_j = a_i sum_(b_j > -a_i) v_j + sum_(b_j > -a_i) b_j v_j

Wang et al. 2018 (concatenation); M_ij = 1 where query i may attend to key j, C_i = sum_j M_ij.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels import limits
from headwise.operators._kernels.prefix_sums import blocked
from headwise.operators._kernels.row_chunks import AveragedOperator
from headwise.operators.claims import Claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, PAIR_MASK, not_exported, supports
from headwise.operators.masks import Mask
from headwise.operators.similarity import Embedding, embed
from headwise.shapes import all_finite, autocasting, broadcast_batch, no_empty_axis, same_kind, symbolic


@final
@dataclass(frozen=True, eq=False)
class Concatenation(AveragedOperator):
    """P_ij = M_ij relu(w . [q_i; k_j]) / C_i from q (*batch, m, k), k (*batch, n, k') and w (*batch, k + k').

    Causal: the triangle is cut into squares, log2(n / 64) sizes of them, each done as above.
    Entries are >= 0; rows do not sum to one.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    mask: Mask

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2], self.w.shape[:-1])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    @property
    def claims(self) -> frozenset[Claim]:
        return frozenset({Claim.NONNEGATIVE, Claim.CAUSAL} if self.mask.causal else {Claim.NONNEGATIVE})

    def _sides(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a = Q w_q (*batch, m, 1) and b = K w_k (*batch, n, 1)"""
        w_q, w_k = self.w.to(dtype).unsqueeze(-1).split([self.q.shape[-1], self.k.shape[-1]], dim=-2)
        return self.q.to(dtype) @ w_q, self.k.to(dtype) @ w_k

    @staticmethod
    def full(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        """sum_j relu(a_i + b_j) v_j: (*batch, m, 1), (*batch, n, 1), (*batch, n, d) -> (*batch, m, d)"""
        order = b.detach().argsort(dim=-2, descending=True)
        b = b.gather(-2, order)
        positive = _below(-b.detach(), a.detach())
        v = _take(v, order)
        sums = torch.cat([v, b * v], dim=-1).cumsum(-2)
        plain, weighted = _take(F.pad(sums, (0, 0, 1, 0)), positive).chunk(2, dim=-1)
        return a * plain + weighted

    @staticmethod
    def triangle(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        """sum over j <= i of relu(a_i + b_j) v_j.

        Small triangles on the diagonal entry by entry; then, for each size s = 64, 128, ..., every second run of s
        queries against the run of s keys just before it.
        """
        n = a.shape[-2]
        x, y, z = (blocked(t, limits.DIAGONAL_BLOCK) for t in (a, b, v))
        out = ((x + y.mT).relu().tril() @ z).flatten(-3, -2)[..., :n, :]
        size = limits.DIAGONAL_BLOCK
        while size < n:
            x, y, z = (blocked(t, 2 * size) for t in (a, b, v))
            part = Concatenation.full(x[..., size:, :], y[..., :size, :], z[..., :size, :])
            out = out + F.pad(part, (0, 0, size, 0)).flatten(-3, -2)[..., :n, :]
            size *= 2
        return out

    @staticmethod
    def entries(a: Tensor, b: Tensor) -> Tensor:
        return (a + b.mT).relu()

    def cost(self, d: int) -> Cost:
        m, n = self.shape[-2:]
        return self._cost(_cost(m, n - m if self.mask.causal else n, d), d)

    def adjoint_cost(self, d: int) -> Cost:
        m, n = self.shape[-2:]
        return self._cost(_cost(n - m if self.mask.causal else n, m, d), d)

    def _cost(self, rectangle: Cost, d: int) -> Cost:
        *batch, m, n = self.shape
        heights = sum(
            torch.broadcast_shapes(x.shape[:-2], self.w.shape[:-1]).numel() * math.prod(x.shape[-2:])
            for x in (self.q, self.k)
        )
        if self.mask.pair_mask is not None:
            work = Cost(m * n * d, m * n)
        elif self.mask.causal:
            work = _triangle_cost(min(m, n), d)
            work = work + rectangle if n > m else work
        else:
            work = rectangle
        return Cost(heights, m + n) + work.times(math.prod(batch))


def _below(ascending: Tensor, x: Tensor) -> Tensor:
    """How many of the sorted numbers are less than each x: (*batch, n, 1), (*batch, m, 1) -> (*batch, m, 1)"""
    # zeros of the other's batch are added because searchsorted needs whole, contiguous batches
    ascending, x = ascending.squeeze(-1), x.squeeze(-1)
    zero_a, zero_x = torch.zeros_like(ascending[..., :1]), torch.zeros_like(x[..., :1])
    return torch.searchsorted(ascending + zero_x, x + zero_a).unsqueeze(-1)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x (*batch, n, d) in the order of `rows` (*batch, m, 1), batch axes broadcast."""
    batch = torch.broadcast_shapes(x.shape[:-2], rows.shape[:-2])
    d = x.shape[-1]
    return x.expand(*batch, -1, d).gather(-2, rows.expand(*batch, -1, d))


def _cost(m: int, n: int, d: int) -> Cost:
    """b v, two running sums, a times one of them; sorting multiplies nothing."""
    return Cost((3 * n + m) * d, (2 * n + 2 * m) * d, depth=n)


def _triangle_cost(n: int, d: int) -> Cost:
    leaves = -(-n // limits.DIAGONAL_BLOCK)
    total, size = Cost(leaves * limits.DIAGONAL_BLOCK**2 * d, leaves * limits.DIAGONAL_BLOCK**2), limits.DIAGONAL_BLOCK
    while size < n:
        total = total + _cost(size, size, d).times(-(-n // (2 * size)))
        size *= 2
    return total


@supports(CAUSAL, KEY_MASK, PAIR_MASK)
def concatenation(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    theta: Embedding = None,
    phi: Embedding = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
) -> Concatenation:
    """P_ij = relu(w . [θ(q_i); φ(k_j)]) / C_i; w is (k + k') or, one for each head, (*batch, k + k').

    >>> concatenation(torch.tensor([[1.0], [-2.0]]), torch.tensor([[0.0], [3.0]]), torch.ones(2)).dense()
    tensor([[0.5000, 2.0000],
            [0.0000, 0.5000]])
    """
    q, k = embed("Concatenation", "q", q, theta), embed("Concatenation", "k", k, phi)
    no_empty_axis("Concatenation", q=q, k=k)
    if autocasting(q.device) and isinstance(w, Tensor):
        w = w.to(q.dtype)
    same_kind("Concatenation", q=q, k=k, w=w)
    widths = q.shape[-1], k.shape[-1]
    if w.dim() < 1 or w.shape[-1] != sum(widths):
        raise ShapeError(
            f"Concatenation: w has shape {tuple(w.shape)}, but its last axis must be {sum(widths)}: "
            f"q has width {widths[0]}, k has width {widths[1]}"
        )
    batch = broadcast_batch("Concatenation", q=q.shape[:-2], k=k.shape[:-2], w=w.shape[:-1])
    masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask}
    mask = Mask.checked("Concatenation", q.shape[-2], k.shape[-2], **masks, batch=batch, device=q.device)
    mask = mask.settled("Concatenation")
    k = mask.hide(k)
    all_finite("Concatenation", q=q, k=k, w=w)
    if causal and symbolic(mask.n):
        raise not_exported("concatenation, causal", "its blocks are cut for one length")
    return Concatenation(q, k, w, mask)
