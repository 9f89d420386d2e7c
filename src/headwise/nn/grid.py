"""Attention over images, audio and video: flatten a grid to tokens, attend, and restore the grid of the queries.

    (b, c, *g) -> (b, prod g, c) -> attention -> (b, prod g, c') -> (b, c', *g)

Any number of spatial axes.  The keys may have another grid; the output has that of the queries.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.nn.attention_layer import Context
from headwise.nn.multihead import MultiHead
from headwise.operators.base import AttentionOperator
from headwise.shapes import are_tensors


@final
class GridAttention(nn.Module):
    """`layer(x)` or `layer(x, context)` with x (b, width, *grid) and context (b, context_width, *any other grid).

    Options, masks and a pair (keys, values) as context are those of `MultiHead`, which is held as `.attend`; `key_mask`
    is (b, *grid of the keys), and m and n count cells in row-major order.

    >>> import torch
    >>> GridAttention(8, 2)(torch.randn(1, 8, 6, 5), torch.randn(1, 8, 3, 3)).shape
    torch.Size([1, 8, 6, 5])
    """

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.attend = MultiHead(width, heads, **options)

    def operator(self, x: Tensor, context: Context | None = None, **masks: Any) -> AttentionOperator:
        """P (b, h, m, n) between the flattened grids."""
        return self.attend.operator(_tokens("x", x), _context_tokens(context), **_flat_masks(masks, x, context))

    def forward(self, x: Tensor, context: Context | None = None, **masks: Any) -> Tensor:
        tokens = self.attend(_tokens("x", x), _context_tokens(context), **_flat_masks(masks, x, context))
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


def _context_tokens(context: Context | None) -> Context | None:
    if isinstance(context, tuple):
        return _tokens("context (keys)", context[0]), _tokens("context (values)", context[1])
    return None if context is None else _tokens("context", context)


def _tokens(name: str, x: Tensor) -> Tensor:
    """(b, c, *grid) -> (b, n, c)"""
    are_tensors("GridAttention", **{name: x})
    if x.dim() < 3 or 0 in x.shape:
        raise ShapeError(f"GridAttention: {name} must be (b, c, *grid) without empty axes, but is {tuple(x.shape)}")
    return x.flatten(2).transpose(1, 2)


def _flat_masks(masks: dict[str, Any], x: Tensor, context: Context | None) -> dict[str, Any]:
    key_mask = masks.get("key_mask")
    if key_mask is None:
        return masks
    are_tensors("GridAttention", key_mask=key_mask)
    keys = x if context is None else context[0] if isinstance(context, tuple) else context
    expected = (keys.shape[0], *keys.shape[2:])
    if tuple(key_mask.shape) != expected:
        raise ShapeError(
            f"GridAttention: key_mask has shape {tuple(key_mask.shape)}, but the keys have (b, *grid) = {expected}"
        )
    return {**masks, "key_mask": key_mask.flatten(1)}
