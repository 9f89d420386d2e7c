"""MultiHead, with any operator, in place of an nn.MultiheadAttention: its masks and its call signature.

In nn.MultiheadAttention a boolean mask is True where keys are ignored, in headwise where they are attended to;
`masks_from_torch` converts them.  `DropIn` gives any MultiHead the call signature of nn.MultiheadAttention, for use in
an nn.TransformerEncoderLayer.  Where every key of a query is masked, torch returns NaN or zeros depending on its code
path; headwise returns zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import DtypeError, InputError, ShapeError, UnsupportedError
from headwise.nn.attention_layer import Builder
from headwise.nn.multihead import MultiHead
from headwise.operators.masks import Mask
from headwise.operators.softmax import softmax
from headwise.shapes import are_tensors, same_axis, shown, truth_values, whole_numbers

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Names in the state dict of an nn.MultiheadAttention whose keys or values have another width."""


def masks_from_torch(
    *,
    heads: int,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> dict[str, Any]:
    """torch's masks (True = ignore, or additive) as the keywords of `MultiHead.forward`.

    An additive mask of 0 and -inf becomes a boolean one, or `causal`, where values can be read.  As in torch,
    `is_causal` is only a hint that `attn_mask` is causal; the mask itself is used.

    >>> masks_from_torch(heads=2, attn_mask=nn.Transformer.generate_square_subsequent_mask(3))
    {'causal': True}
    """
    whole_numbers("masks_from_torch", heads=heads)
    _check_masks("masks_from_torch", key_padding_mask, attn_mask, is_causal)
    given = {name: x for name, x in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)) if x is not None}
    batched = {"key_padding_mask": 2, "attn_mask": 3}
    for name, mask in given.items():
        if mask.dim() not in (batched[name] - 1, batched[name]):
            raise ShapeError(
                f"masks_from_torch: {name} must have {batched[name] - 1} or {batched[name]} axes, but its shape is "
                f"{tuple(mask.shape)}"
            )
    if attn_mask is not None and attn_mask.dim() == 3 and attn_mask.shape[0] % heads:
        raise ShapeError(
            f"masks_from_torch: attn_mask has shape {tuple(attn_mask.shape)}; its first axis must be b * h, "
            f"a multiple of the {heads} heads"
        )
    if not given:
        return {}
    n = same_axis("masks_from_torch", "n", **{name: x.shape[-1] for name, x in given.items()})
    m = n if attn_mask is None else attn_mask.shape[-2]
    texts = {
        name: len(x) // (heads if name == "attn_mask" else 1) for name, x in given.items() if x.dim() == batched[name]
    }
    if len(texts) == 2:
        same_axis("masks_from_torch", "b", **texts)
    return _keywords(Mask.from_multihead(key_padding_mask, attn_mask, is_causal, m, n, heads))


def _keywords(mask: Mask) -> dict[str, Any]:
    """The masks that are given, with a key_mask that the heads share: (b, n), or (n,)."""
    given = mask.arguments()
    return {**given, "key_mask": mask.key_mask.squeeze(-2)} if mask.key_mask is not None else given


