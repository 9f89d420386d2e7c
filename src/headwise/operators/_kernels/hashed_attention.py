"""softmax over the union of each position itself and, round by round, the keys that a sort placed near it: by the
compiled kernel where it is usable, otherwise by torch's calls.

Round r orders queries and keys; chunk t of the ordered queries meets chunks t - 1 and t of the ordered keys.  A pair
belongs to the first round that has it, so nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from headwise.operators._kernels import autograd_functions, limits, native
from headwise.operators._kernels.hash_rounds import Rounds, round_tensors
from headwise.operators._kernels.key_patterns import DTYPES
from headwise.shapes import filled


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernel may be called with these tensors now."""
    return native.usable(*tensors, dtypes=(*DTYPES, torch.bool))


def hash_order(turned: Tensor, key_mask: Tensor | None) -> Tensor:
    """Positions (b, h, rounds, n) in the order of their hashes argmax [y; -y], ties by position, masked ones last.

    turned  (b, h, n, hashes, rounds, half), the y of each hash; of two hashes the first one counts more
    """
    if native.usable(turned, key_mask):
        return torch.ops.headwise.hash_order(turned, key_mask)
    return torch.sort(hash_numbers(turned, key_mask), dim=-1, stable=True).indices


def hash_numbers(turned: Tensor, key_mask: Tensor | None) -> Tensor:
    """The numbers (b, h, rounds, n) that are sorted."""
    half = turned.shape[-1]
    # argmax [y; -y] is the argmax of |y|, in the second half where y is negative
    best = turned.abs().argmax(-1, keepdim=True)
    negative = turned.gather(-1, best).squeeze(-1) < 0
    first, *second = (best.squeeze(-1) + half * negative).int().unbind(-2)
    bucket = (first * (2 * half) + second[0] if second else first).mT
    if key_mask is not None:
        bucket = bucket.masked_fill(~key_mask.unsqueeze(-2), (2 * half) ** 2)
    return bucket


@final
@dataclass(frozen=True)
class HashedAttention:
    """P v for q, k (b, h, n, c), v (b, h, n, d), two orders (b, h, rounds, n), and key_mask (b, h, n) if any.

    self_score  score of a position with itself; None: the scaled product, as for any other key
    """

    chunk: int
    scale: float
    causal: bool
    self_score: float | None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """P v, and the maximum and the sum of every row."""
        q, k, v, order_q, order_k, mask = _with_mask(tensors)
        out, *sums = torch.ops.headwise.hashed_attention(q, k, v, mask, order_q, order_k, *self._numbers)
        return autograd_functions.rounded(out, v, *sums)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, out, (top, total) = autograd_functions.unrounded(tensors, tensors[2], 2)
        q, k, v, order_q, order_k, mask = _with_mask(inputs)
        backward = torch.ops.headwise.hashed_attention_backward
        return backward(pull, q, k, v, mask, order_q, order_k, out, top, total, *self._numbers)

    def plain(self, *tensors: Tensor) -> Tensor:
        # in at least single precision: half precision has no score as low as that of a masked key
        compute = torch.promote_types(tensors[2].dtype, torch.float32)
        wide = [x.to(compute) if x.is_floating_point() else x for x in tensors]
        return self.by_torch(*wide, run=lambda rounds, *x: rounds.plain(*x)).to(tensors[2].dtype)

    def by_torch(self, *tensors: Tensor, run: Callable[..., Tensor] = autograd_functions.run) -> Tensor:
        """The same, by torch's calls."""
        q, k, v, order_q, order_k, mask = _with_mask([x.flatten(0, 1) for x in tensors])
        others = round_tensors(order_q, order_k, mask, self.chunk, self.causal)
        own, d, width = self._own_scores(q, k, mask), v.shape[-1], max(q.shape[-1], v.shape[-1])
        if mask is not None:
            v = v.masked_fill(~mask.unsqueeze(-1), 0)
        q, k, v = (filled(x, (0, width - x.shape[-1])) for x in (q, k, v))  # the fused kernel takes one width only
        out = run(Rounds(self.chunk, self.scale), q, k, v, own, *others)[..., :d]
        return _zero_empty_rows(out, mask, others).unflatten(0, tensors[0].shape[:2])

    def adjoint(self, *tensors: Tensor) -> Tensor:
        """P^T u for u in the place of v, from differentiable operations."""
        q, k, u, order_q, order_k, mask = _with_mask([x.flatten(0, 1) for x in tensors])
        others = round_tensors(order_q, order_k, mask, self.chunk, self.causal)
        own = self._own_scores(q, k, mask)
        u = _zero_empty_rows(u, mask, others)
        out = Rounds(self.chunk, self.scale).plain_adjoint(u, q, k, own, *others)
        out = out if mask is None else out.masked_fill(~mask.unsqueeze(-1), 0)
        return out.unflatten(0, tensors[0].shape[:2])

    @property
    def _numbers(self) -> tuple[int, float, bool, float | None]:
        return self.chunk, self.scale, self.causal, self.self_score

    def _own_scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Scores (b, n) of positions with themselves."""
        fixed = self.self_score
        own = self.scale * (q * k).sum(-1) if fixed is None else q.new_full(q.shape[:-1], fixed)
        return own if mask is None else own.masked_fill(~mask, limits.HIDDEN)


def _with_mask(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, order_q, order_k, *mask = tensors
    return q, k, v, order_q, order_k, mask[0] if mask else None


def _zero_empty_rows(x: Tensor, mask: Tensor | None, others: Sequence[Tensor]) -> Tensor:
    """Rows without keys set to zero: padding that met nothing but padding."""
    if mask is None:
        return x
    _, _, place_q, _, masks = others
    met = masks.any(-1).flatten(-2).gather(-1, place_q).any(-2)
    return x.masked_fill(~(met | mask).unsqueeze(-1), 0)


@native.after_loading
def _register() -> None:
    """Shapes and gradients for torch.compile, torch.export and opcheck."""

    @torch.library.register_fake("headwise::hash_order")
    def _(turned: Tensor, key_mask: Tensor | None) -> Tensor:
        b, h, n, _, rounds, _ = turned.shape
        return turned.new_empty(b, h, rounds, n, dtype=torch.int64)

    @torch.library.register_fake("headwise::hashed_attention")
    def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        b, h, n, _ = q.shape
        top = q.new_empty(b, h, n, dtype=torch.promote_types(q.dtype, torch.float32))
        return top.new_empty(b, n, h, v.shape[-1]).transpose(1, 2), top, torch.empty_like(top)

    @torch.library.register_fake("headwise::hashed_attention_backward")
    def _(pull: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, chunk, scale, causal, self_score = inputs
        ctx.numbers = chunk, scale, causal, self_score
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx: Any, pull: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        if pull is None:
            return (None,) * 10
        gradients = torch.ops.headwise.hashed_attention_backward(pull, *ctx.saved_tensors, *ctx.numbers)
        return *gradients, *(None,) * 7

    torch.library.register_autograd("headwise::hashed_attention", backward, setup_context=keep)
