"""x <- x + attention(norm(x)); x <- x + feed_forward(norm(x)), `depth` times: a small, plain stack for any operator.

Vaswani et al. 2017 normalise after the sum (`pre=False`), Xiong et al. 2020 before it (the default, which trains
without warm-up).  Reversible, the two sums run on two streams and no activation is stored (see `reversible`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.nn.attention_layer import Builder
from headwise.nn.multihead import MultiHead
from headwise.nn.reversible import Reversible
from headwise.operators.softmax import softmax


class Residual(nn.Module):
    """x + part(norm(x)), or norm(x + part(x))."""

    def __init__(self, width: int, part: nn.Module, dropout: float, *, pre: bool) -> None:
        super().__init__()
        self.norm, self.part, self.dropout, self.pre = nn.LayerNorm(width), part, nn.Dropout(dropout), pre

    def forward(self, x: Tensor, **options: object) -> Tensor:
        if self.pre:
            return x + self.dropout(self.part(self.norm(x), **options))
        return self.norm(x + self.dropout(self.part(x, **options)))


class Normed(nn.Module):
    """part(norm(x)): what a reversible stream adds."""

    def __init__(self, width: int, part: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.part, self.dropout = nn.LayerNorm(width), part, nn.Dropout(dropout)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.dropout(self.part(self.norm(x), **options))


@final
class Encoder(nn.Module):
    """(*batch, n, width) -> (*batch, n, width) through `depth` layers of attention and feed-forward.

    `build`       the operator of every layer, or one for each; an nn.Module given once is shared by all layers
    `layer`       makes another mixing layer in place of MultiHead: `lambda: Recurrent(width)`
    `hidden`      width of the feed-forward part, 4 width by default
    `reversible`  stores no activations; the output is the mean of the two streams

    >>> import torch
    >>> from functools import partial
    >>> from headwise.operators import window
    >>> Encoder(16, 2, depth=2, build=partial(window, width=5))(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        *,
        build: Builder | Sequence[Builder] = softmax,
        layer: Callable[[], nn.Module] | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        pre: bool = True,
        reversible: bool = False,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise InputError(f"Encoder: depth must be at least 1, but is {depth}")
        builds = [build] * depth if callable(build) else list(build)
        if len(builds) != depth:
            raise InputError(f"Encoder: build has {len(builds)} operators for a depth of {depth}; give one for each")
        if reversible and not pre:
            raise UnsupportedError(
                "Encoder: a norm after the sum cannot be undone from its output; use pre=True for a reversible stack"
            )
        mixers = [MultiHead(width, heads, build=one) if layer is None else layer() for one in builds]
        hidden = 4 * width if hidden is None else hidden
        forwards = [_feed_forward(width, hidden) for _ in range(depth)]
        self.reversible: Reversible | None = None
        self.layers: nn.ModuleList | None = None
        if reversible:
            pairs = [
                (Normed(width, a, dropout), Normed(width, b, dropout)) for a, b in zip(mixers, forwards, strict=True)
            ]
            self.reversible = Reversible(pairs)
        else:
            parts = [part for pair in zip(mixers, forwards, strict=True) for part in pair]
            self.layers = nn.ModuleList(Residual(width, part, dropout, pre=pre) for part in parts)
        self.norm = nn.LayerNorm(width) if pre else nn.Identity()

    def forward(self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """`key_mask` (*batch, n) is True at real positions."""
        masks = {"causal": causal} if causal else {}
        masks = masks if key_mask is None else {**masks, "key_mask": key_mask}
        if self.reversible is not None:
            one, two = self.reversible(x, x, **masks)
            return self.norm((one + two) / 2)
        assert self.layers is not None
        for i, layer in enumerate(self.layers):
            x = layer(x) if i % 2 else layer(x, **masks)
        return self.norm(x)


def _feed_forward(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
