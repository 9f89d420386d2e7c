"""MultiHead.from_torch and back: nn.MultiheadAttention is the oracle, for values and every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn import DropIn, MultiHead, masks_from_torch
from headwise.operators.uniform import Uniform, uniform

B, H, M, N, E = 2, 3, 4, 6, 12


def masks(which: str, m: int) -> dict[str, Any]:
    """torch's own arguments; the first key stays visible, because torch gives NaN for a row without any."""
    key_mask, pair, triple = torch.rand(B, N) < 0.4, torch.rand(m, N) < 0.4, torch.rand(B * H, m, N) < 0.4
    key_mask[..., 0], pair[..., 0], triple[..., 0] = False, False, False
    added = torch.randn(B * H, m, N, dtype=torch.float64).masked_fill(triple, -math.inf)
    future = torch.ones(m, N, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "key_mask": {"key_padding_mask": key_mask},
        "float padding": {"key_padding_mask": torch.zeros(B, N).double().masked_fill(key_mask, -math.inf)},
        "boolean 2-D": {"attn_mask": pair},
        "boolean 3-D": {"attn_mask": triple},
        "float 2-D": {"attn_mask": added[0]},
        "float 3-D": {"attn_mask": added},
        "both boolean": {"attn_mask": triple, "key_padding_mask": key_mask},
        "both float": {
            "attn_mask": added,
            "key_padding_mask": torch.zeros(B, N).double().masked_fill(key_mask, -math.inf),
        },
        "causal": {"attn_mask": future, "is_causal": True},
        "causal and padding": {"attn_mask": future, "is_causal": True, "key_padding_mask": key_mask},
    }[which]


ALL_MASKS = [
    *("none", "key_mask", "float padding", "boolean 2-D", "boolean 3-D", "float 2-D", "float 3-D"),
    *("both boolean", "both float", "causal", "causal and padding"),
]


def mean(q: Tensor, k: Tensor, **masks: Any) -> Uniform:
    return uniform(q.shape[-2], k.shape[-2], **masks)


def random_module(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)  # torch starts with zero biases, which would hide a lost one
    return module


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def gradients(module: nn.MultiheadAttention) -> list[Tensor]:
    """In the order query, key, value: weights, then biases, then the way out."""
    packed = module.in_proj_weight
    weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    result = [grad(w) for w in weights if w is not None] if packed is None else list(grad(packed).chunk(3))
    result += [] if module.in_proj_bias is None else list(grad(module.in_proj_bias).chunk(3))
    return [*result, *(grad(parameter) for parameter in module.out_proj.parameters())]


def our_gradients(layer: MultiHead) -> list[Tensor]:
    parts = (layer.query, layer.key, layer.value)
    result = [grad(part.weight) for part in parts]
    result += [grad(part.bias) for part in parts] if layer.query.bias is not None else []
    return [*result, *(grad(parameter) for parameter in layer.out.parameters())]


@pytest.mark.parametrize("which", ALL_MASKS)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}, {"batch_first": True}])
@pytest.mark.parametrize("square", [True, False])
def test_same_outputs_weights_and_gradients(which: str, options: dict[str, Any], square: bool) -> None:
    m = N if square else M
    module = random_module(**options)
    layer = MultiHead.from_torch(module)
    x, keys, values = torch.randn(B, m, E), torch.randn(B, N, module.kdim), torch.randn(B, N, module.vdim)
    theirs = [
        t.double().transpose(0, 0 if module.batch_first else 1).detach().requires_grad_() for t in (x, keys, values)
    ]
    ours = [t.double().requires_grad_() for t in (x, keys, values)]
    given = masks(which, m)
    expected, weights = module(*theirs, average_attn_weights=False, **given)
    expected = expected if module.batch_first else expected.transpose(0, 1)
    converted = masks_from_torch(heads=H, **given)
    out = layer(ours[0], (ours[1], ours[2]), **converted)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.operator(ours[0], (ours[1], ours[2]), **converted).dense(), weights)
    pull = torch.randn_like(out)
    expected.backward(pull)
    out.backward(pull)
    for mine, other in zip(our_gradients(layer), gradients(module), strict=True):
        torch.testing.assert_close(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad(mine), grad(other) if module.batch_first else grad(other).transpose(0, 1))


