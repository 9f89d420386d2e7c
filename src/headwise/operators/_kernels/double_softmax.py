"""softmax_features(s q) (softmax_keys(s k)^T v) for q (b, m, k), k (b, n, k), v (b, n, d): what `efficient` and
`factored` compute, in blocks of rows so that intermediate results stay in the cache; by the compiled kernel where it is
usable, otherwise by torch's calls.

With H and L the two softmaxes, C = L^T v and g the gradient of the result:
    dC = H^T g      dq = s H (g C^T - rows of H * (g C^T))
    dv = L dC       dk = s L (v dC^T - c),  c = rows of C * dC, from the normaliser of the softmax over keys.

The two halves, for keys and values in several parts: `key_states` is C with the logarithm of that normaliser for one
part, and `feature_rows` is H C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from headwise.operators._kernels import autograd_functions, limits, native
from headwise.operators._kernels.key_patterns import two_batch_axes
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators.masks import Mask


def double_softmax(qk: QueriesKeys, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """H L v with the keys `k` (*batch, r, k) in place of those of `qk`; any batch axes, masked keys left out."""
    if qk.q.dtype == k.dtype == v.dtype and native.usable(qk.q, k, v, key_mask):
        batch = torch.broadcast_shapes(qk.q.shape[:-2], k.shape[:-2], v.shape[:-2])
        tensors = [two_batch_axes(x, batch) for x in (qk.q, k, v)]
        if key_mask is not None:
            tensors.append(two_batch_axes(key_mask, batch, trailing=1))
        out = autograd_functions.run(CompiledDoubleSoftmax(qk.scale), *tensors)
        return out.reshape(*batch, *out.shape[-2:])
    q, k, batch = _flat(qk.q, k, v, key_mask)
    x = v.to(q.dtype) if key_mask is None else v.to(q.dtype).masked_fill(~key_mask.unsqueeze(-1), 0)
    x = x.expand(*batch, *v.shape[-2:]).reshape(math.prod(batch), *v.shape[-2:])
    out = autograd_functions.run(DoubleSoftmax(qk.scale), q, k, x).reshape(*batch, q.shape[-2], v.shape[-1])
    return out.to(v.dtype) if key_mask is None else out.masked_fill(~_any(key_mask), 0).to(v.dtype)


def double_softmax_adjoint(qk: QueriesKeys, k: Tensor, u: Tensor, key_mask: Tensor | None) -> Tensor:
    """L^T H^T u, from differentiable operations."""
    q, k, batch = _flat(qk.q, k, u, key_mask)
    x = u.to(q.dtype).expand(*batch, *u.shape[-2:]).reshape(math.prod(batch), *u.shape[-2:])
    kernel = DoubleSoftmax(qk.scale)
    out = kernel.keys(k) @ (kernel.features(q).mT @ x)
    out = out.reshape(*batch, *out.shape[-2:])
    return out.to(u.dtype) if key_mask is None else out.masked_fill(~key_mask.unsqueeze(-1), 0).to(u.dtype)


def key_states(k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """[log sum_j exp(s k_jc), mean_c(v)] for each feature c: (*batch, k, 1 + d) for k (*batch, n, k), v (*batch, n, d).

    At least float32; [limits.HIDDEN, 0] where there is no visible key.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    k, v = k.to(compute), v.to(compute)
    batch = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    if native.usable(k, v, key_mask):
        tensors = [two_batch_axes(x, batch) for x in (k, v)]
        if key_mask is not None:
            tensors.append(two_batch_axes(key_mask, batch, trailing=1))
        out = autograd_functions.run(CompiledKeyStates(scale), *tensors)
    else:
        k, v = (k, v) if key_mask is None else _hidden(k, v, key_mask, scale)
        k, v = (x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (k, v))
        out = autograd_functions.run(KeyStates(scale), k, v)
    return out.reshape(*batch, *out.shape[-2:])


def feature_rows(q: Tensor, means: Tensor, scale: float) -> Tensor:
    """softmax_features(s q) C for q (*batch, m, k) and C (*batch, k, d): the double softmax with C for values.

    Key c is so large in feature c that it has all of its weight.
    """
    certain = torch.eye(q.shape[-1], dtype=means.dtype, device=means.device) * (1000 / scale)
    qk = QueriesKeys(q.to(means.dtype), certain, scale, Mask(q.shape[-2], q.shape[-1]))
    return double_softmax(qk, certain, means, None)


