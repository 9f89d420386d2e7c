"""P_ij = exp(s q_i . k_j) / Z_i for j near i, sum_t exp(s q_i . a_t + c_t) exp(s b_t . k_j) / Z_i for all others.

Near are the keys of the query's own block, of the blocks beside it, and the leading ones; far keys are attended to
through r learned features a, b, c (r x k, r x k, r), and Z_i is one normaliser for both.  exp(q . k) as a short sum of
products of positive features is Choromanski et al. 2020 (Performer), learned to imitate a head Zhang et al. 2024
(Hedgehog, LoLCATs).  Every key is either near or far, never both.  The sums over far keys are running sums over
blocks, from the left and (unless causal) from the right.  O(n (block + r) (k + d)), no tensor grows with n^2, and
nothing learned depends on n.  Without the compiled kernel all blocks are one batch of small dense products, which torch
differentiates and compiles as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators._kernels import key_patterns, limits
from headwise.operators._kernels.key_patterns import KeyPattern, States, two_batch_axes
from headwise.operators._kernels.prefix_sums import blocked
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, supports
from headwise.shapes import (
    all_finite,
    broadcast_batch,
    broadcasts_to,
    no_empty_axis,
    products_fit,
    same_axis,
    same_kind,
    whole_numbers,
)


@final
@dataclass(frozen=True, eq=False)
class NearFar(AttentionOperator):
    """Sums over far keys are taken when P is applied; until then it is q, k and the features."""

    qk: QueriesKeys
    a: Tensor  # (*batch, r, k)
    b: Tensor  # (*batch, r, k)
    c: Tensor  # (*batch, r)
    block: int
    leading: int

    @property
    def shape(self) -> torch.Size:
        features = torch.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2], self.c.shape[:-1])
        return torch.Size((*torch.broadcast_shapes(self.qk.batch, features), self.qk.n, self.qk.n))

    @property
    def causal(self) -> bool:
        return self.qk.mask.causal

    @property
    def blocks(self) -> int:
        return -(-(self.qk.n - self.leading) // self.block)

    @property
    def claims(self) -> frozenset[Claim]:
        key_mask = self.qk.key_mask
        # without a key mask a query attends to itself; with one, to the first key if that is leading and not masked
        nonempty = key_mask is None or (self.leading > 0 and bool(key_mask[..., 0].all()))
        return weights_claim(stochastic=nonempty, causal=self.causal)

    def apply(self, v: Tensor) -> Tensor:
        return self.last_rows(v)

    def last_rows(self, v: Tensor, beyond: States | None = None) -> Tensor:
        """P v for the queries that there are, the last one at the last key.

        beyond  `States` of keys that are not in k and far from all queries, which are then not leading
        """
        if v.dtype == self.qk.q.dtype and key_patterns.usable(self.qk.q, self.qk.k, v, self.a, self.b, self.c):
            return self._by_kernel(v, beyond)
        if self.qk.m < self.qk.n:
            q = F.pad(self.qk.q, (0, 0, self.qk.n - self.qk.m, 0))
            return replace(self, qk=replace(self.qk, q=q))._in_blocks(v, beyond)[..., -self.qk.m :, :]
        return self._in_blocks(v, beyond)

    def _in_blocks(self, v: Tensor, beyond: States | None) -> Tensor:
        far, x = self._far(), self.qk.mask.hide(v).to(torch.promote_types(v.dtype, torch.float32))
        q, k = self._blocked(self.qk.q.to(x.dtype)), self._windows(self.qk.k.to(x.dtype), 0.0)
        near, lse = _near(q, k, self._windows(x, 0.0), self._hidden(), self.qk.scale)
        masses, means = far.masses().to(x.dtype), self._means(far, x)
        if beyond is not None:
            masses, means = key_patterns.joined(masses, means, *beyond)
        out = _merged(near, lse, self._others(masses), self._beside(means, x))
        out = out.flatten(-3, -2)[..., : self.qk.n - self.leading, :]
        if not self.leading:
            return out.to(v.dtype)
        ahead = _softmax(self._leading_scores(x.dtype))
        head = ahead @ x[..., : ahead.shape[-1], :]
        batch = torch.broadcast_shapes(out.shape[:-2], head.shape[:-2])
        return torch.cat([y.expand(*batch, *y.shape[-2:]) for y in (head, out)], dim=-2).to(v.dtype)

    def _by_kernel(self, v: Tensor, beyond: States | None) -> Tensor:
        batch, key_mask = torch.broadcast_shapes(self.shape[:-2], v.shape[:-2]), self.qk.key_mask
        q, k, values, a, b = (two_batch_axes(x, batch) for x in (self.qk.q, self.qk.k, v, self.a, self.b))
        if beyond is not None:
            beyond = two_batch_axes(beyond[0], batch, trailing=1), two_batch_axes(beyond[1], batch)
        out = key_patterns.attend(
            q,
            k,
            values,
            [near_far_pattern(self.block, self.leading, self.a.shape[-2], self.causal)] * q.shape[1],
            scale=self.qk.scale,
            causal=self.causal,
            key_mask=None if key_mask is None else two_batch_axes(key_mask, batch, trailing=1),
            features=(a, b, two_batch_axes(self.c, batch, trailing=1)),
            beyond=beyond,
            plain=self._plain,
        )
        return out.reshape(*batch, *out.shape[-2:])

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, *others: Tensor) -> Tensor:
        """What the kernel computes, from torch's operations; `others` are `beyond` and the key mask, where given."""
        beyond = (others[0], others[1]) if len(others) > 1 else None
        mask = replace(self.qk.mask, key_mask=next((x for x in others if x.dtype == torch.bool), None))
        return replace(self, qk=replace(self.qk, q=q, k=k, mask=mask), a=a, b=b, c=c).last_rows(v, beyond)

    def adjoint(self, u: Tensor) -> Tensor:
        far, y = self._far(), u.to(torch.promote_types(u.dtype, torch.float32))
        q, k = self._blocked(self.qk.q.to(y.dtype)), self._windows(self.qk.k.to(y.dtype), 0.0)
        scores = (
            (self.qk.scale * (q @ k.mT)).masked_fill(self._hidden(), -math.inf),
            self._others(far.masses().to(y.dtype)),
        )
        batch = torch.broadcast_shapes(*(x.shape[:-1] for x in scores))
        weights = _softmax(torch.cat([x.expand(*batch, x.shape[-1]) for x in scores], dim=-1))
        rows = weights.mT @ self._blocked(y)
        width = k.shape[-2]

        def columns(x: Tensor) -> tuple[Tensor, Tensor]:
            return self._windows(x, 0.0), self._beside(self._means(far, x), x)

        shapes, pull, *_ = torch.func.vjp(columns, rows.new_zeros(*rows.shape[:-3], *y.shape[-2:]))
        parts = rows[..., :width, :], rows[..., width:, :]
        out = pull(tuple(part.expand(shape.shape) for part, shape in zip(parts, shapes, strict=True)))[0]
        if self.leading:
            ahead = _softmax(self._leading_scores(y.dtype)).mT @ y[..., : self.leading, :]
            out = out + F.pad(ahead, (0, 0, 0, out.shape[-2] - ahead.shape[-2]))
        return self.qk.mask.hide(out).to(u.dtype)

    def cost(self, d: int) -> Cost:
        copies, r, k = self.shape[:-2].numel(), self.a.shape[-2], self.a.shape[-1]
        n, rows = self.qk.n, self.blocks * self.block
        features = n * r * k + rows * r * d
        near = rows * (self._width - r - self.leading) * (k + d)
        others = (r + self.leading) * (n * k + rows * d)
        ahead = self.leading * (self.leading if self.causal else n) * (k + d)
        scalars = rows * (r + self._width) + self.blocks * (r + self.leading) * d
        return Cost(features + near + others + ahead, scalars, 4).times(copies)

    def adjoint_cost(self, d: int) -> Cost:
        n, r = self.blocks * self.block, self.a.shape[-2]
        return self.cost(d) + Cost(n * r * d).times(self.shape[:-2].numel())  # a vjp runs forward first

    @property
    def _width(self) -> int:
        """Columns of a query: its own block and those beside it, the slots, the leading keys."""
        return (2 if self.causal else 3) * self.block + self.a.shape[-2] + self.leading

    def _others(self, masses: Tensor) -> Tensor:
        """Scores of slots, of masses (*batch, blocks, r), and leading keys: (*batch, blocks, block, r + leading)"""
        dtype = masses.dtype
        masses = (masses + self.c.to(dtype).unsqueeze(-2)).unsqueeze(-1)
        a, k = self.a.to(dtype), self.qk.k[..., : self.leading, :].to(dtype)
        batch = torch.broadcast_shapes(a.shape[:-2], k.shape[:-2])
        keys = torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (a, k)], dim=-2)
        # one product for all blocks: they share a and the leading keys
        return (
            self._blocked(self.qk.scale * (self.qk.q.to(dtype) @ keys.mT))
            + self._beside(masses, self._visibility(dtype)).mT
        )

    def _hidden(self) -> Tensor:
        """True at keys of the near blocks that are masked or come later: (*batch, blocks, block or 1, ·)"""
        device = self.qk.q.device
        visible = torch.ones(self.qk.n, device=device) if self.qk.key_mask is None else self.qk.key_mask.float()
        hidden = self._windows(visible.unsqueeze(-1), 0.0).mT == 0
        if self.causal:
            i, j = torch.arange(self.block, device=device)[:, None], torch.arange(2 * self.block, device=device)
            hidden = hidden | (j > i + self.block)
        return hidden

    def _leading_scores(self, dtype: torch.dtype) -> Tensor:
        """Scores of the leading queries: (*batch, leading, n), causal (*batch, leading, leading)."""
        q, k = self.qk.q[..., : self.leading, :].to(dtype), self.qk.k.to(dtype)
        columns = self.leading if self.causal else self.qk.n
        scores = self.qk.scale * (q @ k[..., :columns, :].mT) + self._visibility(dtype)[..., :columns, :].mT
        if not self.causal:
            return scores
        return scores.masked_fill(torch.ones(columns, columns, dtype=torch.bool, device=q.device).triu(1), -math.inf)

    def _visibility(self, dtype: torch.dtype) -> Tensor:
        """0 at visible keys and -inf at masked ones: (*batch, n, 1)"""
        zeros = torch.zeros(self.qk.n, dtype=dtype, device=self.qk.q.device)
        return (zeros if self.qk.key_mask is None else zeros.masked_fill(~self.qk.key_mask, -math.inf)).unsqueeze(-1)

    def _beside(self, slots: Tensor, x: Tensor) -> Tensor:
        """slots (*batch, blocks or 1, r, c) and leading rows of x (*batch, n, c): (*batch, blocks, r + leading, c)"""
        parts = [slots, x[..., None, : self.leading, :]]
        batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))
        return torch.cat([y.expand(*batch, self.blocks, *y.shape[-2:]) for y in parts], dim=-2)

    def _windows(self, x: Tensor, fill: float) -> Tensor:
        """(*batch, n, c) -> (*batch, blocks, 2 or 3 times block, c): each block with those beside it."""
        after = 0 if self.causal else self.block
        x = x[..., self.leading :, :]
        short = self.blocks * self.block - x.shape[-2]
        x = F.pad(x, (0, 0, self.block, short + after), value=fill)
        return x.unfold(-2, 2 * self.block + after, self.block).mT

    def _blocked(self, x: Tensor) -> Tensor:
        """(*batch, n, c) -> (*batch, blocks, block, c), without the leading rows, zeros at the end."""
        return blocked(x[..., self.leading :, :], self.block)

    def _far(self) -> Far:
        dtype = torch.promote_types(self.qk.k.dtype, torch.float32)
        scores = self._blocked(self.qk.scale * (self.qk.k.to(dtype) @ self.b.to(dtype).mT))
        all_keys = torch.ones(self.qk.n, 1, dtype=torch.bool, device=scores.device)
        hidden = ~self._blocked(all_keys if self.qk.key_mask is None else self.qk.key_mask.unsqueeze(-1))
        scores = scores.masked_fill(hidden, limits.HIDDEN)
        # every block has its own shift, so that small sums beside large ones are not lost
        tops = scores.detach().amax(-2, keepdim=True)
        top = tops.amax(-3, keepdim=True)
        weights, share = (scores - tops).exp().masked_fill(hidden, 0), (tops - top).to(_range(tops, top)).exp()
        sums = _elsewhere(weights.sum(-2, keepdim=True) * share, self.causal)
        return Far(weights, share, sums, top)

    def _means(self, far: Far, v: Tensor) -> Tensor:
        """Means of the far values: (*batch, n, d) -> (*batch, blocks, r, d)"""
        total = _elsewhere((far.weights.mT @ self._blocked(v)) * far.share.mT, self.causal)
        return (total / far.sums.masked_fill(far.empty, 1).mT).to(v.dtype)


