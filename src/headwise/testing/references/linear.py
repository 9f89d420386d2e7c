"""Twins of the linear-cost operators and their projections: P (*batch, m, n) written out, from the definitions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.testing.references.sparse import softmax_over


def efficient(
    q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """P_ij = sum_c softmax_c(scale q_i) exp(scale k_jc) / sum of exp(scale k_j'c) over visible keys j'."""
    q, k = q.double(), k.double()
    m, n = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    features = (scale * q).exp() / (scale * q).exp().sum(-1, keepdim=True)
    rows = []
    for i in range(m):
        visible = torch.arange(n) <= i + n - m if causal else torch.ones(n, dtype=torch.bool)
        visible = (visible if key_mask is None else visible & key_mask).unsqueeze(-1)
        weights = (scale * k).exp() * visible
        weights = weights / weights.sum(-2, keepdim=True).masked_fill(~visible.any(-2, keepdim=True), 1.0)
        rows.append((features[..., i, None, :] * weights).sum(-1))
    return torch.stack(rows, dim=-2)


def projection(kind: str, n: int, **parts: object) -> Tensor:
    """E (r, n) entry by entry, for every kind of projection.

    pooling: size.  count_sketch: slot, sign, r.  convolution: stride, weight.  hadamard: sign, rows.
    """
    if kind == "identity":
        return torch.eye(n, dtype=torch.float64)
    if kind == "pooling":
        size = int(parts["size"])  # type: ignore[call-overload]
        e = torch.zeros(math.ceil(n / size), n, dtype=torch.float64)
        for j in range(n):
            e[j // size, j] = 1 / min(size, n - (j // size) * size)
        return e
    if kind == "count_sketch":
        slot, sign = parts["slot"], parts["sign"]
        e = torch.zeros(int(parts["r"]), n, dtype=torch.float64)  # type: ignore[call-overload]
        for j in range(n):
            e[int(slot[j]), j] = float(sign[j])  # type: ignore[index]
        return e
    if kind == "convolution":
        stride, weight = int(parts["stride"]), parts["weight"]  # type: ignore[call-overload]
        rows = []
        for t in range(math.ceil(n / stride)):
            inside = [0 <= j - t * stride < weight.shape[0] for j in range(n)]  # type: ignore[attr-defined]
            row = [weight[j - t * stride] if inside[j] else weight[0] * 0 for j in range(n)]  # type: ignore[index]
            rows.append(torch.stack(row))
        return torch.stack(rows).double()
    if kind == "hadamard":
        sign, rows = parts["sign"], parts["rows"]
        e = torch.zeros(len(rows), n, dtype=torch.float64)  # type: ignore[arg-type]
        for t, row in enumerate(rows):  # type: ignore[arg-type]
            for j in range(n):
                e[t, j] = float(sign[j]) * (-1) ** bin(int(row) & j).count("1") / math.sqrt(len(rows))  # type: ignore
        return e
    raise ValueError(kind)


def masked_projection(e: Tensor, key_mask: Tensor | None, *, mean: bool = False) -> tuple[Tensor, Tensor | None]:
    """E with the columns of masked keys zero (means renormalised), and which slots are not empty."""
    if key_mask is None:
        return e, None
    masked = e * key_mask.unsqueeze(-2)
    if mean:
        masked = masked / masked.sum(-1, keepdim=True).masked_fill(masked.sum(-1, keepdim=True) == 0, 1.0)
    return masked, ((e != 0) & key_mask.unsqueeze(-2)).any(-1)


def _masked_pair(e: Tensor, f: Tensor, key_mask: Tensor | None, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """E and F without masked keys, and which slots are empty in neither."""
    e, filled = masked_projection(e.double(), key_mask, mean=mean)
    f, also = masked_projection(f.double(), key_mask, mean=mean)
    everywhere = torch.ones(e.shape[-2], dtype=torch.bool)
    return e, f, everywhere if filled is None or also is None else filled & also


def factored(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """P = softmax_features(s q) softmax_slots(s E k)^T F"""
    e, f, filled = _masked_pair(e, f, key_mask, mean)
    return efficient(q, e @ k.double(), key_mask=filled) @ f


def projected(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """P = softmax_slots(s q (E k)^T) F"""
    e, f, filled = _masked_pair(e, f, key_mask, mean)
    return softmax_over(q, e @ k.double(), lambda i, j: True, key_mask=filled) @ f


def nystrom(q: Tensor, k: Tensor, landmarks: int, *, iterations: int = 6, key_mask: Tensor | None = None) -> Tensor:
    """softmax(q K~^T) Z softmax(Q~ k^T), segment by segment; with padding, as many queries as keys."""

    def means(x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        size = math.ceil(x.shape[-2] / landmarks)
        e, filled = masked_projection(projection("pooling", x.shape[-2], size=size), key_mask, mean=True)
        return e @ x.double(), filled

    near_q, filled_q = means(q, key_mask if q.shape[-2] == k.shape[-2] else None)
    near_k, filled_k = means(k, key_mask)
    everything = lambda i, j: True  # noqa: E731
    left = softmax_over(q, near_k, everything, key_mask=filled_k)
    right = softmax_over(near_q, k, everything, key_mask=key_mask)
    a = softmax_over(near_q, near_k, everything, key_mask=filled_k)
    if filled_q is not None:
        a, right = a * filled_q.unsqueeze(-1), right * filled_q.unsqueeze(-1)
    one = torch.eye(a.shape[-2], dtype=torch.float64)
    z = a.mT / a.sum(-2).amax(-1)[..., None, None]
    for _ in range(iterations):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    return left @ z @ right


def block_matrix(e: Tensor, n: int) -> Tensor:
    """E (*batch, r, b) on every block of b of n positions, (*batch, t r, n): block-diagonal, cut off at the end."""
    r, b = e.shape[-2:]
    count = math.ceil(n / b)
    whole = torch.zeros(*e.shape[:-2], count * r, count * b, dtype=torch.float64)
    for t in range(count):
        whole[..., t * r : (t + 1) * r, t * b : (t + 1) * b] = e
    return whole[..., :n]


def projected_blocks(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """Softmax over the own block's keys j <= i beside the slots of earlier blocks; slots become values by F."""
    (r, b), n = e.shape[-2:], k.shape[-2]
    visible = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    big_e, big_f, filled = _masked_pair(block_matrix(e, n), block_matrix(f, n), visible, mean)
    slots = big_e @ k.double()
    batch = torch.broadcast_shapes(k.shape[:-2], slots.shape[:-2])
    keys = torch.cat([k.double().expand(*batch, n, -1), slots.expand(*batch, -1, -1)], dim=-2)
    batch = torch.broadcast_shapes(visible.shape[:-1], filled.shape[:-1])
    real = [x.expand(*batch, -1) for x in (visible, filled)]

    def allowed(i: int, j: int) -> bool:
        return j <= i and j // b == i // b if j < n else (j - n) // r < i // b

    p = softmax_over(q, keys, allowed, key_mask=torch.cat(real, dim=-1))
    return p[..., :n] + p[..., n:] @ big_f


def factored_blocks(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """The double softmax over the own block's keys j <= i beside the slots of earlier blocks, row by row."""
    (r, b), n = e.shape[-2:], k.shape[-2]
    visible = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    big_e, big_f, filled = _masked_pair(block_matrix(e, n), block_matrix(f, n), visible, mean)
    slots = big_e @ k.double()
    rows = []
    for i in range(n):
        first, past = i // b * b, i // b * r
        near = efficient_weights(k[..., first : i + 1, :], visible[..., first : i + 1])
        far = efficient_weights(slots[..., :past, :], filled[..., :past])
        total = near.sum(-2, keepdim=True) + far.sum(-2, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        s = 1 / math.sqrt(q.shape[-1])
        features = torch.softmax(s * q[..., i, :].double(), dim=-1).unsqueeze(-2) / total
        here, before = (features * near).sum(-1), (features * far).sum(-1)
        spread = (before.unsqueeze(-2) @ big_f[..., :past, :]).squeeze(-2)
        rows.append(spread + torch.nn.functional.pad(here, (first, n - i - 1)))
    return torch.stack(rows, dim=-2)


def efficient_weights(k: Tensor, visible: Tensor) -> Tensor:
    """exp(k / sqrt(width)) where a key is visible, zero elsewhere."""
    return (k.double() / math.sqrt(k.shape[-1])).exp() * visible.unsqueeze(-1)


def window_low_rank(
    q: Tensor,
    k: Tensor,
    width: int,
    e: Tensor,
    f: Tensor | None = None,
    slot_bias: Tensor | None = None,
    *,
    leading: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """P_ij = [exp(s q_i . k_j) M_ij + sum_t exp(s q_i . (e k)_t + slot_bias_t) f_tj] / Z_i, one row at a time.

    e and f are (*batch, r, n).  Masked keys are zero in every sum; a slot whose e or f has none but masked keys is
    left out.
    """
    q, k, e = q.double(), k.double(), e.double()
    f = e if f is None else f.double()
    m, n, r = q.shape[-2], k.shape[-2], e.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    slots = (e.unsqueeze(-1) * (k * there.unsqueeze(-1)).unsqueeze(-3)).sum(-2)  # (*batch, r, k)
    open_ = ((e != 0) & there.unsqueeze(-2)).any(-1) & ((f != 0) & there.unsqueeze(-2)).any(-1)
    offset = torch.zeros(r, dtype=torch.float64) if slot_bias is None else slot_bias.double()
    rows = []
    for i in range(m):
        at = i + n - m
        near = range(at - width // 2, at - width // 2 + width)
        allowed = torch.tensor([j in near or j < leading or at < leading for j in range(n)]) & there
        keys = (scale * (q[..., i, None, :] * k).sum(-1)).exp() * allowed
        far = (scale * (q[..., i, None, :] * slots).sum(-1) + offset).exp() * open_
        row = keys + (far.unsqueeze(-1) * f * there.unsqueeze(-2)).sum(-2)
        total = keys.sum(-1, keepdim=True) + far.sum(-1, keepdim=True)
        rows.append(row / total.masked_fill(total == 0, 1))
    return torch.stack(rows, dim=-2)


def window_low_rank_blocks(
    q: Tensor,
    k: Tensor,
    width: int,
    e: Tensor,
    f: Tensor | None = None,
    slot_bias: Tensor | None = None,
    *,
    leading: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Row i: keys i - width < j <= i and j < leading, beside the slots of blocks before its own, one normaliser."""
    q, k = q.double(), k.double()
    n, (r, b) = k.shape[-2], e.shape[-2:]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    f = e if f is None else f
    big_e, big_f, filled = _masked_pair(block_matrix(e, n), block_matrix(f, n), there, mean)
    slots = big_e @ (k * there.unsqueeze(-1))
    offset = torch.zeros(r, dtype=torch.float64) if slot_bias is None else slot_bias.double()
    rows = []
    for i in range(n):
        allowed = torch.tensor([i - width < j <= i or (j < leading and j <= i) for j in range(n)]) & there
        keys = (scale * (q[..., i, None, :] * k).sum(-1)).exp() * allowed
        past = i // b
        far = (
            scale * (q[..., i, None, :] * slots[..., : past * r, :]).sum(-1)
            + offset.repeat(*[1] * (offset.dim() - 1), past)
        ).exp()
        far = far * filled[..., : past * r]
        row = keys + (far.unsqueeze(-1) * big_f[..., : past * r, :]).sum(-2)
        total = keys.sum(-1, keepdim=True) + far.sum(-1, keepdim=True)
        rows.append(row / total.masked_fill(total == 0, 1))
    return torch.stack(torch.broadcast_tensors(*rows), dim=-2)


def near_far(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    block: int,
    leading: int = 0,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """P_ij = exp(s q_i . k_j) / Z_i near, sum_t exp(s q_i . a_t + c_t + s b_t . k_j) / Z_i far, one row at a time."""
    q, k, a, b, c = (x.double() for x in (q, k, a, b, c))
    n = q.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    key_features = (scale * (b.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)).exp()  # (*batch, r, n)
    rows = []
    for i in range(n):
        visible = torch.tensor([j <= i or not causal for j in range(n)]) & there
        own = (i - leading) // block
        near = [i < leading or j < leading or abs(own - (j - leading) // block) <= 1 for j in range(n)]
        exact = (scale * (q[..., i, None, :] * k).sum(-1)).exp()
        query_features = (scale * (q[..., i, None, :] * a).sum(-1) + c).exp()  # (*batch, r)
        through = (query_features.unsqueeze(-1) * key_features).sum(-2)
        row = torch.where(torch.tensor(near), exact, through) * visible
        total = row.sum(-1, keepdim=True)
        rows.append(row / total.masked_fill(total == 0, 1))
    return torch.stack(rows, dim=-2)
