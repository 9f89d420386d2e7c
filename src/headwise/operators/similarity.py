"""o_i = (1/C_i) sum_j f(q_i, k_j) g(v_j): the general form of attention, by the similarity f.

    similarity          any f                        C_i = sum_j f, or n
    gaussian            f = exp(q . k)               C_i = sum_j f    softmax with scale 1
    embedded_gaussian   f = exp(θ(q) . φ(k))         C_i = sum_j f    softmax with scale 1
    dot_product         f = θ(q) . φ(k)              C = n            in dot_product.py; f may be negative
    concatenation       f = relu(w . [θ(q); φ(k)])   C = n            in concatenation.py

Wang, Girshick, Gupta & He 2018 ("Non-local neural networks").  θ, φ and g are callables, or matrices W (out, in) as
`nn.Linear` keeps them, applied to every row: x_i -> W x_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import DtypeError, InputError, ShapeError
from headwise.operators._kernels.row_chunks import Rows, adjoint_rows, apply_rows, row_ranges
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import ATTN_BIAS, CAUSAL, KEY_MASK, PAIR_MASK, supports
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax, softmax
from headwise.shapes import (
    all_finite,
    are_tensors,
    autocasting,
    broadcast_batch,
    broadcasts_to,
    no_empty_axis,
    same_axis,
    same_kind,
    shown,
    whole_numbers,
)

Embedding = Callable[[Tensor], Tensor] | Tensor | None
PairFunction = Callable[[Tensor, Tensor], Tensor]
"""f(q, k) of all pairs: q (*batch, rows, k), k (*batch, n, k') -> (*batch, rows, n); entry (i, j) from q_i and k_j."""
Normalisation = Literal["sum", "n"]


@final
@dataclass(frozen=True, eq=False)
class Similarity(AttentionOperator):
    """P_ij = M_ij f(q_i, k_j) / C_i, M_ij = 1 where query i may attend to key j.  A few rows of P exist at a time.

    normalise "sum": C_i = sum_j M_ij f(q_i, k_j); a row whose f are all zero is zero.  "n": C_i = sum_j M_ij.
    Claims are measured, from all values of f: with "sum" and f >= 0, not all zero in any row, P is stochastic.
    """

    q: Tensor
    k: Tensor
    f: PairFunction
    normalise: Normalisation
    pair_cost: int
    mask: Mask

    @property
    def shape(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    @property
    def claims(self) -> frozenset[Claim]:
        least, smallest_sum = math.inf, math.inf
        with torch.no_grad():
            for start, stop in row_ranges(self._work):
                f = self._similarities(start, stop, torch.float32)
                least, smallest_sum = min(least, f.min().item()), min(smallest_sum, f.sum(-1).min().item())
        causal = self.mask.causal
        if least < 0:
            return frozenset({Claim.CAUSAL}) if causal else frozenset()
        return weights_claim(stochastic=self.normalise == "sum" and smallest_sum > 0, causal=causal)

    def apply(self, v: Tensor) -> Tensor:
        compute = torch.promote_types(v.dtype, torch.float32)  # sums over n keys are not half-precision numbers
        return apply_rows(self._rows(compute), self._work, self.mask.hide(v).to(compute)).to(v.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        compute = torch.promote_types(u.dtype, torch.float32)
        return adjoint_rows(self._rows(compute), self._work, u.to(compute)).to(u.dtype)

    def cost(self, d: int) -> Cost:
        """`pair_cost` multiply-adds for each f, and the weighted sums; causal ones counted in full."""
        *batch, m, n = self.shape
        return Cost(m * n * (self.pair_cost + d), m * n).times(math.prod(batch))

    @property
    def _work(self) -> tuple[int, ...]:
        """The shape by which rows are cut into blocks: inside f, a pair may take as many numbers as keys are wide."""
        *batch, m, n = self.shape
        return (*batch, m, n * self.k.shape[-1])

    def _rows(self, dtype: torch.dtype) -> Rows:
        counts = self.mask.counts(self.q.device).to(dtype).unsqueeze(-1) if self.normalise == "n" else None

        def rows(start: int, stop: int) -> Tensor:
            f = self._similarities(start, stop, dtype)
            total = f.sum(-1, keepdim=True) if counts is None else counts[..., start:stop, :]
            return f / total.masked_fill(total == 0, 1)

        return rows

    def _similarities(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """M_ij f(q_i, k_j) for queries start:stop, (*batch, stop - start, n)"""
        *batch, _, n = self.shape
        f = self.f(self.q[..., start:stop, :], self.k)
        are_tensors("Similarity", **{"f(q, k)": f})
        if f.shape[-2:] != (stop - start, n):
            raise ShapeError(
                f"Similarity: f of {stop - start} queries and {n} keys must be (*batch, {stop - start}, {n}), but has "
                f"shape {tuple(f.shape)}; q.unsqueeze(-2) and k.unsqueeze(-3) broadcast to all pairs"
            )
        if not f.dtype.is_floating_point:
            raise DtypeError(
                f"Similarity: f(q, k) must be floating point, but is {f.dtype}; return it as {self.q.dtype}"
            )
        broadcasts_to("Similarity", "f(q, k)", f, (*batch, stop - start, n))
        f = torch.where(self.mask.rows(start, stop, f.device), f.to(torch.promote_types(f.dtype, dtype)), 0)
        all_finite("Similarity", **{"f(q, k)": f})
        return f.to(dtype)


@supports(
    CAUSAL,
    KEY_MASK,
    PAIR_MASK,
    instead={ATTN_BIAS: "an f that includes it"},
    one_length="its rows are divided for one length",
)
def similarity(
    q: Tensor,
    k: Tensor,
    f: PairFunction,
    normalise: Normalisation = "sum",
    *,
    theta: Embedding = None,
    phi: Embedding = None,
    pair_cost: int | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
) -> Similarity:
    """P_ij = f(θ(q_i), φ(k_j)) / C_i for any f; C_i is the sum of the row, or the number of its keys (normalise="n").

    f          takes (*batch, rows, k) queries and all (*batch, n, k') keys and returns their (*batch, rows, n)
               similarities; a closure or an nn.Module, whose parameters then have gradients.  Entry (i, j) may
               depend on q_i and k_j only.  It is called in the dtype of q and k (single precision under autocast), also
               at masked pairs, where its value is dropped; masked keys are zero.
    pair_cost  multiply-adds of f for one pair, for `cost`; by default the width of the keys

    For f = exp(...) use `gaussian`, `embedded_gaussian` or `softmax`: they do not overflow, and are faster.

    >>> near = lambda q, k: 1 / (1 + torch.cdist(q, k))
    >>> similarity(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [3.0, 4.0]]), near).dense()
    tensor([[0.8571, 0.1429]])
    """
    if not callable(f):
        raise InputError(f"Similarity: f must be a function of queries and keys, but is {shown(f)}")
    if normalise not in ("sum", "n"):
        raise InputError(f"Similarity: normalise must be 'sum' or 'n', but is {shown(normalise)}")
    q, k = embed("Similarity", "q", q, theta), embed("Similarity", "k", k, phi)
    no_empty_axis("Similarity", q=q, k=k)
    same_kind("Similarity", q=q, k=k)
    if autocasting(q.device):  # parameters of f stay in single precision
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    batch = broadcast_batch("Similarity", q=q.shape[:-2], k=k.shape[:-2])
    pair_cost = k.shape[-1] if pair_cost is None else pair_cost
    whole_numbers("Similarity", least=0, pair_cost=pair_cost)
    masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask}
    mask = Mask.checked("Similarity", q.shape[-2], k.shape[-2], **masks, batch=batch, device=q.device)
    mask = mask.settled("Similarity")
    k = mask.hide(k)
    all_finite("Similarity", q=q, k=k)
    return Similarity(q, k, f, normalise, pair_cost, mask)


@supports(CAUSAL, KEY_MASK, PAIR_MASK, ATTN_BIAS)
def gaussian(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Softmax:
    """P_ij = exp(q_i . k_j) / C_i, C_i the sum of the row: softmax without the 1/sqrt(k)."""
    return softmax(q, k, scale=1.0, causal=causal, key_mask=key_mask, pair_mask=pair_mask, attn_bias=attn_bias)


@supports(CAUSAL, KEY_MASK, PAIR_MASK, ATTN_BIAS)
def embedded_gaussian(
    q: Tensor,
    k: Tensor,
    *,
    theta: Embedding = None,
    phi: Embedding = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Softmax:
    """P_ij = exp(θ(q_i) . φ(k_j)) / C_i, C_i the sum of the row.  With no θ and φ it is `gaussian`."""
    q, k = embed("EmbeddedGaussian", "q", q, theta), embed("EmbeddedGaussian", "k", k, phi)
    return gaussian(q, k, causal=causal, key_mask=key_mask, pair_mask=pair_mask, attn_bias=attn_bias)


def attend(operator: AttentionOperator, v: Tensor, g: Embedding = None) -> Tensor:
    """o = P g(v): (*batch, n, d) -> (*batch, m, d')"""
    return operator(embed("attend", "v", v, g))


def embed(owner: str, name: str, x: Tensor, map: Embedding) -> Tensor:
    """The rows of x through a matrix or a callable; ShapeError if the map changes the number of rows."""
    no_empty_axis(owner, **{name: x})
    if map is None:
        return x
    if isinstance(map, Tensor):
        if map.dim() != 2:
            raise ShapeError(f"{owner}: the matrix applied to {name} must be (out, in), but has {tuple(map.shape)}")
        same_axis(owner, f"width of {name}", **{name: x.shape[-1]}, matrix=map.shape[-1])
        if not autocasting(x.device):
            same_kind(owner, **{name: x}, matrix=map)
        return F.linear(x, map)
    if not callable(map):
        raise InputError(f"{owner}: the map of {name} must be a matrix or callable, but is {shown(map)}")
    y = map(x)
    are_tensors(owner, **{f"the mapped {name}": y})
    same_axis(owner, f"rows of {name}", before=x.shape[-2], after=y.shape[-2] if y.dim() > 1 else 0)
    return y