def _flat(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, torch.Size]:
    """q and k with one batch axis, in at least single precision: sums over n keys are not half-precision numbers."""
    compute = torch.promote_types(v.dtype, torch.float32)
    q, k = q.to(compute), k.to(compute)
    if key_mask is not None:  # the exponential of this is exactly zero beside any real key
        k = k.masked_fill(~key_mask.unsqueeze(-1), limits.HIDDEN)
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k = (x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (q, k))
    return q, k, batch


def _hidden(k: Tensor, v: Tensor, key_mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Masked keys with scores of limits.HIDDEN, and values of zero."""
    hidden = ~key_mask.unsqueeze(-1)
    least = max(limits.HIDDEN / scale, torch.finfo(k.dtype).min)
    return k.masked_fill(hidden, least), v.masked_fill(hidden, 0)


def _any(key_mask: Tensor) -> Tensor:
    return key_mask.any(-1)[..., None, None]


@final
@dataclass(frozen=True)
class DoubleSoftmax:
    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v = tensors
        means, top, total = self.means(k, v)
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty(*q.shape[:-1], v.shape[-1])
        for rows, here in _slices(q):
            torch.bmm(self._features(q[:, rows], here), means, out=out[:, rows])
        return out, means, top, total

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, means, top, total = tensors
        dq = torch.empty_like(q)
        dmeans = torch.zeros_like(means)
        for (rows, here), (_, there) in zip(_slices(q), _slices(q), strict=True):
            features, g = self._features(q[:, rows], here), pull[:, rows]
            dmeans.baddbmm_(features.mT, g)
            part = torch.bmm(g, means.mT, out=there)
            # H (x - sum H x), the derivative of a softmax over features, in one pass
            torch.ops.aten._softmax_backward_data.out(part, features, -1, q.dtype, grad_input=part)
            torch.mul(part, self.scale, out=dq[:, rows])
        inner = (means * dmeans).sum(-1, keepdim=True).mT
        return dq, *self.pull_keys(k, v, top, total, dmeans, inner)

    def means(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C (b, k, d), and for every feature the maximum of k and the sum of exp(s (k - maximum)), (b, 1, k)."""
        top = k.amax(-2, keepdim=True)
        means = v.new_zeros(v.shape[0], k.shape[-1], v.shape[-1])
        total = k.new_zeros(k.shape[0], 1, k.shape[-1])
        for rows, here in _slices(k):
            self._exponentials(k[:, rows], top, here)
            total += here.sum(-2, keepdim=True)
            means.baddbmm_(here.mT, v[:, rows])
        means /= total.mT
        return means, top, total

    def pull_keys(
        self, k: Tensor, v: Tensor, top: Tensor, total: Tensor, dmeans: Tensor, inner: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dk = s L (v dC^T - inner), dv = L dC"""
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for rows, here in _slices(k):
            weights = self._exponentials(k[:, rows], top, here).div_(total)
            torch.bmm(weights, dmeans, out=dv[:, rows])
            torch.bmm(v[:, rows], dmeans.mT, out=dk[:, rows]).sub_(inner).mul_(weights).mul_(self.scale)
        return dk, dv

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v = tensors
        return self.features(q) @ (self.keys(k).mT @ v)

    def keys(self, k: Tensor) -> Tensor:
        return torch.softmax(k * self.scale, dim=-2)

    def features(self, q: Tensor) -> Tensor:
        return torch.softmax(q * self.scale, dim=-1)

    def _exponentials(self, k: Tensor, top: Tensor, here: Tensor) -> Tensor:
        return torch.sub(k, top, out=here).mul_(self.scale).exp_()

    def _features(self, q: Tensor, here: Tensor) -> Tensor:
        return torch.ops.aten._softmax.out(torch.mul(q, self.scale, out=here), -1, False, out=here)


@final
@dataclass(frozen=True)
class CompiledDoubleSoftmax:
    """The same for q (b, h, m, k), k (b, h, n, k), v (b, h, n, d) and, if any key is masked, a mask (b, h, n)."""

    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mask = _with_mask(tensors)
        return torch.ops.headwise.double_softmax(q, k, v, mask, self.scale)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        *inputs, _, means, top, total = tensors
        return torch.ops.headwise.double_softmax_backward(pull, *_with_mask(inputs), means, top, total, self.scale)

    def plain(self, *tensors: Tensor) -> Tensor:
        q, k, v, mask = _with_mask(tensors)
        if mask is None:
            return DoubleSoftmax(self.scale).plain(q, k, v)
        hidden = ~mask.unsqueeze(-1)
        out = DoubleSoftmax(self.scale).plain(q, k.masked_fill(hidden, limits.HIDDEN), v.masked_fill(hidden, 0))
        return out.masked_fill(~_any(mask), 0)


@final
@dataclass(frozen=True)
class KeyStates:
    """[lse, C] (b, k, 1 + d) for k (b, n, k), v (b, n, d): with dlse, dk = s L (v dC^T - c + dlse)."""

    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        k, v = tensors
        if not k.shape[-2]:
            nothing = k.new_full((len(k), 1, k.shape[-1]), limits.HIDDEN)
            return torch.cat([nothing.mT, v.new_zeros(len(v), k.shape[-1], v.shape[-1])], dim=-1), nothing, nothing
        means, top, total = DoubleSoftmax(self.scale).means(k, v)
        return torch.cat([(top * self.scale + total.log()).mT, means], dim=-1), top, total

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        k, v, state, top, total = tensors
        dlse, dmeans = pull[..., :1], pull[..., 1:].contiguous()
        inner = (state[..., 1:] * dmeans).sum(-1, keepdim=True) - dlse
        return DoubleSoftmax(self.scale).pull_keys(k, v, top, total, dmeans, inner.mT)

    def plain(self, *tensors: Tensor) -> Tensor:
        k, v = tensors
        lse = (k * self.scale).logsumexp(-2).clamp(min=limits.HIDDEN)  # -inf of no keys
        return torch.cat([lse.unsqueeze(-1), DoubleSoftmax(self.scale).keys(k).mT @ v], dim=-1)


@final
@dataclass(frozen=True)
class CompiledKeyStates:
    """The same for k (b, h, n, k), v (b, h, n, d) and, if any key is masked, a mask (b, h, n)."""

    scale: float

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        k, v, *mask = tensors
        none = k[:, :, :0]  # no queries: the kernel stops after the means
        _, means, top, total = CompiledDoubleSoftmax(self.scale).forward(none, k, v, *mask)
        lse = torch.where(total > 0, top + total.log(), limits.HIDDEN)
        return torch.cat([lse.unsqueeze(-1), means], dim=-1), top, total

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        (k, v, *mask), (state, top, total) = tensors[:-3], tensors[-3:]
        dlse, dmeans, means = pull[..., :1], pull[..., 1:], state[..., 1:]
        # the kernel takes c from the means: of these, c is less by dlse, unless dC is zero
        squares = dmeans.square().sum(-1, keepdim=True)
        if large := bool((squares > torch.finfo(squares.dtype).tiny * 1e8).all()):
            means = means - dlse * (dmeans / squares)
        # queries that are certain of one feature each: then the gradient of the result is that of the means
        q = (torch.eye(k.shape[-1]) * (1000 / self.scale)).expand(*k.shape[:2], -1, -1)
        _, dk, dv = CompiledDoubleSoftmax(self.scale).pull(dmeans, q, k, v, *mask, means, means, top, total)
        if large:
            return dk, dv
        less = -state[..., :1].mT
        for rows, here in _slices(k):
            weights = torch.add(less, k[..., rows, :], alpha=self.scale, out=here).exp_()
            if mask:
                weights.masked_fill_(~mask[0][..., rows, None], 0)
            dk[..., rows, :].addcmul_(weights, dlse.mT, value=self.scale)
        return dk, dv

    def plain(self, *tensors: Tensor) -> Tensor:
        k, v, *mask = tensors
        return KeyStates(self.scale).plain(*(_hidden(k, v, mask[0], self.scale) if mask else (k, v)))


def _with_mask(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, *mask = tensors
    return q, k, v, mask[0] if mask else None


@native.after_loading
def _register() -> None:
    """Shapes and gradients for torch.compile, torch.export and opcheck."""

    @torch.library.register_fake("headwise::double_softmax")
    def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        b, h, m, width = q.shape
        means = q.new_empty(b, h, width, v.shape[-1], dtype=torch.float32)
        return q.new_empty(b, m, h, v.shape[-1]).transpose(1, 2), means, means[..., 0].clone(), means[..., 0].clone()

    @torch.library.register_fake("headwise::double_softmax_backward")
    def _(pull: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    def backward(ctx: Any, pull: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        return *torch.ops.headwise.double_softmax_backward(pull, *ctx.saved_tensors, ctx.scale), None, None

    torch.library.register_autograd("headwise::double_softmax", backward, setup_context=keep)


def _slices(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows of x (*batch, n, c), each with a contiguous work buffer, reused because new pages are slow.

    Contiguous also for a short last slice: torch's softmax into its own input is wrong otherwise.
    """
    *batch, n, c = x.shape
    b = math.prod(batch)
    step = max(1, min(n, limits.CACHE_ENTRIES // (b * c)))
    room = x.new_empty(b * step * c)
    for start in range(0, n, step):
        count = min(step, n - start)
        yield slice(start, start + count), room[: b * count * c].view(*batch, count, c)