@pytest.mark.parametrize("which", ALL_MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_drop_in_answers_like_the_original(which: str, batch_first: bool) -> None:
    module = random_module(batch_first=batch_first)
    drop = DropIn(MultiHead.from_torch(module), batch_first=batch_first)
    x, context = torch.randn(B, M, E).double(), torch.randn(B, N, E).double()
    if not batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    given = masks(which, M)
    for average in (True, False):
        expected = module(x, context, context, average_attn_weights=average, **given)
        torch.testing.assert_close(drop(x, context, context, average_attn_weights=average, **given), expected)
    assert drop(x, context, context, need_weights=False)[1] is None


@pytest.mark.parametrize("which", ["none", "key_mask", "float padding", "boolean 3-D", "float 3-D", "both float"])
def test_a_drop_in_takes_one_sequence_without_a_batch(which: str) -> None:
    module = random_module(batch_first=True)
    drop = DropIn(MultiHead.from_torch(module))
    x, context = torch.randn(M, E).double(), torch.randn(N, E).double()
    given = {k: v[0] if k == "key_padding_mask" else v[:H] for k, v in masks(which, M).items()}
    torch.testing.assert_close(drop(x, context, context, **given), module(x, context, context, **given))


@pytest.mark.parametrize("training", [True, False])
def test_a_drop_in_sits_in_a_transformer_encoder(training: bool) -> None:
    encoder: Any = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64).train(
        training
    )
    x, key_mask = torch.randn(B, N, E).double(), torch.arange(N).expand(B, N) > 3
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=key_mask)
        encoder.self_attn = DropIn(MultiHead.from_torch(encoder.self_attn))
        torch.testing.assert_close(encoder(x, src_key_padding_mask=key_mask)[:, :4], expected[:, :4])
        encoder.self_attn = DropIn(MultiHead(E, H, build=mean).double())
        assert encoder(x).shape == x.shape


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"context_width": (5, 7)}, {"bias": False, "out_bias": True}])
def test_there_and_back_is_the_same_function(options: dict[str, Any], batch_first: bool) -> None:
    layer = MultiHead(E, H, **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    module = layer.to_torch(batch_first=batch_first)
    again = MultiHead.from_torch(module)
    x = torch.randn(B, M, E).double()
    keys, values = (torch.randn(B, N, width).double() for width in layer.context_widths)
    expected = layer(x, (keys, values))
    torch.testing.assert_close(again(x, (keys, values)), expected, rtol=0, atol=0)
    inputs = [t if batch_first else t.transpose(0, 1) for t in (x, keys, values)]
    out = module(*inputs)[0]
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected)
    assert module.kdim == layer.context_widths[0]


def test_mode_dtype_and_frozen_weights_are_kept_and_nothing_is_shared() -> None:
    module = nn.MultiheadAttention(E, H, dropout=0.1).to(torch.bfloat16).eval().requires_grad_(False)
    layer = MultiHead.from_torch(module)
    assert not layer.training
    assert layer.query.weight.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    layer.query.weight.zero_()
    assert module.in_proj_weight.abs().sum() > 0


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: MultiHead.from_torch(nn.MultiheadAttention(E, H, add_bias_kv=True)),
            UnsupportedError,
            "a key without a token",
        ),
        (
            lambda: MultiHead.from_torch(nn.MultiheadAttention(E, H, add_zero_attn=True)),
            UnsupportedError,
            "one more column",
        ),
        (lambda: MultiHead(E, H, key_width=(2, 4, 6)).to_torch(), UnsupportedError, r"axis 'k' has widths \(2, 4, 6\)"),
        (lambda: MultiHead(E, H, value_width=5).to_torch(), UnsupportedError, r"'d' has widths \(5, 5, 5\)"),
        (lambda: MultiHead(E, H, out_width=5).to_torch(), UnsupportedError, "here they are 5 and 12"),
        (lambda: MultiHead(E, H, build=mean).to_torch(), UnsupportedError, "softmax attention only"),
        (lambda: masks_from_torch(heads=H, is_causal=True), InputError, "hint about attn_mask, which is missing"),
        (lambda: masks_from_torch(heads=H, attn_mask=torch.zeros(4, 2, 2)), ShapeError, "a multiple of the 3 heads"),
        (lambda: masks_from_torch(heads=H, key_padding_mask=torch.tensor(True)), ShapeError, "must have 1 or 2 axes"),
        (lambda: masks_from_torch(heads=H, attn_mask=torch.zeros(4)), ShapeError, "must have 2 or 3 axes"),
        (
            lambda: masks_from_torch(heads=H, attn_mask=torch.zeros(4, 4), key_padding_mask=torch.zeros(2, 5)),
            ShapeError,
            "key_padding_mask has 5, attn_mask has 4",
        ),
        (
            lambda: masks_from_torch(heads=H, attn_mask=torch.zeros(2 * H, 4, 4), key_padding_mask=torch.zeros(3, 4)),
            ShapeError,
            "key_padding_mask has 3, attn_mask has 2",
        ),
    ],
)
def test_unsupported_layers_and_masks_are_rejected(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
