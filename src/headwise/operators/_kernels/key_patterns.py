"""softmax(s q k^T) v where the pattern of a head says which keys a query attends to; heads may differ, and are one call.

    KeyPattern()                                            all keys
    KeyPattern(32, 32, leading=1)                           32 keys before and after the query, and the first key
    KeyPattern(0, 0, block=64, every=64, last=1)            the query's own block of 64, and the last key of every other one
    KeyPattern(64, 64, stride=64)                           64 keys before and after, and every 64th
    KeyPattern(32, 32, block=32, slots=4)                   its block, those beside it, and 4 keys and values of the block

The compiled kernel computes all of them, and their gradients.  Second derivatives go through `plain`, the same function
in torch's operations, which the caller has for machines without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from headwise.operators._kernels import autograd_functions, native

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

UNBOUNDED = 1 << 40
"""More keys than any sequence has."""

Slots = tuple[Tensor, Tensor, Tensor]
"""Keys (b, h, r, k), biases (b, h, blocks, r) and values (b, h, blocks, r, d) beside those of the sequence."""


class KeyPattern(NamedTuple):
    """The keys of the query at position p (the last query is at the last key); in a causal call, those up to p.

    left, right   keys p - left .. p + right; with `block`, from `left` before the block of p to `right` after it
    leading       the first keys, for all queries; as queries they attend to all keys; blocks begin after them
    every, last   the last `last` keys of every whole block of `every` keys but the query's own
    stride        all keys at a multiple of `stride` from p
    slots         the number of keys and values of the query's block that are given beside those of the sequence
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    leading: int = 0
    block: int = 0
    every: int = 0
    last: int = 0
    stride: int = 0
    slots: int = 0


def usable(*tensors: Tensor | None) -> bool:
    """Whether `attend` may be called with these tensors now."""
    return native.usable(*tensors, dtypes=DTYPES)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[KeyPattern],
    *,
    scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    slots: Slots | None = None,
    plain: Callable[..., Tensor],
) -> Tensor:
    """P v (b, h, m, d), laid out (b, m, h, d), for q (b, h, m, k), k (b, g, n, k) and v (b, g, n, d), g heads shared by h.

    key_mask  boolean (b, h, n), True = attend; what masked keys hold is never read
    plain     (q, k, v, *slots, key_mask) -> the same, differentiable any number of times
    """
    call = PatternAttention(tuple(patterns), scale, causal, slots is not None, plain)
    tensors = (q, k, v, *(slots or ()), *(() if key_mask is None else (key_mask,)))
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
    call = PatternAttention(tuple(patterns), scale, causal, False, _not_differentiable)
    mask = () if key_mask is None else (key_mask,)
    zeros = u.new_zeros(()).expand(*k.shape[:-1], u.shape[-1])
    _, top, total = call.forward(q, k, zeros[..., :1], *mask)
    return call.pull(u, q, k, zeros, *mask, torch.zeros_like(u), top, total)[2]


@final
@dataclass(frozen=True, eq=False)
class PatternAttention:
    """A kernel of `autograd_functions`: tensors are q, k, v, three of slots if there are any, and the mask if there is."""

    patterns: tuple[KeyPattern, ...]
    scale: float
    causal: bool
    slots: bool
    plain: Callable[..., Tensor]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.headwise.sparse_attention(*self._inputs(tensors), *self._numbers)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        *inputs, out, top, total = tensors
        gradients = torch.ops.headwise.sparse_attention_backward(
            pull, *self._inputs(inputs), out, top, total, *self._numbers
        )
        return gradients if self.slots else gradients[:3]

    @property
    def _numbers(self) -> tuple[list[int], float, bool]:
        return [x for pattern in self.patterns for x in pattern], self.scale, self.causal

    def _inputs(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """q, k, v, key_mask, slot_keys, slot_bias, slot_values"""
        floating = 6 if self.slots else 3
        key_mask = tensors[floating] if len(tensors) > floating else None
        return [*tensors[:3], key_mask, *(tensors[3:6] if self.slots else (None, None, None))]


def _not_differentiable(*tensors: Tensor) -> Tensor:
    raise AssertionError("an adjoint without a graph has no second derivative")


@native.after_loading
def _register() -> None:
    """Shapes and gradients for torch.compile, torch.export and opcheck."""

    @torch.library.register_fake("headwise::sparse_attention")
    def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        b, h, m, _ = q.shape
        compute = torch.promote_types(q.dtype, torch.float32)
        sums = (q.new_empty(b, h, m, dtype=compute) for _ in range(2))
        return v.new_empty(b, m, h, v.shape[-1]).transpose(1, 2), *sums

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
        b, h, m, width = q.shape
        dq = q.new_empty(b, m, h, width).transpose(1, 2)
        if slot_keys is None or slot_bias is None or slot_values is None:
            slots = (q.new_empty(b, h, 0, width), q.new_empty(b, h, 0, 0), q.new_empty(b, h, 0, 0, v.shape[-1]))
        else:
            slots = tuple(q.new_empty(x.shape) for x in (slot_keys, slot_bias, slot_values))
        return dq, q.new_empty(k.shape), q.new_empty(v.shape), *slots

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