def _check_masks(owner: str, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> None:
    truth_values(owner, is_causal=is_causal)
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is None:
            continue
        are_tensors(owner, **{name: mask})
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise DtypeError(f"{owner}: {name} must be boolean or floating point, but is {mask.dtype}")
    if is_causal and attn_mask is None:
        raise InputError(f"{owner}: is_causal is a hint about attn_mask, which is missing; pass the causal mask too")


class TorchSignature(nn.Module):
    """The call of nn.MultiheadAttention: its axes and masks, checked as torch checks them."""

    embed_dim: int
    num_heads: int
    kdim: int
    vdim: int
    batch_first: bool

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(b, m, embed_dim), (b, n, kdim), (b, n, vdim) -> (b, m, embed_dim) and weights (b, h, m, n) if needed."""

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
        owner = type(self).__name__
        are_tensors(owner, query=query, key=key, value=value)
        _check_masks(owner, key_padding_mask, attn_mask, is_causal)
        if query.is_nested:
            raise UnsupportedError(
                f"{owner}: query is a nested tensor; pass a padded one with key_padding_mask, and make an "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        axes = query.dim()
        if axes not in (2, 3):
            raise ShapeError(f"{owner}: query must be (m, width) or have a batch axis, but is {tuple(query.shape)}")
        for name, x, allowed in (
            ("key", key, (axes,)),
            ("value", value, (axes,)),
            ("key_padding_mask", key_padding_mask, (axes - 1,)),
            ("attn_mask", attn_mask, (2, 3)),
        ):
            if x is not None and x.dim() not in allowed:
                raise ShapeError(
                    f"{owner}: query has {axes} axes, so {name} must have {' or '.join(map(str, allowed))}, but its "
                    f"shape is {tuple(x.shape)}"
                )
        if axes == 2:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        (b, m, width), n, h = query.shape, key.shape[1], self.num_heads
        same_axis(owner, "embed_dim", layer=self.embed_dim, query=width)
        same_axis(owner, "b", query=b, key=key.shape[0], value=value.shape[0])
        same_axis(owner, "n", key=n, value=value.shape[1])
        same_axis(owner, "width", layer=self.kdim, key=key.shape[2])
        same_axis(owner, "width", layer=self.vdim, value=value.shape[2])
        _check_shape(owner, "key_padding_mask", key_padding_mask, (b, n))
        _check_shape(
            owner, "attn_mask", attn_mask, (m, n) if attn_mask is None or attn_mask.dim() == 2 else (b * h, m, n)
        )
        mask = Mask.from_multihead(key_padding_mask, attn_mask, is_causal, m, n, h)
        out, weights = self.attend(query, key, value, mask, need_weights)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if axes == 2 else weights
        return (out.squeeze(0) if axes == 2 else out if self.batch_first else out.transpose(0, 1)), weights


def _check_shape(owner: str, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise ShapeError(f"{owner}: {name} must have shape {shape}, but has {tuple(x.shape)}")


@final
class DropIn(TorchSignature):
    """A MultiHead, with any operator, behind the call signature of nn.MultiheadAttention.

    State dicts of nn.MultiheadAttention can be loaded; `stock_state_dict` makes one.

    >>> from functools import partial
    >>> from headwise.operators import window
    >>> encoder = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> encoder.self_attn = DropIn.from_torch(encoder.self_attn, build=partial(window, width=3))
    >>> encoder(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """

    # nn.TransformerEncoderLayer reads these to decide on its fused path, which would bypass the operator
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, layer: MultiHead, *, batch_first: bool | None = None) -> None:
        """`batch_first` is that of the nn.MultiheadAttention that the layer was made from, or True."""
        super().__init__()
        if not isinstance(layer, MultiHead):
            raise InputError(f"DropIn: layer must be a MultiHead, but is {shown(layer)}")
        batch_first = layer.source_batch_first if batch_first is None else batch_first
        truth_values("DropIn", batch_first=batch_first)
        self.layer, self.batch_first, self.training = layer, batch_first, layer.training
        self.num_heads, self.embed_dim = layer.heads, layer.width
        self.kdim, self.vdim = layer.context_widths

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, build: Builder = softmax) -> DropIn:
        """In place of `module`: copies of its weights, its dropout and batch_first, and the operator of `build`."""
        return cls(MultiHead.from_torch(module, build=build))

    @property
    def in_proj_weight(self) -> Tensor:
        """An empty tensor that keeps nn.TransformerEncoder from nested tensors, which only its fused path can take."""
        return self.out_proj.weight.new_empty(0).as_subclass(_NotFused)

    @property
    def out_proj(self) -> nn.Linear:
        return self.layer.out

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        operator = self.layer.operator(query, (key, value), **_keywords(mask))
        weights = self.layer.weights(operator) if need_weights else None
        dropped = weights if self.training and self.layer.dropout else None
        return self.layer.output(operator, value, dropped), weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        _unpack(state_dict, prefix, self.num_heads)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _NotFused(Tensor):
    """torch takes no fused path with tensors of a subclass that has a __torch_function__."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def stock_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` with the weights of every DropIn under the names of nn.MultiheadAttention.

    >>> stock = nn.TransformerEncoderLayer(16, 2)
    >>> ours = nn.TransformerEncoderLayer(16, 2)
    >>> ours.self_attn = DropIn.from_torch(ours.self_attn)
    >>> stock.load_state_dict(stock_state_dict(ours))
    <All keys matched successfully>
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"stock_state_dict: model must be an nn.Module, but is {shown(model)}")
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if not isinstance(module, DropIn):
            continue
        prefix = f"{name}." if name else ""
        for key in [key for key in state if key.startswith(f"{prefix}layer.")]:
            if not key.startswith(f"{prefix}layer.build."):  # the operator's own parameters, which torch has not
                del state[key]
        stock = module.layer.torch_projections().state_dict()
        state |= {f"{prefix}{key}": x for key, x in stock.items()}
    return state


def _unpack(state: dict[str, Any], prefix: str, heads: int) -> None:
    """Rename and split the tensors of an nn.MultiheadAttention in `state`, in place, as those of DropIn."""
    packed = state.pop(f"{prefix}in_proj_weight", None)
    separate = [state.pop(f"{prefix}{name}", None) for name in SEPARATE]
    weights = separate if packed is None else packed.chunk(3)
    bias = state.pop(f"{prefix}in_proj_bias", None)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        state |= {} if weight is None else {f"{prefix}layer.{part}.weight": weight}
        state |= {} if bias is None else {f"{prefix}layer.{part}.bias": bias}
        if weight is not None and part != "query":
            state[f"{prefix}layer.{part}_heads.widths"] = torch.full((heads,), len(weight) // heads)
    for kind in ("weight", "bias"):
        if f"{prefix}out_proj.{kind}" in state:
            state[f"{prefix}layer.out.{kind}"] = state.pop(f"{prefix}out_proj.{kind}")
