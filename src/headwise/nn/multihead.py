"""Multi-head attention over any operator.

    out = concat_h( P_h V_h ) W_o + b_o,   P_h = build(X W_Q,h, C W_K,h),   V_h = C W_V,h,   C = X or a context

Vaswani et al. 2017.  h d_i (2 d_hid + d_o) + h d_o d_out + d_out parameters with bias=False, out_bias=True; the count
does not depend on h when the heads share a fixed total width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.nn.attention_layer import AttentionLayer, Builder, Context, _linear
from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import softmax
from headwise.random_state import kept_random_state
from headwise.shapes import shown


@final
class MultiHead(AttentionLayer):
    """Self-attention `layer(x)` or cross-attention `layer(x, context)` with x (*batch, m, width).

    `build`         makes P from q and k: `softmax`, the builder of another operator, or an nn.Module with parameters
    `key_width`     k of every head, or a sequence with one k per head; by default width / heads
    `value_width`   d of every head, likewise
    `bias`          of queries, keys, values and output; `out_bias` overrides it for the output
    `context_width` width of the context; a pair if keys and values come from different tensors
    `dropout`       probability with which each entry of P is dropped in training, which needs all m x n of them

    >>> import torch
    >>> layer = MultiHead(32, 4, key_width=(2, 8, 8, 4))
    >>> layer(torch.randn(1, 10, 32)).shape, layer.operator(torch.randn(1, 10, 32)).shape
    (torch.Size([1, 10, 32]), torch.Size([1, 4, 10, 10]))
    """

    query: nn.Linear
    source_batch_first = True  # of the nn.MultiheadAttention that this was made from; the layer itself is batch first

    def _make_queries(self, bias: bool) -> None:
        self.query = _linear(self.width, self.key_heads.total, bias)

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
        attn_bias: Tensor | None = None,
    ) -> AttentionOperator:
        """The P (*batch, h, m, n) that `forward` applies to the values.

        `key_mask` (*batch, n), True = attend; `pair_mask`, True = attend, and `attn_bias`, added to the scores: both
        (m, n) or (*batch, h, m, n), where any axis may be 1.
        """
        keys_from, _ = self._contexts(x, context)
        masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask, "attn_bias": attn_bias}
        return self._operator(self.project_queries(x), keys_from, **masks)

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
    ) -> Tensor:
        """(*batch, m, width) -> (*batch, m, out_width); the masks are those of `operator`."""
        keys_from, values_from = self._contexts(x, context)
        masks = {"causal": causal, "key_mask": key_mask, "pair_mask": pair_mask, "attn_bias": attn_bias}
        return self.output(self._operator(self.project_queries(x), keys_from, **masks), values_from)

    def _contexts(self, x: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """The tensors that keys and values are projected from, checked."""
        self._check_input("x", x, self.width, self.query)
        if isinstance(context, tuple) and len(context) != 2:
            raise InputError(f"MultiHead: context must be a tensor or (keys, values), but has {len(context)} entries")
        keys_from, values_from = context if isinstance(context, tuple) else (context, context)
        keys_from, values_from = (x if source is None else source for source in (keys_from, values_from))
        self._check_input("context (keys)", keys_from, self.context_widths[0], self.key)
        self._check_input("context (values)", values_from, self.context_widths[1], self.value)
        return keys_from, values_from

    @classmethod
    @torch.enable_grad()  # parts of a packed weight are frozen only if it is
    def from_torch(cls, module: nn.MultiheadAttention, *, build: Builder = softmax) -> MultiHead:
        """The same projections and dropout as `module`, copied, around the operator of `build`; batch first.

        With softmax it computes the same function.  `DropIn.from_torch` keeps the call signature too.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise InputError(f"MultiHead.from_torch: module must be an nn.MultiheadAttention, but is {shown(module)}")
        check_convertible("MultiHead.from_torch", module)
        parts = zip(torch_weights(module), torch_biases(module), strict=True)
        layer = multihead_from(list(parts), module.num_heads, build=build, dropout=module.dropout)
        layer.source_batch_first = module.batch_first
        return layer.train(module.training)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """An nn.MultiheadAttention with copies of the weights; UnsupportedError if none computes the same function.

        Biases that this layer does not have are zero.
        """
        if self.build is not softmax:
            raise UnsupportedError(
                "MultiHead.to_torch: nn.MultiheadAttention computes softmax attention only; wrap the layer in "
                "headwise.nn.DropIn to use another operator in its place"
            )
        return self.torch_projections(batch_first=batch_first)

    @torch.no_grad()
    def torch_projections(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """An nn.MultiheadAttention with copies of the weights, whatever the operator."""
        self._check_expressible_in_torch()
        weight = self.out.weight
        with kept_random_state():  # the initial weights are overwritten
            module = nn.MultiheadAttention(
                self.width,
                self.heads,
                bias=self.query.bias is not None or self.out.bias is not None,
                kdim=self.context_widths[0],
                vdim=self.context_widths[1],
                dropout=self.dropout,
                batch_first=batch_first,
                device=weight.device,
                dtype=weight.dtype,
            )
        parts = (self.query, self.key, self.value)
        if module.in_proj_weight is not None:
            module.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        else:
            for name, part in zip(("q", "k", "v"), parts, strict=True):
                getattr(module, f"{name}_proj_weight").copy_(part.weight)
        if module.in_proj_bias is not None:
            module.in_proj_bias.zero_()  # torch has all biases or none
            module.out_proj.bias.zero_()
            if self.query.bias is not None:
                module.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            if self.out.bias is not None:
                module.out_proj.bias.copy_(self.out.bias)
        module.out_proj.weight.copy_(self.out.weight)
        return module.train(self.training)

    def _check_expressible_in_torch(self) -> None:
        share = self.width // self.heads
        for axis, widths in {"k": self.key_widths, "d": self.value_widths}.items():
            if set(widths) != {share} or share * self.heads != self.width:
                raise UnsupportedError(
                    f"MultiHead.to_torch: nn.MultiheadAttention gives each of {self.heads} heads width / heads = "
                    f"{self.width}/{self.heads}, but axis {axis!r} has widths {widths}; use headwise.nn.DropIn"
                )
        if self.out_width != self.width:
            raise UnsupportedError(
                f"MultiHead.to_torch: nn.MultiheadAttention has out_width = width, but here they are "
                f"{self.out_width} and {self.width}; use headwise.nn.DropIn"
            )


def check_convertible(owner: str, module: nn.MultiheadAttention) -> None:
    """Raise UnsupportedError for an nn.MultiheadAttention whose P has a column without a token."""
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedError(
            f"{owner}: add_bias_kv and add_zero_attn append a key without a token, so P would have one more column "
            "than the context has rows; append a learned row to the context instead"
        )


def torch_weights(module: nn.MultiheadAttention) -> list[Tensor]:
    """The weights of queries, keys, values and output."""
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    packed = module.in_proj_weight
    return [*(separate if packed is None else packed.chunk(3)), module.out_proj.weight]


def torch_biases(module: nn.MultiheadAttention) -> list[Tensor | None]:
    """The biases of queries, keys, values and output."""
    bias = module.in_proj_bias
    return [*((None,) * 3 if bias is None else bias.chunk(3)), module.out_proj.bias]


def multihead_from(parts: Sequence[tuple[Tensor, Tensor | None]], heads: int, **options: Any) -> MultiHead:
    """The layer with copies of (weight, bias) of queries, keys, values and output; what is frozen stays frozen."""
    (query, bias), (key, _), (value, _), (out, out_bias) = parts
    widths = {"key_width": len(key) // heads, "value_width": len(value) // heads, "out_width": len(out)}
    context_width = (key.shape[1], value.shape[1])
    options = {"bias": bias is not None, "out_bias": out_bias is not None, **widths, **options}
    with kept_random_state():  # the initial weights are overwritten
        layer = MultiHead(query.shape[1], heads, context_width=context_width, **options).to(query)
    with torch.no_grad():
        for linear, tensors in zip((layer.query, layer.key, layer.value, layer.out), parts, strict=True):
            for parameter, tensor in zip((linear.weight, linear.bias), tensors, strict=True):
                if tensor is not None:
                    parameter.copy_(tensor)
                    parameter.requires_grad_(tensor.requires_grad)
    return layer
