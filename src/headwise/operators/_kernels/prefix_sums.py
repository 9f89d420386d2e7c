"""Running means with a softmax's weights, in blocks of positions: the causal form of the double softmax.

    out_i = sum_c H_ic ( sum_(j <= i in the block) e_jc v_j + sum_(slots of earlier blocks) e_sc w_s ) / Z_ic

with e = exp(keys), H the softmax over features of the queries and Z_ic the sum of the same e.  Slots are what a block
leaves to later ones: its own keys and values (exact) or a projection of them.  Every block has its own shift, half way
up its running maximum, and states are summed in double precision, so that early rows do not underflow because of later
keys and late ones do not overflow.

The compiled kernel computes the exact form in blocks of its own, with states in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from headwise.errors import NonFiniteError
from headwise.operators._kernels import limits, native
from headwise.shapes import filled, read


@final
@dataclass(frozen=True, eq=False)
class Blocks:
    """Keys (*batch, t, b, k) and slots (*batch, t, c, k), times scale, and which are masked (None: none)."""

    keys: Tensor
    hidden: Tensor | None
    slots: Tensor
    empty: Tensor | None

    def running_maximum(self) -> tuple[Tensor, Tensor]:
        """Of each feature at the first and the last position of each block, (*batch, t, 1, k)."""
        keys = self.keys.detach()
        slots = keys if self.slots is self.keys else self.slots.detach()
        least = _present(keys, self.hidden, math.inf).amin((-3, -2), keepdim=True)
        if slots is not keys:
            least = torch.minimum(least, _present(slots, self.empty, math.inf).amin((-3, -2), keepdim=True))
        # before the first key any finite number will do: the least of all, or zero
        least = least.masked_fill(least == math.inf, 0)
        keys = keys if self.hidden is None else torch.where(self.hidden, least, keys)
        highest = keys.amax(-2, keepdim=True)
        if self.slots is self.keys:
            left = highest
        else:
            left = (slots if self.empty is None else torch.where(self.empty, least, slots)).amax(-2, keepdim=True)
        earlier = torch.cat([least, left.cummax(-3).values[..., :-1, :, :]], dim=-3)
        last = torch.maximum(torch.maximum(earlier, left), highest)
        return torch.maximum(earlier, keys[..., :1, :]), last

    def check(self, owner: str) -> None:
        """Raise NonFiniteError if keys rise too far.  Not checked while tracing or under vmap."""
        if torch.compiler.is_compiling():
            return
        first, last = self.running_maximum()
        try:
            rise, span = (last - first).amax().item(), (last.amax(-3) - first.amin(-3)).amax().item()
        except RuntimeError:  # vmap refuses .item()
            return
        if rise > (most := limits.MAX_RISE[self.keys.dtype]) or span > limits.MAX_RANGE:
            raise NonFiniteError(
                f"{owner}: a key feature times scale rises by {rise:.0f} within {self.keys.shape[-2]} positions and by "
                f"{span:.0f} in all, but running sums in {self.keys.dtype} hold {most:.0f} and "
                f"{limits.MAX_RANGE:.0f}; use a smaller scale"
            )

    def attend(self, features: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """features (*batch, t, b, k), v (*batch, t, b, d), w (*batch, t, c, d) -> (*batch, t, b, d)"""
        first, last = self.running_maximum()
        shift = (first + last) / 2
        scale = (shift - shift.amax(-3, keepdim=True)).double().exp()
        t, k, d = self.keys.shape[-3], self.keys.shape[-1], v.shape[-1]
        size = max(1, limits.CACHE_ENTRIES // max(1, v.shape[:-3].numel() * k * d))
        parts = (x if x is None else x.split(size, -3) for x in (self.keys, self.hidden, self.slots, self.empty))
        keys, hidden, slots, empty = (part or [None] * -(-t // size) for part in parts)
        others = (x.split(size, -3) for x in (features, v, w, shift, scale))
        sums = means = None
        out = []
        for x, away, y, gone, h, value, slot, up, by in zip(keys, hidden, slots, empty, *others, strict=True):
            weights = _exponentials(x, up, away)
            left = weights if self.slots is self.keys else _exponentials(y, up, gone)
            # what earlier blocks leave behind, relative to this block's shift
            before, sums = _before(left.sum(-2, keepdim=True) * by, sums)
            total = (before / by).to(v.dtype) + weights.cumsum(-2)
            before, means = _before((left.mT @ slot) * by.mT, means)
            nothing = total <= 0
            shares = (h / total.masked_fill(nothing, 1)).masked_fill(nothing, 0)
            out.append(shares @ (before / by.mT).to(v.dtype) + (shares @ weights.mT).tril() @ value)
        return torch.cat(out, dim=-3)


def rises_little(k: Tensor, scale: float) -> bool:
    """Whether keys are so small that no running maximum can rise too far; True where values cannot be read."""
    largest = read(k.detach().abs().amax())  # a tenth of the time of vector_norm(k, inf)
    return largest is None or 2 * scale * largest <= min(*limits.MAX_RISE.values(), limits.MAX_RANGE)


@final
@dataclass(frozen=True, eq=False)
class CompiledPrefixSoftmax:
    """The exact form for q (b, h, m, k), k (b, h, n, k), v (b, h, n, d) and, if any key is masked, a mask (b, h, n)."""

    scale: float
    plain: Callable[..., Tensor]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *mask = tensors
        return torch.ops.headwise.prefix_softmax(q, k, v, mask[0] if mask else None, self.scale)

    def pull(self, pull: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        (q, k, v, *mask), (shifts, sums) = tensors[:-3], tensors[-2:]
        given = mask[0] if mask else None
        return torch.ops.headwise.prefix_softmax_backward(pull, q, k, v, given, shifts, sums, self.scale)


@native.after_loading
def _register() -> None:
    """Shapes and gradients for torch.compile, torch.export and opcheck."""

    @torch.library.register_fake("headwise::prefix_softmax")
    def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        (b, h, m, width), blocks = q.shape, -(-k.shape[-2] // 32)  # BLOCK of prefix_softmax.cpp
        shifts = q.new_empty(b, h, blocks, width, dtype=torch.float32)
        return q.new_empty(b, m, h, v.shape[-1]).transpose(1, 2), shifts, torch.empty_like(shifts)

    @torch.library.register_fake("headwise::prefix_softmax_backward")
    def _(pull: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    def backward(ctx: Any, pull: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        return *torch.ops.headwise.prefix_softmax_backward(pull, *ctx.saved_tensors, ctx.scale), None, None

    torch.library.register_autograd("headwise::prefix_softmax", backward, setup_context=keep)


def blocked(x: Tensor, block: int) -> Tensor:
    """(*batch, n, c) -> (*batch, t, block, c), zeros at the end."""
    return filled(x, (0, 0, 0, -x.shape[-2] % block)).unflatten(-2, (-1, block))


def blocked_absence(key_mask: Tensor | None, n: int, block: int, device: torch.device) -> Tensor:
    """Which positions of `blocked` are masked or beyond the end; (*batch, t, block, 1)."""
    real = torch.arange(n + -n % block, device=device) < n
    if key_mask is not None:
        real = real & filled(key_mask, (0, -n % block))
    return ~real.unflatten(-1, (-1, block)).unsqueeze(-1)


def _present(x: Tensor, absent: Tensor | None, other: float) -> Tensor:
    return x if absent is None else x.masked_fill(absent, other)


def _exponentials(x: Tensor, shift: Tensor, absent: Tensor | None) -> Tensor:
    return _present(_present(x - shift, absent, 0).exp(), absent, 0)


def _before(x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums over earlier blocks (axis -3), beginning with what is carried, and what is carried on."""
    carried = torch.zeros_like(x[..., :1, :, :]) if carried is None else carried
    running = torch.cat([carried, x], dim=-3).cumsum(-3)
    return running[..., :-1, :, :], running[..., -1:, :, :]
