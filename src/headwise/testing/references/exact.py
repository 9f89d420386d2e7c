"""Twins of the operators that attend to every key, of compositions, and of the numbers of a matrix.

Every function returns P (*batch, m, n), so the twin of `apply(v)` is `P @ v`, of `adjoint(u)` is `P.mT @ u`, and
gradients flow through plain torch.  Loops run over queries and keys; keep the sizes small.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def matrix(m: int, n: int, entry: Callable[[int, int], Tensor]) -> Tensor:
    """P from its entries: `entry(i, j)` has the batch shape (entries broadcast against one another)."""
    entries = torch.broadcast_tensors(*(entry(i, j) for i in range(m) for j in range(n)))
    return torch.stack(entries, dim=-1).unflatten(-1, (m, n)).double()


def visible(
    m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None, pair_mask: Tensor | None = None
) -> Tensor:
    """True where query i may attend to key j: (*batch, m, n).

    Causal is aligned to the bottom right: the last query attends to the last key, j <= i + n - m.
    `key_mask` (*batch, n) and `pair_mask` (*batch, m, n) are True = attend.
    """

    def entry(i: int, j: int) -> Tensor:
        allowed = torch.tensor(not causal or j <= i + n - m)
        if key_mask is not None:
            allowed = allowed & key_mask[..., j]
        if pair_mask is not None:
            allowed = allowed & pair_mask[..., min(i, pair_mask.shape[-2] - 1), min(j, pair_mask.shape[-1] - 1)]
        return allowed

    return matrix(m, n, entry).bool()


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """S_ij = scale q_i . k_j"""
    q, k = q.double(), k.double()
    return matrix(q.shape[-2], k.shape[-2], lambda i, j: scale * (q[..., i, :] * k[..., j, :]).sum(-1))


def normalised(logits: Tensor, allowed: Tensor) -> Tensor:
    """P_ij = exp(S_ij) / sum of exp(S_ij') over the visible j', zero where invisible; a row without keys is zero.

    Each row is shifted by its largest visible score, which leaves P as it is and keeps exp from overflowing.
    """
    logits, allowed = torch.broadcast_tensors(logits, allowed)
    top = logits.detach().masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    # invisible scores are replaced before exp: 0 * inf would make the gradient NaN
    weights = torch.where(allowed, (logits - top).masked_fill(~allowed, 0.0).exp(), torch.zeros_like(logits))
    return weights / weights.sum(-1, keepdim=True).masked_fill(~allowed.any(-1, keepdim=True), 1.0)


def grouped(k: Tensor, heads: int) -> Tensor:
    """Keys (*batch, h', n, k) repeated to `heads` query heads: query head i reads key head i // (heads / h')."""
    size = heads // k.shape[-3]
    return torch.stack([k[..., i // size, :, :] for i in range(heads)], dim=-3)


def softmax(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
) -> Tensor:
    """P = softmax over visible keys of scale q_i . k_j + attn_bias_ij, scale 1/sqrt(k) unless given."""
    logits = scores(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    m, n = logits.shape[-2:]
    if attn_bias is not None:
        logits = logits + attn_bias.double()
        minus_infinity = logits == -math.inf  # attn_bias = -inf is a mask
        logits = logits.masked_fill(minus_infinity, 0.0)
        pair_mask = ~minus_infinity if pair_mask is None else pair_mask & ~minus_infinity
    return normalised(logits, visible(m, n, causal=causal, key_mask=key_mask, pair_mask=pair_mask))


def log_sum_exp(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """log sum_j exp(S_ij) over visible keys, row by row: (*batch, m, n) -> (*batch, m); -inf for a row without keys."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    top = logits.amax(-1).clamp(min=-1e300)
    return top + sum((logits[..., j] - top).exp() for j in range(logits.shape[-1])).log()  # type: ignore[union-attr]


def gaussian(q: Tensor, k: Tensor, **masks: object) -> Tensor:
    """P_ij = exp(q_i . k_j) / sum_j' exp(q_i . k_j')"""
    return softmax(q, k, scale=1.0, **masks)  # type: ignore[arg-type]


def embedded_gaussian(
    q: Tensor, k: Tensor, theta: Tensor | None = None, phi: Tensor | None = None, **masks: object
) -> Tensor:
    """P_ij = exp(θ(q_i) . φ(k_j)) / sum_j' exp(θ(q_i) . φ(k_j')), θ(q) = θ q and φ(k) = φ k as matrices (out, in)."""
    return gaussian(_mapped(q, theta), _mapped(k, phi), **masks)


def dot_product(
    q: Tensor, k: Tensor, *, theta: Tensor | None = None, phi: Tensor | None = None, **masks: object
) -> Tensor:
    """P_ij = θ(q_i) . φ(k_j) / C_i with C_i the number of keys that query i attends to; zero elsewhere."""
    return _averaged(scores(_mapped(q, theta), _mapped(k, phi), 1.0), **masks)


def concatenation(
    q: Tensor, k: Tensor, w: Tensor, *, theta: Tensor | None = None, phi: Tensor | None = None, **masks: object
) -> Tensor:
    """P_ij = relu(w . [θ(q_i); φ(k_j)]) / C_i, C_i the number of keys that query i attends to; zero elsewhere."""
    q, k, w = _mapped(q, theta), _mapped(k, phi), w.double()
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])

    def entry(i: int, j: int) -> Tensor:
        pair = [x.expand(*batch, x.shape[-1]) for x in (q[..., i, :], k[..., j, :])]
        return (torch.cat(pair, dim=-1) * w).sum(-1).relu()

    return _averaged(matrix(q.shape[-2], k.shape[-2], entry), **masks)


