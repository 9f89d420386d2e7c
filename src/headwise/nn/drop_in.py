"""MultiHead, with any operator, in place of an nn.MultiheadAttention: its masks and its call signature.

In nn.MultiheadAttention a boolean mask is True where keys are ignored, in headwise where they are attended to;
`masks_from_torch` converts them.  `DropIn` gives any MultiHead the call signature of nn.MultiheadAttention, for use in
an nn.TransformerEncoderLayer.  Where every key of a query is masked, torch returns NaN or zeros depending on its code
path; headwise returns zeros.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import DtypeError, InputError, ShapeError
from headwise.nn.multihead import MultiHead
from headwise.shapes import are_tensors, shown, truth_values, whole_numbers


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
    whole_numbers("masks_from_torch", heads=heads)
    truth_values("masks_from_torch", is_causal=is_causal)
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is None:
            continue
        are_tensors("masks_from_torch", **{name: mask})
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise DtypeError(f"masks_from_torch: {name} must be boolean or floating point, but is {mask.dtype}")
    if is_causal and attn_mask is None:
        raise InputError("masks_from_torch: is_causal is a hint about attn_mask, which is missing; pass causal=True")
    masks: dict[str, Any] = {}
    if key_padding_mask is not None:
        if key_padding_mask.dtype == torch.bool:
            masks["key_mask"] = ~key_padding_mask
        else:
            masks["attn_bias"] = key_padding_mask[..., None, None, :]  # (b, n) -> (b, 1, 1, n)
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
            masks["attn_bias"] = attn_mask + masks["attn_bias"] if "attn_bias" in masks else attn_mask
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
        if not isinstance(layer, MultiHead):
            raise InputError(f"DropIn: layer must be a MultiHead, but is {shown(layer)}")
        truth_values("DropIn", batch_first=batch_first)
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
        are_tensors("DropIn", query=query, key=key, value=value)
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
