"""Multi-head attention over any operator.

    out = concat_h( P_h V_h ) W_o + b_o,   P_h = build(X W_Q,h, C W_K,h),   V_h = C W_V,h,   C = X or a context

Vaswani et al. 2017.  h d_i (2 d_hid + d_o) + h d_o d_out + d_out parameters with bias=False, out_bias=True; the count
does not depend on h when the heads share a fixed total width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor, nn

from headwise.nn.attention_layer import AttentionLayer, Builder, Context, _linear
from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import softmax


@final
class MultiHead(AttentionLayer):
    """Self-attention `layer(x)` or cross-attention `layer(x, context)` with x (*batch, m, width).

    `build`         makes P from q and k: `softmax`, the builder of another operator, or an nn.Module with parameters
    `key_width`     k of every head, or a sequence with one k per head; by default width / heads
    `value_width`   d of every head, likewise
    `bias`          of queries, keys, values and output; `out_bias` overrides it for the output
    `context_width` width of the context; a pair if keys and values come from different tensors

    >>> import torch
    >>> layer = MultiHead(32, 4, key_width=(2, 8, 8, 4))
    >>> layer(torch.randn(1, 10, 32)).shape, layer.operator(torch.randn(1, 10, 32)).shape
    (torch.Size([1, 10, 32]), torch.Size([1, 4, 10, 10]))
    """

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
    ) -> None:
        super().__init__(
            width,
            heads,
            build=build,
            key_width=key_width,
            value_width=value_width,
            bias=bias,
            out_bias=out_bias,
            out_width=out_width,
            context_width=context_width,
        )
        self.query = _linear(width, self.key_heads.total, bias)

    def project_queries(self, x: Tensor) -> Tensor:
        return self.query(x)

    def _query_parameters(self) -> Iterator[tuple[nn.Parameter, int]]:
        return ((parameter, 0) for parameter in self.query.parameters())

    def operator(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> AttentionOperator:
        """The P (*batch, h, m, n) that `forward` applies to the values, for whoever wants to measure it.

        `key_mask` (*batch, n), True = real; `pair_mask`, True = may attend, and `bias`, added to the scores: both (m, n) or
        (*batch, h, m, n), where any axis may be 1.
        """
        keys_from, _ = self._sources(x, context)
        masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask, "bias": bias}
        return self._operator(self.project_queries(x), keys_from, masks)

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(*batch, m, width) -> (*batch, m, out_width)"""
        keys_from, values_from = self._sources(x, context)
        masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask, "bias": bias}
        return self.output(self._operator(self.project_queries(x), keys_from, masks), values_from)

    def _sources(self, x: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        self._check_input("x", x, self.width, self.query)
        keys_from, values_from = context if isinstance(context, tuple) else (context, context)
        keys_from, values_from = (x if source is None else source for source in (keys_from, values_from))
        self._check_input("context (keys)", keys_from, self.context_widths[0], self.key)
        self._check_input("context (values)", values_from, self.context_widths[1], self.value)
        return keys_from, values_from

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHead:
        """The same function as `module`, with batch-first inputs and outputs; see `headwise.nn.drop_in`."""
        from headwise.nn.drop_in import from_torch  # here, because drop_in imports this module

        return from_torch(module)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """The same function as an nn.MultiheadAttention; UnsupportedError if there is none."""
        from headwise.nn.drop_in import to_torch

        return to_torch(self, batch_first=batch_first)