@final
@dataclass(frozen=True, eq=False)
class Far:
    """exp(s b . k) of every key over that of its block's top one, and their sums over the far blocks of each block."""

    weights: Tensor  # (*batch, blocks, block, r)
    share: Tensor  # (*batch, blocks, 1, r), exp(top of the block - top of all)
    sums: Tensor  # (*batch, blocks, 1, r), relative to the top of all
    top: Tensor  # (*batch, 1, 1, r)

    @property
    def empty(self) -> Tensor:
        return self.sums == 0

    def masses(self) -> Tensor:
        """log sum over far j of exp(s b . k_j): (*batch, blocks, r), -inf where there is none."""
        logs = self.sums.masked_fill(self.empty, 1).log() + self.top
        return logs.masked_fill(self.empty, -math.inf).squeeze(-2)


def _range(tops: Tensor, top: Tensor) -> torch.dtype:
    """The dtype of sums over blocks: double where single would lose whole blocks or values cannot be read."""
    if not _plain():
        return torch.float64
    nonempty = tops > limits.HIDDEN / 2
    spread = torch.where(nonempty, top - tops, 0).amax()
    return tops.dtype if spread.item() < limits.FLOAT32_RANGE else torch.float64


def _elsewhere(x: Tensor, causal: bool) -> Tensor:
    """Sums of x (*batch, blocks, ...) over the blocks not beside each: those two or more before (or after)."""
    if x.shape[-3] < 3:
        return torch.zeros_like(x)
    before = F.pad(x[..., :-2, :, :].cumsum(-3), (0, 0, 0, 0, 2, 0))
    if causal:
        return before
    after = x[..., 2:, :, :].flip(-3).cumsum(-3).flip(-3)
    return before + F.pad(after, (0, 0, 0, 0, 0, 2))


