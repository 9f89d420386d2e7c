"""Pooling by learned queries: the number of outputs is fixed, and the order of the inputs does not matter.

    out = concat_h( P_h X W_V,h ) W_o + b_o,   P_h = build(Q_h, X W_K,h),   Q a parameter of m rows

Permuting the rows of X permutes the columns of P and the rows of the values alike, so the output does not change: it is
permutation invariant, where self-attention is equivariant.  Lee et al. 2019 (Set Transformer) add one more projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.nn.attention_layer import AttentionLayer, Builder
from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import softmax
from headwise.shapes import autocasting, whole_numbers


@final
class LearnedQuery(AttentionLayer):
    """(*batch, n, width) -> (*batch, queries, out_width) for any n.

    Q (queries, k_1 + ... + k_h) is used as it is: projecting it would add parameters but no function.  The options are
    those of `MultiHead`.

    >>> LearnedQuery(16, 3, 2)(torch.randn(5, 40, 16)).shape
    torch.Size([5, 3, 16])
    """

    def __init__(
        self,
        width: int,
        queries: int,
        heads: int,
        *,
        build: Builder = softmax,
        key_width: int | Sequence[int] | None = None,
        value_width: int | Sequence[int] | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        out_width: int | None = None,
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
        )
        whole_numbers("LearnedQuery", least=0, queries=queries)
        if queries < 1:
            raise ShapeError(f"LearnedQuery: axis 'm' must be at least 1, but queries is {queries}")
        # unit variance, like projections of normalised tokens; near zero all queries would give the mean
        self.query = nn.Parameter(torch.randn(queries, self.key_heads.total))

    def project_queries(self, x: Tensor) -> Tensor:
        return self.query.expand(*x.shape[:-2], -1, -1)

    def _query_parameters(self) -> Iterator[tuple[nn.Parameter, int]]:
        yield self.query, 1

    def operator(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
    ) -> AttentionOperator:
        """The P (*batch, h, queries, n) that `forward` applies to the values."""
        self._check_input("x", x, self.width, self.key)
        q = self.project_queries(x)
        if autocasting(x.device):
            q = q.to(torch.get_autocast_dtype(x.device.type))  # there is no query projection to do it
        return self._operator(q, x, causal=False, key_mask=key_mask, pair_mask=pair_mask, attn_bias=attn_bias)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
    ) -> Tensor:
        return self.output(self.operator(x, key_mask=key_mask, pair_mask=pair_mask, attn_bias=attn_bias), x)
