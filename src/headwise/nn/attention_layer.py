"""Base class of attention layers: projections of keys, values and output; subclasses define the queries.

    out = concat_h( P_h V_h ) W_o + b_o,   P_h = build(Q_h, K_h),   K_h = C W_K,h,   V_h = C W_V,h

C is the context.  Heads may have different widths; the scores of a head are q.k / sqrt(k) with its own k.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn.ragged_heads import HeadLayout, head_slices, head_widths
from headwise.operators.base import AttentionOperator
from headwise.operators.mask_support import check_accepts
from headwise.operators.masks import Mask
from headwise.operators.softmax import softmax
from headwise.shapes import (
    are_tensors,
    autocasting,
    broadcast_batch,
    broadcasts_to,
    no_empty_axis,
    same_axis,
    same_kind,
    shown,
    truth_values,
    whole_numbers,
    whole_tuple,
)

Builder = Callable[..., AttentionOperator]
"""`(q, k, **masks) -> operator` with q (*batch, h, m, k), k (*batch, h, n, k); an nn.Module if it has parameters."""

Context = Tensor | tuple[Tensor, Tensor]
"""The tensor that keys and values are projected from, or a pair (for keys, for values)."""


class AttentionLayer(nn.Module, ABC):
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        build: Builder = softmax,
        key_width: int | Sequence[int] | None = None,
        value_width: int | Sequence[int] | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        out_width: int | None = None,
        context_width: int | tuple[int, int] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not callable(build):
            raise InputError(f"{name}: build must be the builder of an operator, but is {shown(build)}")
        self.width, self.heads, self.build = width, heads, build
        self.out_width = width if out_width is None else out_width
        context_width = width if context_width is None else context_width
        self.context_widths = context_width if isinstance(context_width, tuple) else (context_width, context_width)
        whole_numbers(name, width=width, out_width=self.out_width)
        if len(whole_tuple(name, "context_width", self.context_widths)) != 2:
            raise ShapeError(f"{name}: context_width must be one width or (keys, values), but is {context_width}")
        truth_values(name, bias=bias, out_bias=bias if out_bias is None else out_bias)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise InputError(f"{name}: dropout must be a number from 0 to 1, but is {shown(dropout)}")
        self.dropout = float(dropout)
        self.key_heads = HeadLayout(head_widths(name, "k", heads, key_width, width))
        self.value_heads = HeadLayout(head_widths(name, "d", heads, value_width, width))
        if self.key_heads.ragged:
            _allow_ragged(name, build)
        self.key = _linear(self.context_widths[0], self.key_heads.total, bias)
        self.value = _linear(self.context_widths[1], self.value_heads.total, bias)
        self.out = _linear(self.value_heads.total, self.out_width, bias if out_bias is None else out_bias)
        self._make_queries(bias)

    def _make_queries(self, bias: bool) -> None:
        """Add the parameters of the queries; the last step of `__init__`."""

    @abstractmethod
    def project_queries(self, x: Tensor) -> Tensor:
        """The queries (*batch, m, k_1 + ... + k_h)."""

    @abstractmethod
    def _query_parameters(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Every parameter that makes queries, with the axis along which its heads are concatenated."""

    @property
    def key_widths(self) -> tuple[int, ...]:
        """k of each head."""
        return self.key_heads.sizes

    @property
    def value_widths(self) -> tuple[int, ...]:
        """d of each head."""
        return self.value_heads.sizes

    def _operator(self, q: Tensor, context: Tensor, **masks: Any) -> AttentionOperator:
        q, k = self.key_heads.split(q), self.key_heads.split(self.key(context))
        if self.key_heads.ragged:
            # the builder divides by the root of the padded width, but each head needs the root of its own
            widest = max(self.key_widths)
            scale = [math.sqrt(widest / width) for width in self.key_widths]
            q = q * torch.tensor(scale, dtype=q.dtype, device=q.device)[:, None, None]
        batch = broadcast_batch(type(self).__name__, queries=q.shape[:-3], keys=k.shape[:-3])
        masks = self._checked_masks((*batch, self.heads, q.shape[-2], k.shape[-2]), **masks)
        check_accepts(type(self).__name__, self.build, masks)
        operator = self.build(q, k, **masks)
        if not isinstance(operator, AttentionOperator):
            raise InputError(f"{type(self).__name__}: build must return an operator, but returns {shown(operator)}")
        return operator

    def output(self, operator: AttentionOperator, context: Tensor, weights: Tensor | None = None) -> Tensor:
        """concat_h(P_h V_h) W_o + b_o with values projected from `context`: the second half of `forward`.

        `weights` (*batch, h, m, n) stand in for P; in training with dropout they are `self.weights(operator)`.
        """
        values = self.value_heads.split(self.value(context))
        if weights is None and self.training and self.dropout:
            weights = self.weights(operator)
        mixed = operator(values) if weights is None else weights.to(values.dtype) @ values
        return self.out(self.value_heads.merge(mixed))

    def weights(self, operator: AttentionOperator) -> Tensor:
        """P as a tensor (*batch, h, m, n); in training, entries are dropped and the others divided by 1 - dropout."""
        return F.dropout(operator.dense(), self.dropout, self.training)

    def _checked_masks(self, shape: tuple[int, ...], key_mask: Tensor | None, **masks: Any) -> dict[str, Any]:
        """The masks that are given, as keyword arguments of a builder whose P has this `shape` (*batch, h, m, n)."""
        name, (*batch, _, m, n) = type(self).__name__, shape
        for kind in ("pair_mask", "attn_bias"):
            x = masks[kind]
            if x is not None:
                are_tensors(name, **{kind: x})
            if x is not None and x.dim() not in (2, len(shape)):
                raise ShapeError(
                    f"{name}: {kind} has shape {tuple(x.shape)}; it must be (m, n) = {(m, n)} or "
                    f"(*batch, h, m, n) = {shape}, where any axis may be 1: "
                    "one mask per sequence is (b, 1, m, n), one per head is (1, h, m, n)"
                )
        if key_mask is not None:  # it has no axis for heads
            are_tensors(name, key_mask=key_mask)
            broadcasts_to(name, "key_mask", key_mask, (*batch, n))
            key_mask = key_mask.reshape(*(1,) * (len(batch) + 1 - key_mask.dim()), *key_mask.shape).unsqueeze(-2)
        return Mask.checked(name, m, n, key_mask=key_mask, batch=shape[:-2], **masks).arguments()

    def _check_input(self, name: str, x: Tensor, width: int, projection: nn.Linear) -> None:
        owner = type(self).__name__
        no_empty_axis(owner, **{name: x})
        same_axis(owner, "width", layer=width, **{name: x.shape[-1]})
        if not autocasting(x.device):
            same_kind(owner, **{name: x, "weight": projection.weight})

    def resize_(self, *, key_widths: Sequence[int] | None = None, value_widths: Sequence[int] | None = None) -> None:
        """Change the widths of heads in place; every Parameter stays the same object, so optimizers keep it.

        The leading dimensions of a head are kept, new ones are zero, and queries are multiplied by sqrt(new k / old k),
        so that the scores of the kept dimensions do not change: widening does not change the function.
        The state of an optimizer keeps its old shape and has to be resized too.
        """
        name = type(self).__name__
        if key_widths is not None and tuple(key_widths) != self.key_widths:
            old, new = self.key_widths, head_widths(name, "k", self.heads, key_widths, self.width)
            if len(set(new)) > 1:
                _allow_ragged(name, self.build)
            scale = [math.sqrt(after / before) for before, after in zip(old, new, strict=True)]
            for parameter, axis in self._query_parameters():
                _resize_heads_(parameter, axis, old, new, scale)
            for parameter in self.key.parameters():
                _resize_heads_(parameter, 0, old, new)
            self.key_heads.resize_(new)
            self.key.out_features = sum(new)
        if value_widths is not None and tuple(value_widths) != self.value_widths:
            old, new = self.value_widths, head_widths(name, "d", self.heads, value_widths, self.width)
            for parameter in self.value.parameters():
                _resize_heads_(parameter, 0, old, new)
            _resize_heads_(self.out.weight, 1, old, new)
            self.value_heads.resize_(new)
            self.value.out_features = self.out.in_features = sum(new)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # resize first: a layer built with its original widths can load a checkpoint in which it had grown
        saved = {part: state_dict.get(f"{prefix}{part}_heads.widths") for part in ("key", "value")}
        self.resize_(**{f"{part}_widths": widths.tolist() for part, widths in saved.items() if widths is not None})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        build = "" if isinstance(self.build, nn.Module) else f", build={getattr(self.build, '__name__', self.build)}"
        return f"width={self.width}, heads={self.heads}{build}"


def _linear(rows: int, columns: int, bias: bool) -> nn.Linear:
    layer = nn.Linear(rows, columns, bias)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _allow_ragged(name: str, build: Builder) -> None:
    if build is not softmax and not getattr(build, "by_dot_product", False):
        raise UnsupportedError(
            f"{name}: heads of different key widths are padded with zeros, which is right only if P depends on "
            f"q.k / sqrt(k) alone, and {getattr(build, '__name__', type(build).__name__)} does not declare that; "
            "give every head the same key_width, or set by_dot_product = True on the builder"
        )


@torch.no_grad()
def _resize_heads_(
    parameter: Tensor, axis: int, old: Sequence[int], new: Sequence[int], scale: Sequence[float] | None = None
) -> None:
    before = parameter.data.movedim(axis, 0)
    after = before.new_zeros(sum(new), *before.shape[1:])
    for i, (source, target) in enumerate(zip(head_slices(old), head_slices(new), strict=True)):
        size = min(old[i], new[i])
        after[target][:size] = before[source][:size] * (1.0 if scale is None else scale[i])
    parameter.grad = None  # it has the old shape
    parameter.data = after.movedim(0, axis).contiguous()
