"""softmax(s q k^T) v over the keys that the pattern of a head shows to its queries; heads that differ are one call.

    KeyPattern()                                   all keys
    KeyPattern(32, 32, leading=1)                  32 keys before and after the query, and the first key
    KeyPattern(0, 0, block=64, every=64, last=1)   the query's own block of 64, and the last key of every other one
    KeyPattern(64, 64, stride=64)                  64 keys before and after, and every 64th
    KeyPattern(32, 32, block=32, features=4)       its block and those beside it, the other keys through four features

The compiled kernels compute all of them, and their gradients.  Second derivatives go through `plain`, the same function
in torch's operations, which the caller has for machines without a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from headwise.operators._kernels import autograd_functions, native

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What the kernels accept; halves are computed in single precision."""

UNBOUNDED = 1 << 40
"""More keys than any sequence has."""

Features = tuple[Tensor, Tensor, Tensor]
"""a, b (b, h, r, k) and c (b, h, r) of `near_far`; of heads with fewer than r features the first ones count."""

States = tuple[Tensor, Tensor]
"""Log-sum-exp (b, h, r) of the scores s b_t . k_j of some keys, and the mean (b, h, r, d) of their values."""


class KeyPattern(NamedTuple):
    """The keys of the query at position p (the last query is at the last key); in a causal call, those up to p.

    left, right   keys p - left .. p + right; with `block`, from `left` before the block of p to `right` after it
    leading       the first keys, for all queries; as queries they attend to all keys; blocks begin after them
    every, last   the last `last` keys of every whole block of `every` keys but the query's own
    stride        all keys at a multiple of `stride` from p
    features      keys that are neither leading nor in the own block and those beside it: through that many features
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    leading: int = 0
    block: int = 0
    every: int = 0
    last: int = 0
    stride: int = 0
    features: int = 0


def usable(*tensors: Tensor | None) -> bool:
    """Whether `attend` may be called with these tensors now."""
    return native.usable(*tensors, dtypes=DTYPES)


def two_batch_axes(x: Tensor, batch: Sequence[int], *, trailing: int = 2) -> Tensor:
    """x broadcast to the axes `batch`, as (b, h, and its `trailing` axes); a view unless there are more than two."""
    b, h = math.prod(batch[:-1]), batch[-1] if batch else 1
    own = x.shape[x.dim() - trailing :]
    return x.expand(*batch, *own).reshape(b, h, *own)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[KeyPattern],
    *,
    scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    features: Features | None = None,
    beyond: States | None = None,
    plain: Callable[..., Tensor],
) -> Tensor:
    """P v (b, h, m, d), laid out (b, m, h, d), for q (b, h, m, k), k (b, g, n, k) and v (b, g, n, d), g dividing h.

    key_mask  boolean (b, h, n), True = attend; what masked keys hold is never read
    beyond    with features: states of keys that are not in k and far from all queries
    plain     (q, k, v, *features, *beyond, key_mask) -> the same, differentiable any number of times
    """
    extra = (*(features or ()), *(beyond or ()))
    call = PatternAttention(tuple(patterns), scale, causal, len(extra), plain)
    tensors = (q, k, v, *extra, *(() if key_mask is None else (key_mask,)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return autograd_functions.run(call, *tensors)
    return call.forward(*tensors)[0]


def adjoint(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    patterns: Sequence[KeyPattern],
    *,
    scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """P^T u (b, h, n, d) for u (b, h, m, d), without a graph: the gradient with respect to values that are zero."""
    call = PatternAttention(tuple(patterns), scale, causal, 0, _not_differentiable)
    mask = () if key_mask is None else (key_mask,)
    zeros = u.new_zeros(()).expand(*k.shape[:-1], u.shape[-1])
    _, top, total, *_ = call.forward(q, k, zeros[..., :1], *mask)
    zero = torch.zeros_like(u, dtype=top.dtype)
    return call.pull(u, q, k, zeros, *mask, *autograd_functions.rounded(zero, u, top, total))[2]


def joined(masses: Tensor, means: Tensor, lse: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """`States` (*batch, blocks, r) and (*batch, blocks, r, d) of blocks, each with (*batch, r) and (*batch, r, d)."""
    lse, mean = lse.unsqueeze(-2), mean.unsqueeze(-3)
    top = torch.maximum(masses, lse).detach()
    top = top.masked_fill(top == -math.inf, 0)
    own, other = (masses - top).exp(), (lse - top).exp()
    empty = own + other == 0
    total = (own + other).masked_fill(empty, 1)
    share = (own / total).unsqueeze(-1), (other / total).unsqueeze(-1)
    return (total.log() + top).masked_fill(empty, -math.inf), share[0] * means + share[1] * mean


@final
@dataclass(frozen=True, eq=False)
class PatternAttention:
    """A kernel of `autograd_functions`: tensors are q, k, v, then a, b, c, then `States`, and the mask if there is one.

    What is far from a block is one more key a_t with the score bias c_t + mass_t and the value mean_t for each feature.
    """

    patterns: tuple[KeyPattern, ...]
    scale: float
    causal: bool
    extra: int  # tensors of features and states: 0, 3 or 5
    plain: Callable[..., Tensor]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """P v, the maximum and the sum of every row, and with features the states of the far keys among k."""
        (q, k, v), features, beyond, key_mask = self._split(tensors)
        if not features:
            found = torch.ops.headwise.sparse_attention(q, k, v, key_mask, None, None, None, *self._numbers)
            return autograd_functions.rounded(found[0], v, *found[1:])
        a, b, c = features
        states = torch.ops.headwise.far_sums(k, v, b, key_mask, *self._far_numbers)
        masses, means = joined(*states, *beyond) if beyond else states
        bias = masses + c.unsqueeze(-2)
        out, *sums = torch.ops.headwise.sparse_attention(q, k, v, key_mask, a, bias, means, *self._numbers)
        return autograd_functions.rounded(out, v, *sums, *states)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, out, (top, total, *states) = autograd_functions.unrounded(tensors, tensors[2], 4 if self.extra else 2)
        (q, k, v), features, beyond, key_mask = self._split(inputs)
        backward = torch.ops.headwise.sparse_attention_backward
        if not features:
            return backward(pull, q, k, v, key_mask, None, None, None, out, top, total, *self._numbers)[:3]
        a, b, c = features
        (masses, means), back = torch.func.vjp(joined, *states, *beyond)[:2] if beyond else (states, tuple)
        bias = masses + c.unsqueeze(-2)
        dq, dk, dv, da, *dstates = backward(pull, q, k, v, key_mask, a, bias, means, out, top, total, *self._numbers)
        dmasses, dmeans, *dbeyond = back(tuple(dstates))
        far_k, far_v, db = torch.ops.headwise.far_sums_backward(
            dmasses, dmeans, k, v, b, key_mask, *states, *self._far_numbers
        )
        return dq, dk.add_(far_k), dv.add_(far_v), da, db, dstates[0].sum(-2).to(c.dtype), *dbeyond

    @property
    def _numbers(self) -> tuple[list[int], float, bool]:
        return [x for pattern in self.patterns for x in pattern], self.scale, self.causal

    @property
    def _far_numbers(self) -> tuple[list[int], float, bool]:
        patterns = (pattern if pattern.features else KeyPattern() for pattern in self.patterns)
        return [x for pattern in patterns for x in pattern], self.scale, self.causal

    def _split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Any]:
        """(q, k, v), the features, the states, and the mask or None."""
        floating = 3 + self.extra
        key_mask = tensors[floating] if len(tensors) > floating else None
        return tensors[:3], tensors[3 : min(floating, 6)], tensors[6:floating], key_mask


def _not_differentiable(*tensors: Tensor) -> Tensor:
    raise AssertionError("an adjoint without a graph has no second derivative")


@native.after_loading
def _register() -> None:
    """Shapes and gradients for torch.compile, torch.export and opcheck."""

    @torch.library.register_fake("headwise::sparse_attention")
    def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        b, h, m, _ = q.shape
        top = q.new_empty(b, h, m, dtype=torch.promote_types(q.dtype, torch.float32))
        return top.new_empty(b, m, h, v.shape[-1]).transpose(1, 2), top, torch.empty_like(top)

    @torch.library.register_fake("headwise::sparse_attention_backward")
    def _(
        pull: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        slot_keys: Tensor | None,
        slot_bias: Tensor | None,
        slot_values: Tensor | None,
        *others: Any,
    ) -> tuple[Tensor, ...]:
        b, h, _, width = q.shape
        if slot_keys is None or slot_bias is None or slot_values is None:
            slots = (q.new_empty(b, h, 0, width), q.new_empty(b, h, 0, 0), q.new_empty(b, h, 0, 0, v.shape[-1]))
        else:
            slots = tuple(x.new_empty(x.shape) for x in (slot_keys, slot_bias, slot_values))
        return *(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)), *slots

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, patterns, ctx.scale, ctx.causal = inputs
        ctx.patterns = list(patterns)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx: Any, pull: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        if pull is None:
            return (None,) * 10
        q, k, v, *optional, out, top, total = ctx.saved_tensors
        numbers = (ctx.patterns, ctx.scale, ctx.causal)
        gradients = torch.ops.headwise.sparse_attention_backward(pull, q, k, v, *optional, out, top, total, *numbers)
        slots = gradients[3:] if optional[1] is not None else (None, None, None)
        return *gradients[:3], None, *slots, None, None, None

    torch.library.register_autograd("headwise::sparse_attention", backward, setup_context=keep)

    @torch.library.register_fake("headwise::far_sums")
    def _(k: Tensor, v: Tensor, features: Tensor, key_mask: Tensor | None, patterns: list[int], *others: Any) -> Any:
        b, h, r, _ = features.shape
        n, fields = k.shape[-2], len(KeyPattern._fields)
        heads = [KeyPattern(*patterns[i : i + fields]) for i in range(0, len(patterns), fields)]
        blocks = max((-(-(n - head.leading) // head.block) for head in heads if head.features), default=0)
        like = features.to(torch.promote_types(features.dtype, torch.float32))
        return like.new_empty(b, h, blocks, r), like.new_empty(b, h, blocks, r, v.shape[-1])

    @torch.library.register_fake("headwise::far_sums_backward")
    def _(dmasses: Tensor, dmeans: Tensor, k: Tensor, v: Tensor, features: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (k, v, features))

    def keep_far(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, patterns, ctx.scale, ctx.causal = inputs
        ctx.patterns = list(patterns)
        ctx.save_for_backward(*tensors, *output)

    def far_backward(ctx: Any, dmasses: Tensor, dmeans: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.headwise.far_sums_backward(
            dmasses, dmeans, *ctx.saved_tensors, ctx.patterns, ctx.scale, ctx.causal
        )
        return *gradients, None, None, None, None

    torch.library.register_autograd("headwise::far_sums", far_backward, setup_context=keep_far)
