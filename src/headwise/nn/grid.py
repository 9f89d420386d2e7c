"""Attention over images, sound and video: unfold a grid to tokens, attend, fold back to the queries' grid.

    (b, c, *g) -> (b, prod g, c) -> attention -> (b, prod g, c') -> (b, c', *g)

Any number of spatial axes.  The keys may lie on another grid; the output has the queries' spatial shape.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.nn.attention_layer import Context
from headwise.nn.multihead import MultiHead
from headwise.operators.base import AttentionOperator


@final
class GridAttention(nn.Module):
    """`layer(x)` or `layer(x, context)` with x (b, width, *grid) and context (b, context_width, *any other grid).

    A pair as context holds keys and values, as in `MultiHead`.
    The options are those of `MultiHead`, which is held as `.attend`; so are the masks, `key_mask` being
    (b, *grid of the keys) and m, n counting positions with the last axis fastest.

    >>> import torch
    >>> GridAttention(8, 2)(torch.randn(1, 8, 6, 5), torch.randn(1, 8, 3, 3)).shape
    torch.Size([1, 8, 6, 5])
    """

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.attend = MultiHead(width, heads, **options)

    def operator(self, x: Tensor, context: Context | None = None, **masks: Any) -> AttentionOperator:
        """P between the unfolded grids, (b, h, m, n)."""
        return self.attend.operator(_unfold("x", x), _unfolded(context), **_flattened(masks, x, context))

    def forward(self, x: Tensor, context: Context | None = None, **masks: Any) -> Tensor:
        tokens = self.attend(_unfold("x", x), _unfolded(context), **_flattened(masks, x, context))
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


def _unfolded(context: Context | None) -> Context | None:
    if isinstance(context, tuple):
        return _unfold("context (keys)", context[0]), _unfold("context (values)", context[1])
    return None if context is None else _unfold("context", context)


def _unfold(name: str, x: Tensor) -> Tensor:
    """(b, c, *grid) -> (b, n, c)"""
    if x.dim() < 3 or 0 in x.shape:
        raise ShapeError(f"GridAttention: {name} must be (b, c, *grid), no axis empty, but is {tuple(x.shape)}")
    return x.flatten(2).transpose(1, 2)


def _flattened(masks: dict[str, Any], x: Tensor, context: Context | None) -> dict[str, Any]:
    key_mask = masks.get("key_mask")
    if key_mask is None:
        return masks
    keys = x if context is None else context[0] if isinstance(context, tuple) else context
    expected = (keys.shape[0], *keys.shape[2:])
    if tuple(key_mask.shape) != expected:
        raise ShapeError(
            f"GridAttention: key_mask has shape {tuple(key_mask.shape)}, but the keys' (b, *grid) is {expected}"
        )
    return {**masks, "key_mask": key_mask.flatten(1)}