def similarity(
    q: Tensor,
    k: Tensor,
    f: Callable[[Tensor, Tensor], Tensor],
    normalise: str = "sum",
    theta: Tensor | None = None,
    phi: Tensor | None = None,
    **masks: object,
) -> Tensor:
    """P_ij = f(q_i, k_j) / C_i pair by pair; here f takes two vectors (*batch, k) and returns (*batch,)."""
    q, k = _mapped(q, theta), _mapped(k, phi)
    values = matrix(q.shape[-2], k.shape[-2], lambda i, j: f(q[..., i, :], k[..., j, :]))
    if normalise == "n":
        return _averaged(values, **masks)
    values = torch.where(visible(*values.shape[-2:], **masks), values, torch.zeros_like(values))  # type: ignore[arg-type]
    total = values.sum(-1, keepdim=True)
    return values / total.masked_fill(total == 0, 1.0)


def uniform(m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """P_ij = 1 / number of keys that query i attends to; a row without keys is zero."""
    allowed = visible(m, n, causal=causal, key_mask=key_mask)
    return normalised(torch.zeros(allowed.shape, dtype=torch.float64), allowed)


def kronecker(a: Tensor, b: Tensor) -> Tensor:
    """(A ⊗ B)_(i i', j j') = A_ij B_i'j'"""
    a, b = a.double(), b.double()
    (m, n), (p, r) = a.shape[-2:], b.shape[-2:]
    return matrix(m * p, n * r, lambda i, j: a[..., i // p, j // r] * b[..., i % p, j % r])


def product(a: Tensor, b: Tensor) -> Tensor:
    """(AB)_ij = sum_l A_il B_lj"""
    a, b = a.double(), b.double()
    return matrix(a.shape[-2], b.shape[-1], lambda i, j: (a[..., i, :] * b[..., :, j]).sum(-1))


def total(*parts: Tensor) -> Tensor:
    """(A + B + ...)_ij = A_ij + B_ij + ..."""
    m, n = parts[0].shape[-2:]
    return matrix(m, n, lambda i, j: torch.stack(torch.broadcast_tensors(*(p[..., i, j] for p in parts))).sum(0))


def transposed(a: Tensor) -> Tensor:
    """(A^T)_ij = A_ji"""
    return matrix(a.shape[-1], a.shape[-2], lambda i, j: a[..., j, i])


def low_rank(p: Tensor, r: int) -> Tensor:
    """sum over the r leading i of sigma_i u_i v_i^T, from a full decomposition; a constant."""
    u, values, vt = torch.linalg.svd(p.detach().double())
    return sum(values[..., i, None, None] * u[..., :, i, None] * vt[..., i, None, :] for i in range(r))  # type: ignore


def entropy(p: Tensor) -> Tensor:
    """H_i = -sum_j P_ij log P_ij with 0 log 0 = 0: (*batch, m, n) -> (*batch, m), in nats."""
    return -(p * torch.where(p > 0, p, torch.ones_like(p)).log()).sum(-1)


def row_maxima(p: Tensor) -> Tensor:
    """max_j P_ij: (*batch, m, n) -> (*batch, m)"""
    return torch.stack([p[..., j] for j in range(p.shape[-1])]).amax(0)


def frobenius_norm(p: Tensor) -> Tensor:
    """sqrt(sum_ij P_ij^2): (*batch, m, n) -> (*batch,)"""
    return (p * p).sum(dim=(-2, -1)).sqrt()


def _mapped(x: Tensor, weight: Tensor | None) -> Tensor:
    """W x_i for every row, with W as `nn.Linear` stores it: (out, in)."""
    if weight is None:
        return x.double()
    return torch.stack([(row * x.double()).sum(-1) for row in weight.double().unbind(-2)], dim=-1)


def _averaged(values: Tensor, **masks: object) -> Tensor:
    """values_ij / C_i where visible, zero elsewhere."""
    allowed = visible(*values.shape[-2:], **masks)  # type: ignore[arg-type]
    return torch.where(allowed, values, torch.zeros_like(values)) / allowed.sum(-1, keepdim=True).clamp(min=1)
