"""softmax(q k^T) v replaced by P v, P from one builder or one choice, for all heads of an attention call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators.base import AttentionOperator
from headwise.operators.mask_support import ATTN_BIAS, PAIR_MASK, check_accepts
from headwise.operators.masks import Mask
from headwise.operators.softmax import softmax
from headwise.replacement.install.mixed_heads import along, padding_last
from headwise.replacement.kinds import Choice, HeadInputs
from headwise.shapes import shown

Builder = Callable[..., AttentionOperator]
"""`(q, k, **masks) -> operator`, an nn.Module if it has parameters."""


class OperatorHeads(nn.Module):
    """The operator of one attention call.

    where   name of the attention in error messages
    choice  a registered kind with its options, whose learned tensors keep their initial values; or a builder, which is
            given queries scaled such that q.k / sqrt(k) are the scores of the model

    >>> heads = OperatorHeads("layer", Choice("window", {"width": 3}))
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> heads(q, k, v, Mask(8, 8), scale=0.5)[0].shape
    torch.Size([1, 2, 8, 4])
    """

    replaces_attention = True

    def __init__(self, where: str, choice: Choice | Builder) -> None:
        super().__init__()
        self.where, self.choice = where, choice
        self.options = dict(choice.options) if isinstance(choice, Choice) else {}  # torch.compile knows dicts
        self.from_first_key = not isinstance(choice, Choice) or choice.definition.from_first_key

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        scale: float,
        dropout: float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """q (b, h, m, k), k (b, h_kv, n, k), v (b, h_kv, n, d) -> (b, h, m, d) and, if needed, P (b, h, m, n).

        `dropout` drops entries of P, which is formed for it.  Padding before the first real key is moved to the end
        where positions count from the first key.
        """
        b, h, m, n = *q.shape[:2], mask.m, mask.n
        k, v = (repeat_heads(x, q, self.where) for x in (k, v))
        if mask.key_mask is not None:
            mask = replace(mask, key_mask=mask.key_mask.expand(b, 1, n))
        inputs, back = HeadInputs(q, k, mask, scale), None
        padding = self._padding_before(mask)
        if padding is not None and m == n:
            inputs, v, back = padding_last(inputs, v, padding)
        elif padding is not None:
            inputs = replace(inputs, padding_before=padding)
        operator = self.operator(inputs)
        weights = None
        if dropout or need_weights:
            weights = F.dropout(operator.dense(q).expand(b, h, m, n), dropout)
        out = weights.to(v.dtype) @ v if weights is not None and dropout else operator(v)
        out = out.expand(b, h, m, -1)  # P and v may both be one for all heads
        if back is None:
            return out, weights
        if weights is not None:
            weights = along(along(weights, back).mT, back).mT
        return along(out, back), weights

    def operator(self, inputs: HeadInputs) -> AttentionOperator:
        """P, or UnsupportedError that names the operator, the mask and what to use instead."""
        if not isinstance(self.choice, Choice):
            masks = inputs.mask.arguments()
            check_accepts(self.where, self.choice, masks)
            try:
                built = self.choice(inputs.q * (inputs.scale * math.sqrt(inputs.q.shape[-1])), inputs.k, **masks)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.where}: {error}") from error
            if not isinstance(built, AttentionOperator):
                raise InputError(f"{self.where}: {self} must return an AttentionOperator, but returned {shown(built)}")
            return built
        if self.choice.kind == "softmax":
            return softmax(inputs.q, inputs.k, scale=inputs.scale, **inputs.mask.arguments())
        for kind in (PAIR_MASK, ATTN_BIAS):
            if getattr(inputs.mask, kind.value) is not None:
                raise UnsupportedError(
                    f"{self.where}: {self.choice} does not support {kind.value} (m = {inputs.m}, n = {inputs.n}), a "
                    "mask that is neither padding nor causal (or not known to be, in a program that is traced: pass a "
                    "mask (b, n), or is_causal=True); use softmax here"
                )
        h, (n, width) = inputs.q.shape[1], inputs.k.shape[-2:]
        kind = self.choice.definition
        initial = kind.initial(self.options, n, width)
        tensors = {name: x.to(inputs.q).expand(h, *x.shape) for name, x in initial.items()}
        try:
            self.choice.check_inputs(inputs)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.where}: {error}") from error
        return kind.build(inputs, self.options, tensors)

    def _padding_before(self, mask: Mask) -> Tensor | None:
        """(b, 1), number of padding keys before the first real one; None if there are none or it does not matter."""
        if not self.from_first_key or mask.key_mask is None or mask.pair_mask is not None or mask.attn_bias is not None:
            return None
        padding = mask.key_mask[:, 0].int().argmax(-1, keepdim=True)
        return padding if torch.compiler.is_compiling() or bool(padding.any()) else None

    def __str__(self) -> str:
        if isinstance(self.choice, Choice):
            return str(self.choice)
        return builder_name(self.choice)

    def extra_repr(self) -> str:
        return "" if isinstance(self.choice, nn.Module) else str(self)


def builder_name(build: Any) -> str:
    """`window(width=65)` for partial(window, width=65)"""
    if isinstance(build, partial):
        options = [*map(str, build.args), *(f"{name}={x}" for name, x in build.keywords.items())]
        return f"{builder_name(build.func)}({', '.join(options)})"
    return type(build).__name__ if isinstance(build, nn.Module) else getattr(build, "__name__", type(build).__name__)