def _softmax(scores: Tensor) -> Tensor:
    """Over the last axis; an empty row is zero, and so are its gradients."""
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0), dim=-1).masked_fill(nothing, 0)


def _near(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the last two axes and its log-sum-exp (..., rows, 1); -inf where all keys are hidden.

    The fused kernel reads overlapping windows where they lie; products and a softmax where gradients are needed.
    """
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if needs_gradient or q.device.type != "cpu" or v.shape[-1] != q.shape[-1] or not _plain():
        scores = (scale * (q @ k.mT)).masked_fill(hidden, -math.inf)
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        lse = scores.masked_fill(nothing, 0).logsumexp(-1, keepdim=True).masked_fill(nothing, -math.inf)
        return (scores - lse.masked_fill(nothing, 0)).exp() @ v, lse
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, hidden)))
    bias = q.new_zeros(()).masked_fill(hidden, -math.inf)
    rows = [x.expand(*batch, *x.shape[-2:]).reshape(-1, *batch[-1:], *x.shape[-2:]) for x in (q, k, v, bias)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows[:3], attn_mask=rows[3], scale=scale)
    out, lse = out.reshape(*batch, *out.shape[-2:]), lse.reshape(*batch, lse.shape[-1], 1)
    # the kernel reports 0 for a row without a key, which is a possible sum
    return out, lse.masked_fill(hidden.all(-1, keepdim=True), -math.inf)


def _plain() -> bool:
    """Not inside vmap or a traced graph, which do not know the kernel."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def _merged(near: Tensor, lse: Tensor, scores: Tensor, v: Tensor) -> Tensor:
    """One softmax over what is near (its mean and log-sum-exp) and further columns (their scores and values)."""
    top = torch.maximum(lse, scores.amax(-1, keepdim=True)).detach()
    top = top.masked_fill(top == -math.inf, 0)
    own, others = (lse - top).exp(), (scores - top).exp()
    total = own + others.sum(-1, keepdim=True)
    return (near * own + others @ v) / total.masked_fill(total == 0, 1)


def near_far_pattern(block: int, leading: int, rank: int, causal: bool) -> KeyPattern:
    """Its own block and those beside it (causal: before it), the leading keys, and `rank` features for the others."""
    return KeyPattern(block, 0 if causal else block, leading, block, features=rank)


@supports(CAUSAL, KEY_MASK, one_length="its blocks are cut for one length")
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
) -> NearFar:
    """Keys of the query's block and of those beside it (causal: before it) one by one, the others through r features.

    a, b     (*batch, r, k): query and key sides of the features; c (*batch, r) their log weights
    leading   number of first keys that are near to every query; as queries they attend to all keys (causal: earlier)
    key_mask  boolean (*batch, n), True = attend; with padding at the end, real rows equal the shorter sequence's

    >>> q, a = torch.zeros(12, 2), torch.zeros(1, 2)  # scores are equal, and one feature with a = b = 0 is exact
    >>> near_far(q, q, a, a, torch.zeros(1), block=2).dense()[0, [0, 11]]
    tensor([0.0833, 0.0833])
    """
    qk = QueriesKeys.checked("NearFar", q, k, scale=scale, causal=causal, key_mask=key_mask)
    n = qk.require_square("NearFar", "softmax")
    whole_numbers("NearFar", least=0, block=block, leading=leading)
    if block < 1:
        raise ShapeError(f"NearFar: block must be at least 1 (a query attends to itself), but is {block}")
    if not 0 <= leading < n:
        raise ShapeError(f"NearFar: leading must be between 0 and n - 1 = {n - 1}, but is {leading}")
    no_empty_axis("NearFar", a=a, b=b)
    same_kind("NearFar", a=a, b=b, c=c)
    if c.dim() < 1:
        raise ShapeError("NearFar: c must be (*batch, r), but has no axis")
    same_axis("NearFar", "k", q=q.shape[-1], a=a.shape[-1], b=b.shape[-1])
    r = same_axis("NearFar", "r", a=a.shape[-2], b=b.shape[-2], c=c.shape[-1])
    broadcast_batch("NearFar", q=qk.batch, a=a.shape[:-2], b=b.shape[:-2], c=c.shape[:-1])
    broadcasts_to("NearFar", "a", a, (*qk.batch, r, a.shape[-1]))
    all_finite("NearFar", c=c)
    products_fit("NearFar", qk.scale, limits.LARGEST_SCORE, q=qk.q, a=a)
    products_fit("NearFar", qk.scale, limits.LARGEST_SCORE, k=qk.k, b=b)
    return NearFar(qk, a, b, c, block, leading)
