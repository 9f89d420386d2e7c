"""The slow float64 twins of the sparse and linear-cost operators: P written out entry by entry, from the definitions.

Like `references`, nothing here imports from headwise.  Every function returns P (*batch, m, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def softmax_over(
    q: Tensor,
    k: Tensor,
    allowed: Callable[[int, int], bool],
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax of scale q_i . k_j over the keys j that `allowed(i, j)` and `key_mask` (*batch, n) leave."""
    q, k = q.double(), k.double()
    m, n = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    seen = torch.tensor([[bool(allowed(i, j)) for j in range(n)] for i in range(m)])
    seen = seen if key_mask is None else seen & key_mask.unsqueeze(-2)
    s = scale * torch.einsum("...ic,...jc->...ij", q, k)
    s, seen = torch.broadcast_tensors(s, seen)
    s = s.masked_fill(~seen, 0.0)  # before exp: 0 * inf would poison the gradient
    top = torch.where(seen, s.detach(), -math.inf).amax(-1, keepdim=True)
    w = torch.where(seen, (s - top.masked_fill(top == -math.inf, 0.0)).exp(), 0.0)
    return w / w.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1.0)


def window(
    q: Tensor, k: Tensor, width: int, *, tokens: int = 0, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Query i, at position i + n - m, sees the `width` keys about it and the first `tokens`, which see every key."""
    m, n = q.shape[-2], k.shape[-2]

    def allowed(i: int, j: int) -> bool:
        i = i + n - m
        if causal:
            return j <= i and (i - j < width or j < tokens)
        return j in range(i - width // 2, i - width // 2 + width) or j < tokens or i < tokens

    return softmax_over(q, k, allowed, key_mask=key_mask)


def efficient(
    q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """P_ij = sum_c softmax_c(scale q_i) exp(scale k_jc) / sum of exp(scale k_j'c) over the keys j' that i may see."""
    q, k = q.double(), k.double()
    m, n = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    features = (scale * q).exp() / (scale * q).exp().sum(-1, keepdim=True)
    rows = []
    for i in range(m):
        seen = torch.arange(n) <= i + n - m if causal else torch.ones(n, dtype=torch.bool)
        seen = (seen if key_mask is None else seen & key_mask).unsqueeze(-1)
        weights = (scale * k).exp() * seen
        weights = weights / weights.sum(-2, keepdim=True).masked_fill(~seen.any(-2, keepdim=True), 1.0)
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
    """E with the columns of missing keys zero (means renewed), and which slots are not empty."""
    if key_mask is None:
        return e, None
    kept = e * key_mask.unsqueeze(-2)
    if mean:
        kept = kept / kept.sum(-1, keepdim=True).masked_fill(kept.sum(-1, keepdim=True) == 0, 1.0)
    return kept, ((e != 0) & key_mask.unsqueeze(-2)).any(-1)


def factored(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """P = softmax_features(s q) softmax_slots(s E k)^T F"""
    e, filled = masked_projection(e.double(), key_mask, mean=mean)
    f, also = masked_projection(f.double(), key_mask, mean=mean)
    filled = None if filled is None or also is None else filled & also
    return efficient(q, e @ k.double(), key_mask=filled) @ f


def projected(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """P = softmax_slots(s q (E k)^T) F"""
    e, filled = masked_projection(e.double(), key_mask, mean=mean)
    f, also = masked_projection(f.double(), key_mask, mean=mean)
    filled = None if filled is None or also is None else filled & also
    return softmax_over(q, e @ k.double(), lambda i, j: True, key_mask=filled) @ f


def strided(q: Tensor, k: Tensor, stride: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """Query i sees j with |i - j| <= stride or (i - j) % stride = 0."""

    def allowed(i: int, j: int) -> bool:
        return (abs(i - j) <= stride or (i - j) % stride == 0) and (not causal or j <= i)

    return softmax_over(q, k, allowed, key_mask=key_mask)


def strided_steps(q: Tensor, k: Tensor, stride: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """P_columns P_local"""
    along = softmax_over(q, k, lambda i, j: (i - j) % stride == 0 and (not causal or j <= i), key_mask=key_mask)
    local = softmax_over(q, k, lambda i, j: abs(i - j) <= stride and (not causal or j <= i), key_mask=key_mask)
    return along @ local


def fixed(
    q: Tensor, k: Tensor, block: int, summaries: int = 1, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Query i sees its own block and the last `summaries` keys of every whole block."""

    def allowed(i: int, j: int) -> bool:
        whole = (j // block + 1) * block <= k.shape[-2]
        return (j // block == i // block or (whole and j % block >= block - summaries)) and (not causal or j <= i)

    return softmax_over(q, k, allowed, key_mask=key_mask)


def fixed_steps(
    q: Tensor, k: Tensor, block: int, summaries: int = 1, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """P_summaries P_own: a step over the own block, then one over itself and the summaries of other blocks."""
    own = softmax_over(q, k, lambda i, j: j // block == i // block and (not causal or j <= i), key_mask=key_mask)

    def across(i: int, j: int) -> bool:
        whole = (j // block + 1) * block <= k.shape[-2]
        other = whole and j // block != i // block and j % block >= block - summaries
        return j == i or (other and (not causal or j <= i))

    return softmax_over(q, k, across, key_mask=key_mask) @ own


def nystrom(q: Tensor, k: Tensor, landmarks: int, *, iterations: int = 6, key_mask: Tensor | None = None) -> Tensor:
    """softmax(q K~^T) Z softmax(Q~ k^T), segment by segment; with padding, as many queries as keys."""

    def means(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
        size = math.ceil(x.shape[-2] / landmarks)
        e, filled = masked_projection(projection("pooling", x.shape[-2], size=size), keep, mean=True)
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


def hashed(
    q: Tensor,
    k: Tensor | None,
    rotations: Tensor,
    *,
    chunk: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """One sequence after the other: sort by hash in every round, meet the own chunk and the one before, and itself."""
    shared, n = k is None, q.shape[-2]
    keys = q if k is None else k
    if key_mask is not None:
        key_mask = key_mask.expand(*q.shape[:-1])
    flat_q, flat_k = q.double().reshape(-1, *q.shape[-2:]), keys.double().reshape(-1, *q.shape[-2:])
    results = []
    for i in range(flat_q.shape[0]):
        there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask.reshape(-1, n)[i]
        met = torch.zeros(n, n, dtype=torch.bool)
        for rotation in rotations.double():
            ranks = []
            for x in (flat_q[i], flat_k[i]):
                # hashed in single precision, as a hash is: a tie that falls the other way is another hash
                turned = x.detach().float() @ rotation.float()
                hashes = torch.cat([turned, -turned], dim=-1).argmax(-1).tolist()
                hashes = [h if there[j] else 10**9 for j, h in enumerate(hashes)]
                order = sorted(range(n), key=lambda j: (hashes[j], j))
                ranks.append({position: rank for rank, position in enumerate(order)})
            for a in range(n):
                for b in range(n):
                    if ranks[0][a] // chunk - ranks[1][b] // chunk in (0, 1):
                        met[a, b] = True
        met |= torch.eye(n, dtype=torch.bool)
        if causal:
            met &= torch.ones(n, n).tril().bool()
        met &= there
        key = flat_k[i]
        if shared:
            key = key / key.norm(dim=-1, keepdim=True) * math.sqrt(key.shape[-1])
        s = flat_q[i] @ key.mT / math.sqrt(key.shape[-1])
        s = torch.where(torch.eye(n).bool(), torch.full_like(s, -1e5), s) if shared else s
        s = s.masked_fill(~met, 0.0)
        top = s.detach().masked_fill(~met, -math.inf).amax(-1, keepdim=True)
        w = torch.where(met, (s - top.masked_fill(top == -math.inf, 0.0)).exp(), 0.0)
        results.append(w / w.sum(-1, keepdim=True).masked_fill(~met.any(-1, keepdim=True), 1.0))
    return torch.stack(results).reshape(*q.shape[:-1], n)


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
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    big_e, filled = masked_projection(block_matrix(e.double(), n), there, mean=mean)
    big_f, also = masked_projection(block_matrix(f.double(), n), there, mean=mean)
    slots = big_e @ k.double()
    batch = torch.broadcast_shapes(k.shape[:-2], slots.shape[:-2])
    keys = torch.cat([k.double().expand(*batch, n, -1), slots.expand(*batch, -1, -1)], dim=-2)
    real = torch.broadcast_tensors(there[..., :1], (filled & also)[..., :1])  # type: ignore[operator]
    real = [x.expand(*real[0].shape[:-1], x.shape[-1]) for x in (there, filled & also)]  # type: ignore[operator]

    def allowed(i: int, j: int) -> bool:
        return j <= i and j // b == i // b if j < n else (j - n) // r < i // b

    p = softmax_over(q, keys, allowed, key_mask=torch.cat(real, dim=-1))
    return p[..., :n] + p[..., n:] @ big_f


def factored_blocks(
    q: Tensor, k: Tensor, e: Tensor, f: Tensor, *, key_mask: Tensor | None = None, mean: bool = False
) -> Tensor:
    """The double softmax over the own block's keys j <= i beside the slots of earlier blocks, row by row."""
    (r, b), n = e.shape[-2:], k.shape[-2]
    there = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask
    big_e, filled = masked_projection(block_matrix(e.double(), n), there, mean=mean)
    big_f, also = masked_projection(block_matrix(f.double(), n), there, mean=mean)
    slots, filled = big_e @ k.double(), filled & also  # type: ignore[operator]
    rows = []
    for i in range(n):
        first, past = i // b * b, i // b * r
        near = efficient_weights(k[..., first : i + 1, :], there[..., first : i + 1])
        far = efficient_weights(slots[..., :past, :], filled[..., :past])
        total = near.sum(-2, keepdim=True) + far.sum(-2, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        s = 1 / math.sqrt(q.shape[-1])
        features = torch.softmax(s * q[..., i, :].double(), dim=-1).unsqueeze(-2) / total
        here, before = (features * near).sum(-1), (features * far).sum(-1)
        spread = (before.unsqueeze(-2) @ big_f[..., :past, :]).squeeze(-2)
        rows.append(spread + torch.nn.functional.pad(here, (first, n - i - 1)))
    return torch.stack(rows, dim=-2)


def efficient_weights(k: Tensor, there: Tensor) -> Tensor:
    """exp(k / sqrt(width)) where a key is there, zero elsewhere."""
    return (k.double() / math.sqrt(k.shape[-1])).exp() * there.unsqueeze(-1)
