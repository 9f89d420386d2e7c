"""x <- x + attention(norm(x)); x <- x + feed_forward(norm(x)), `depth` times: a transformer encoder for any operator.

Vaswani et al. 2017 normalise after the sum (`norm_first=False`), Xiong et al. 2020 before it (the default, which trains
without warm-up).  A reversible encoder adds to two streams alternately and stores no activations (see `reversible`).
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
from headwise.shapes import no_empty_axis, same_axis, same_kind, shown, truth_values, whole_numbers


class Residual(nn.Module):
    """x + part(norm(x)), or norm(x + part(x)) if not `norm_first`; without `skip`, part(norm(x)) alone."""

    def __init__(
        self, width: int, part: nn.Module, dropout: float, *, norm_first: bool = True, skip: bool = True
    ) -> None:
        super().__init__()
        self.norm, self.part, self.dropout = nn.LayerNorm(width), part, nn.Dropout(dropout)
        self.norm_first, self.skip = norm_first, skip

    def forward(self, x: Tensor, **masks: object) -> Tensor:
        if not self.norm_first:
            return self.norm(x + self.dropout(self.part(x, **masks)))
        y = self.dropout(self.part(self.norm(x), **masks))
        return x + y if self.skip else y


MOST_LAYERS = 10_000


@final
class Encoder(nn.Module):
    """(*batch, n, width) -> (*batch, n, width) through `depth` layers of attention and feed-forward.

    `build`       the operator of every layer, or one for each; an nn.Module given once is shared by all layers
    `layer`       makes another layer in place of MultiHead: `lambda: Recurrent(width)`
    `hidden`      width of the feed-forward part, by default 4 width
    `norm_first`  normalise the input of each part (as in nn.TransformerEncoderLayer), not the sum
    `reversible`  store no activations; the output is the mean of the two streams

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
        norm_first: bool = True,
        reversible: bool = False,
    ) -> None:
        super().__init__()
        self.width = width
        whole_numbers("Encoder", least=0, most=MOST_LAYERS, depth=depth)
        if depth < 1:
            raise InputError(f"Encoder: depth must be at least 1, but is {depth}")
        whole_numbers("Encoder", width=width, hidden=1 if hidden is None else hidden)
        truth_values("Encoder", norm_first=norm_first, reversible=reversible)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise InputError(f"Encoder: dropout must be a number from 0 up to 1, but is {shown(dropout)}")
        if not callable(build) and not isinstance(build, Sequence):
            raise InputError(f"Encoder: build must be a builder or one for each layer, but is {shown(build)}")
        if layer is not None and (not callable(layer) or isinstance(layer, nn.Module)):
            raise InputError(f"Encoder: layer must make a layer when it is called, but is {shown(layer)}")
        builders = [build] * depth if callable(build) else list(build)
        if len(builders) != depth:
            raise InputError(f"Encoder: build has {len(builders)} operators for a depth of {depth}; give one per layer")
        if reversible and not norm_first:
            raise UnsupportedError(
                "Encoder: a norm after the sum cannot be inverted; use norm_first=True for a reversible encoder"
            )
        mixers = [MultiHead(width, heads, build=one) if layer is None else layer() for one in builders]
        if not all(isinstance(mixer, nn.Module) for mixer in mixers):
            raise InputError(f"Encoder: layer must return an nn.Module, but returns {shown(mixers[0])}")
        hidden = 4 * width if hidden is None else hidden
        forwards = [_feed_forward(width, hidden) for _ in range(depth)]
        self.reversible: Reversible | None = None
        self.layers: nn.ModuleList | None = None
        if reversible:
            branches = [[Residual(width, part, dropout, skip=False) for part in parts] for parts in (mixers, forwards)]
            self.reversible = Reversible(list(zip(*branches, strict=True)))
        else:
            parts = [part for pair in zip(mixers, forwards, strict=True) for part in pair]
            self.layers = nn.ModuleList(Residual(width, part, dropout, norm_first=norm_first) for part in parts)
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()

    def forward(self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """`key_mask` (*batch, n), True = attend."""
        no_empty_axis("Encoder", x=x)
        same_axis("Encoder", "width", layer=self.width, x=x.shape[-1])
        same_kind("Encoder", x=x)
        truth_values("Encoder", causal=causal)
        # only masks that are given: another `layer` need not support them
        masks: dict[str, object] = {"causal": True} if causal else {}
        masks |= {} if key_mask is None else {"key_mask": key_mask}
        if self.reversible is not None:
            one, two = self.reversible(x, x, **masks)
            return self.norm((one + two) / 2)
        assert self.layers is not None
        for i, layer in enumerate(self.layers):
            x = layer(x) if i % 2 else layer(x, **masks)
        return self.norm(x)


def _feed_forward(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
