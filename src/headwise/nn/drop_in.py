"""nn.MultiheadAttention to MultiHead and back: equal outputs, equal gradients, every mask.

In nn.MultiheadAttention a boolean mask is True where keys are ignored, in headwise where they are attended to;
`masks_from_torch` converts them.  `DropIn` gives any MultiHead the call signature of nn.MultiheadAttention, for use in
an nn.TransformerEncoderLayer.  Where every key of a query is masked, torch returns NaN or zeros depending on its code
path; headwise returns zeros.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn.multihead import MultiHead
from headwise.operators.softmax import softmax


@torch.no_grad()
def from_torch(module: nn.MultiheadAttention) -> MultiHead:
    """A MultiHead with copies of the weights; dropout on P is not supported (P would not be a fixed operator)."""
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedError(
            "MultiHead.from_torch: add_bias_kv and add_zero_attn append a key without a token, so P would have one "
            "more column than the context has rows; append a learned row to the context instead"
        )
    if module.dropout > 0 and module.training:
        raise UnsupportedError(
            f"MultiHead.from_torch: dropout {module.dropout} on P makes a different operator in every call; "
            "call .eval() or set dropout = 0 first"
        )
    width = module.embed_dim
    layer = MultiHead(
        width,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        context_width=(module.kdim, module.vdim),
    ).to(module.out_proj.weight)
    packed, bias = module.in_proj_weight, module.in_proj_bias
    for i, (part, linear) in enumerate({"q": layer.query, "k": layer.key, "v": layer.value}.items()):
        rows = slice(i * width, (i + 1) * width)
        weight = getattr(module, f"{part}_proj_weight") if packed is None else packed
        _fill(linear.weight, weight if packed is None else packed[rows], like=weight)
        if bias is not None:
            _fill(linear.bias, bias[rows], like=bias)
    for name, parameter in module.out_proj.named_parameters():
        _fill(getattr(layer.out, name), parameter, like=parameter)
    return layer.train(module.training)


@torch.no_grad()
def to_torch(layer: MultiHead, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """An nn.MultiheadAttention with copies of the weights; biases the layer does not have are zero."""
    _check_expressible(layer)
    weight = layer.out.weight
    module = nn.MultiheadAttention(
        layer.width,
        layer.heads,
        bias=layer.query.bias is not None or layer.out.bias is not None,
        kdim=layer.context_widths[0],
        vdim=layer.context_widths[1],
        batch_first=batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    parts = (layer.query, layer.key, layer.value)
    if module.in_proj_weight is not None:
        module.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
    else:
        for name, part in zip(("q", "k", "v"), parts, strict=True):
            getattr(module, f"{name}_proj_weight").copy_(part.weight)
    if module.in_proj_bias is not None:
        module.in_proj_bias.zero_()  # torch has all biases or none
        module.out_proj.bias.zero_()
        if layer.query.bias is not None:
            module.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        if layer.out.bias is not None:
            module.out_proj.bias.copy_(layer.out.bias)
    module.out_proj.weight.copy_(layer.out.weight)
    return module.train(layer.training)


def masks_from_torch(
    *,
    heads: int,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> dict[str, Any]:
    """torch's masks (True = ignore, or additive) as the keywords of `MultiHead.forward`.

    As in torch, `is_causal` is only a hint that `attn_mask` is causal; the mask itself is used.
    """
    if is_causal and attn_mask is None:
        raise InputError("masks_from_torch: is_causal is a hint about attn_mask, which is missing; pass causal=True")
    masks: dict[str, Any] = {}
    if key_padding_mask is not None:
        if key_padding_mask.dtype == torch.bool:
            masks["key_mask"] = ~key_padding_mask
        else:
            masks["bias"] = key_padding_mask.unsqueeze(-2).unsqueeze(-2)  # (b, n) -> (b, 1, 1, n)
            if key_padding_mask.dim() == 1:  # no batch axis
                masks["bias"] = masks["bias"].squeeze(0)
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            if attn_mask.shape[0] % heads:
                raise ShapeError(
                    f"masks_from_torch: attn_mask has shape {tuple(attn_mask.shape)}; its first axis must be b * h, "
                    f"a multiple of the {heads} heads"
                )
            attn_mask = attn_mask.unflatten(0, (-1, heads))
        if attn_mask.dtype == torch.bool:
            masks["pair_mask"] = ~attn_mask
        else:
            masks["bias"] = attn_mask + masks["bias"] if "bias" in masks else attn_mask
    return masks


@final
class DropIn(nn.Module):
    """A MultiHead, with any operator, behind the call signature of nn.MultiheadAttention.

    >>> encoder = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> encoder.self_attn = DropIn(MultiHead.from_torch(encoder.self_attn))
    >>> encoder(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """

    # nn.TransformerEncoder reads these to decide on its fused path, which would bypass the operator
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = None

    def __init__(self, layer: MultiHead, *, batch_first: bool = True) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, batch_first
        self.num_heads, self.embed_dim = layer.heads, layer.width

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.batch_first and query.dim() == 3:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        masks = masks_from_torch(
            heads=self.num_heads, key_padding_mask=key_padding_mask, attn_mask=attn_mask, is_causal=is_causal
        )
        if query.dim() == 2:  # no batch axis: a 3-D mask is already (h, m, n)
            masks = {name: x.squeeze(0) if x.dim() == 4 else x for name, x in masks.items()}
        operator = self.layer.operator(query, (key, value), **masks)
        out, weights = self.layer.output(operator, value), None
        if need_weights:
            weights = operator.dense().mean(-3) if average_attn_weights else operator.dense()
        return (out if self.batch_first or out.dim() == 2 else out.transpose(0, 1)), weights


def _fill(parameter: Tensor, value: Tensor, *, like: Tensor) -> None:
    parameter.copy_(value)
    parameter.requires_grad_(like.requires_grad)  # a frozen weight stays frozen


def _check_expressible(layer: MultiHead) -> None:
    share = layer.width // layer.heads
    if layer.build is not softmax:
        raise UnsupportedError(
            "MultiHead.to_torch: nn.MultiheadAttention computes softmax attention only; wrap the layer in "
            "headwise.nn.DropIn to use another operator in its place"
        )
    for axis, widths in {"k": layer.key_widths, "d": layer.value_widths}.items():
        if set(widths) != {share} or share * layer.heads != layer.width:
            raise UnsupportedError(
                f"MultiHead.to_torch: nn.MultiheadAttention gives each of {layer.heads} heads width / heads = "
                f"{layer.width}/{layer.heads}, but axis {axis!r} has widths {widths}; use headwise.nn.DropIn"
            )
    if layer.out_width != layer.width:
        raise UnsupportedError(
            f"MultiHead.to_torch: nn.MultiheadAttention has out_width = width, but here they are {layer.out_width} and "
            f"{layer.width}; use headwise.nn.DropIn"
        )
