"""The slow float64 twins of the exact operators: P written out entry by entry, from the definitions.

Every function returns the matrix P of shape (*batch, m, n) itself, so that the twin of `apply(v)` is `P @ v`, of
`adjoint(u)` is `P.mT @ u`, and gradients flow through plain torch.  Nothing here imports from headwise: a twin that
shares a helper with what it judges repeats its mistakes.  Loops run over queries and keys; keep the sizes small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BORDERS = ("zeros", "replicate", "reflect", "circular")


def matrix(m: int, n: int, entry: Callable[[int, int], Tensor]) -> Tensor:
    """P from its entries: `entry(i, j)` has the batch shape (entries broadcast against one another)."""
    entries = torch.broadcast_tensors(*(entry(i, j) for i in range(m) for j in range(n)))
    return torch.stack(entries, dim=-1).unflatten(-1, (m, n)).double()


def visible(
    m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None, pair_mask: Tensor | None = None
) -> Tensor:
    """True where query i may look at key j: (*batch, m, n).

    Causal is aligned to the bottom right, as decoding wants it: the last query sees the last key, j <= i + n - m.
    `key_mask` (*batch, n) is True at real keys, `pair_mask` (*batch, m, n) is True where looking is allowed.
    """

    def entry(i: int, j: int) -> Tensor:
        seen = torch.tensor(not causal or j <= i + n - m)
        if key_mask is not None:
            seen = seen & key_mask[..., j]
        if pair_mask is not None:
            seen = seen & pair_mask[..., min(i, pair_mask.shape[-2] - 1), min(j, pair_mask.shape[-1] - 1)]
        return seen

    return matrix(m, n, entry).bool()


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """S_ij = scale q_i . k_j"""
    q, k = q.double(), k.double()
    return matrix(q.shape[-2], k.shape[-2], lambda i, j: scale * (q[..., i, :] * k[..., j, :]).sum(-1))


def normalised(logits: Tensor, seen: Tensor) -> Tensor:
    """P_ij = exp(S_ij) / sum of exp(S_ij') over the visible j', zero where invisible; a row that sees nothing is zero.

    Each row is shifted by its largest visible score, which leaves P as it is and keeps exp from overflowing.
    """
    logits, seen = torch.broadcast_tensors(logits, seen)
    top = logits.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    # invisible scores are replaced before exp: 0 * inf would poison the gradient
    weights = torch.where(seen, (logits - top).masked_fill(~seen, 0.0).exp(), torch.zeros_like(logits))
    return weights / weights.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1.0)


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
    bias: Tensor | None = None,
) -> Tensor:
    """P = softmax over visible keys of scale q_i . k_j + bias_ij, scale 1/sqrt(k) unless given."""
    logits = scores(q, k, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    m, n = logits.shape[-2:]
    if bias is not None:
        logits = logits + bias.double()
        minus_infinity = logits == -math.inf  # a bias of -inf is a mask by another name
        logits = logits.masked_fill(minus_infinity, 0.0)
        pair_mask = ~minus_infinity if pair_mask is None else pair_mask & ~minus_infinity
    return normalised(logits, visible(m, n, causal=causal, key_mask=key_mask, pair_mask=pair_mask))


def log_sum_exp(logits: Tensor, seen: Tensor | None = None) -> Tensor:
    """log sum_j exp(S_ij) over visible keys, row by row: (*batch, m, n) -> (*batch, m); -inf where nothing is seen."""
    if seen is not None:
        logits = logits.masked_fill(~seen, -math.inf)
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
    """P_ij = θ(q_i) . φ(k_j) / C_i with C_i the number of keys that query i may see; zero where it may not."""
    return _averaged(scores(_mapped(q, theta), _mapped(k, phi), 1.0), **masks)


def scaled(q: Tensor, k: Tensor) -> Tensor:
    """P_ij = f(q_i . k_j) with f(x) = x / n"""
    return scores(q, k, 1 / k.shape[-2])


def concatenation(
    q: Tensor, k: Tensor, w: Tensor, *, theta: Tensor | None = None, phi: Tensor | None = None, **masks: object
) -> Tensor:
    """P_ij = relu(w . [θ(q_i); φ(k_j)]) / C_i, C_i the number of keys that query i may see; zero where it may not."""
    q, k, w = _mapped(q, theta), _mapped(k, phi), w.double()
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])

    def entry(i: int, j: int) -> Tensor:
        pair = [x.expand(*batch, x.shape[-1]) for x in (q[..., i, :], k[..., j, :])]
        return (torch.cat(pair, dim=-1) * w).sum(-1).relu()

    return _averaged(matrix(q.shape[-2], k.shape[-2], entry), **masks)


def uniform(m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """P_ij = 1 / number of keys that query i may see; a row that sees nothing is zero."""
    seen = visible(m, n, causal=causal, key_mask=key_mask)
    return normalised(torch.zeros(seen.shape, dtype=torch.float64), seen)


def shift(
    grid: Sequence[int],
    offset: Sequence[int],
    *,
    border: str = "circular",
    stride: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Tensor:
    """P_ij = 1 if query i looks at key j: (P v)_p = v_(stride p + offset) for the cells p of a grid.

    Where that leaves the grid: "zeros" reads nothing, "replicate" the nearest cell, "reflect" the mirror image about
    the outermost cell, "circular" the cell on the other side.  Cells are numbered in row-major order.
    """
    keys = list(itertools.product(*(range(g) for g in grid)))
    cells = list(itertools.product(*(range(g) for g in queries or grid)))
    p = torch.zeros(len(cells), len(keys), dtype=torch.float64)
    for i, cell in enumerate(cells):
        steps = stride or (1,) * len(cell)
        places = zip(cell, steps, offset, grid, strict=True)
        target = tuple(_inside(x * step + dx, g, border) for x, step, dx, g in places)
        if target in keys:
            p[i, keys.index(target)] = 1.0  # type: ignore[arg-type]
    return p


def toeplitz(weights: Tensor, m: int, n: int) -> Tensor:
    """P_ij = w_(j - i + m - 1): weights (*batch, m + n - 1), from the bottom left corner to the top right."""
    weights = weights.double()
    return matrix(m, n, lambda i, j: weights[..., j - i + m - 1])


def toeplitz_softmax(logits: Tensor, m: int, n: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """P_ij = softmax over the visible j of l_(j - i + m - 1); a logit of -inf is a mask."""
    table = toeplitz(logits, m, n)
    seen = visible(m, n, causal=causal, key_mask=key_mask) & (table > -math.inf)
    return normalised(table.masked_fill(table == -math.inf, 0.0), seen)


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
    seen = visible(*values.shape[-2:], **masks)  # type: ignore[arg-type]
    return torch.where(seen, values, torch.zeros_like(values)) / seen.sum(-1, keepdim=True).clamp(min=1)


def _inside(x: int, g: int, border: str) -> int | None:
    """Where coordinate x is read from on an axis of g cells."""
    if 0 <= x < g:
        return x
    if border == "zeros":
        return None
    if border == "replicate":
        return min(max(x, 0), g - 1)
    if border == "circular":
        return x % g
    if border == "reflect":
        while not 0 <= x < g:  # each bounce mirrors about an outermost cell, which is not repeated
            x = -x if x < 0 else 2 * (g - 1) - x
        return x
    raise ValueError(f"border must be one of {BORDERS}, but is {border!r}")
