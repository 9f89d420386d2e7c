"""MultiHead against a loop over its heads in float64, and published parameter counts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise.errors import DtypeError, NonFiniteError, ShapeError, UnsupportedError
from headwise.nn import LearnedQuery, MultiHead, head_slices
from headwise.operators.softmax import softmax

RAGGED = {"key_width": (1, 5, 3), "value_width": (4, 2, 6)}


def by_loops(layer: MultiHead, x: Tensor, context: Tensor, scores: Tensor | None = None) -> Tensor:
    """One head after the other, each with its own slice of the weights and its own 1/sqrt(k); `scores` are added."""
    parts = []
    for i, (keys, values) in enumerate(
        zip(head_slices(layer.key_widths), head_slices(layer.value_widths), strict=True)
    ):
        q = x @ layer.query.weight[keys].T + layer.query.bias[keys]
        k = context @ layer.key.weight[keys].T + layer.key.bias[keys]
        v = context @ layer.value.weight[values].T + layer.value.bias[values]
        s = q @ k.mT / math.sqrt(layer.key_widths[i])
        parts.append((s if scores is None else s + scores[:, i]).softmax(-1) @ v)
    return torch.cat(parts, -1) @ layer.out.weight.T + layer.out.bias


def with_random_bias(layer: MultiHead) -> MultiHead:
    for linear in (layer.query, layer.key, layer.value, layer.out):
        nn.init.normal_(linear.bias)
    return layer


@pytest.mark.parametrize("widths", [{}, RAGGED, {"key_width": 2}, {"value_width": (1, 1, 7), "out_width": 5}])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_a_loop_over_heads_in_value_and_gradient(widths: dict, cross: bool, masked: bool) -> None:
    layer = with_random_bias(MultiHead(12, 3, context_width=8 if cross else None, **widths).double())
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True) if cross else x
    masks, added = {}, None
    if masked:
        n = context.shape[1]
        added = torch.randn(2, 3, 5, n, dtype=torch.float64)
        keep, key_mask = torch.rand(1, 3, 5, n) > 0.3, torch.rand(2, n) > 0.3
        keep[..., 0], key_mask[:, 0] = True, True
        masks = {"attn_bias": added, "pair_mask": keep, "key_mask": key_mask, "causal": True}
        causal = torch.ones(5, n, dtype=torch.bool).tril(n - 5)
        added = added.masked_fill(~(keep & key_mask[:, None, None, :] & causal), -math.inf)
    fast = layer(x, context if cross else None, **masks)
    slow = by_loops(layer, x, context, added)
    torch.testing.assert_close(fast, slow)
    leaves = [x, *([context] if cross else []), *layer.parameters()]
    pull = torch.randn_like(fast)
    torch.testing.assert_close(
        torch.autograd.grad(fast, leaves, pull), torch.autograd.grad(slow, leaves, pull), rtol=1e-9, atol=1e-12
    )


@given(
    widths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
)
def test_any_widths_equal_a_loop_over_heads(widths: list[tuple[int, int]], sizes: tuple[int, int, int]) -> None:
    b, m, n = sizes
    keys, values = zip(*widths, strict=True)
    layer = with_random_bias(MultiHead(5, len(widths), key_width=keys, value_width=values, context_width=3).double())
    x, context = torch.randn(b, m, 5, dtype=torch.float64), torch.randn(b, n, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x, context), by_loops(layer, x, context))


def test_keys_and_values_may_come_from_two_tensors() -> None:
    layer = MultiHead(8, 2, context_width=(5, 6))
    x, keys, values = torch.randn(2, 3, 8), torch.randn(2, 4, 5), torch.randn(2, 4, 6)
    p = layer.operator(x, (keys, values)).dense()
    expected = layer.out(layer.value_heads.merge(p @ layer.value_heads.split(layer.value(values))))
    torch.testing.assert_close(layer(x, (keys, values)), expected)


def test_operator_is_what_forward_applies() -> None:
    layer, x = MultiHead(8, 2), torch.randn(2, 6, 8)
    operator = layer.operator(x, causal=True)
    assert operator.shape == (2, 2, 6, 6)
    torch.testing.assert_close(layer.output(operator, x), layer(x, causal=True))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_parameter_counts(heads: int) -> None:
    d_i, d_hid, d_o, d_out = 12, 3, 5, 7
    layer = MultiHead(d_i, heads, key_width=d_hid, value_width=d_o, out_width=d_out, bias=False, out_bias=True)
    assert count(layer) == heads * d_i * (2 * d_hid + d_o) + heads * d_o * d_out + d_out  # Dordevic, a.1
    d_e, d_k, d_v = 16, 24, 8
    split = MultiHead(d_e, heads, key_width=d_k // heads, value_width=d_v // heads, bias=False)
    assert count(split) == 2 * d_e * d_k + d_e * d_v + d_v * d_e  # Burgund, remark 1.2.1: independent of h


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_builder_gets_only_the_masks_that_are_given_and_may_learn() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(2, 1, 1))
            self.masks: dict[str, Tensor] = {}

        def forward(self, q: Tensor, k: Tensor, **masks: Tensor):
            self.masks = masks
            return softmax(q * self.log_scale.exp(), k, **masks)  # pyright: ignore[reportArgumentType]

    build = Tempered()
    layer, x = MultiHead(8, 2, build=build), torch.randn(1, 4, 8)
    layer(x).square().sum().backward()
    assert not build.masks
    assert build.log_scale.grad is not None
    assert build.log_scale.grad.abs().amin() > 0
    layer(x, causal=True, key_mask=torch.tensor([[True, True, True, False]]))
    assert build.masks.keys() == {"causal", "key_mask"}
    assert build.masks["key_mask"].shape == (1, 1, 4)  # (*batch, h, n), as wide as the batch of q and k
    assert "build.log_scale" in dict(layer.named_parameters())


@pytest.mark.parametrize("build", [MultiHead, LearnedQuery])
def test_a_grown_checkpoint_loads_into_the_layer_as_it_was_first_built(build: type) -> None:
    size = (12, 3) if build is MultiHead else (12, 4, 3)
    grown, fresh = build(*size, **RAGGED), build(*size)
    kept = {name: id(parameter) for name, parameter in fresh.named_parameters()}
    model = nn.Sequential(nn.Identity(), fresh)
    model.load_state_dict({f"1.{name}": x for name, x in grown.state_dict().items()})
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(fresh(x), grown(x), rtol=0, atol=0)
    assert fresh.key_widths == RAGGED["key_width"]
    assert fresh.value_widths == RAGGED["value_width"]
    assert {name: id(parameter) for name, parameter in fresh.named_parameters()} == kept
    with torch.device("meta"):
        empty = build(*size)
    empty.load_state_dict(grown.state_dict(), assign=True)
    torch.testing.assert_close(empty(x), grown(x), rtol=0, atol=0)


@pytest.mark.parametrize("build", [MultiHead, LearnedQuery])
def test_widening_does_not_change_the_function_and_narrowing_drops_the_last_dimensions(build: type) -> None:
    layer = build(12, 3) if build is MultiHead else build(12, 4, 3)
    layer, x = layer.double(), torch.randn(2, 5, 12, dtype=torch.float64)
    before, weight = layer(x), layer.key.weight
    layer(x).sum().backward()
    layer.resize_(key_widths=(4, 9, 6), value_widths=(7, 4, 5))
    torch.testing.assert_close(layer(x), before)
    assert layer.key.weight is weight
    assert weight.grad is None
    assert weight.shape == (19, 12)
    layer.resize_(key_widths=(4, 4, 4), value_widths=(4, 4, 4))
    torch.testing.assert_close(layer(x), before)


def test_a_state_dict_for_another_number_of_heads_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"MultiHead: axis 'k' has 4 widths \(2, 2, 2, 2\) for 2 heads"):
        MultiHead(8, 2).load_state_dict(MultiHead(8, 4).state_dict())


@pytest.mark.parametrize("widths", [{}, RAGGED])
def test_compiles_whole_copies_and_runs_in_half_precision(widths: dict) -> None:
    layer, x = MultiHead(12, 3, **widths), torch.randn(2, 5, 12)
    expected = layer(x, causal=True)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x, causal=True), expected, rtol=0, atol=0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, causal=True), expected)
    layer.resize_(key_widths=(7, 5, 4))  # a compiled layer notices that it has grown
    torch.testing.assert_close(compiled(x, causal=True), expected)
    for dtype in (torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(twin.to(dtype)(x.to(dtype), causal=True).float(), expected, rtol=0, atol=8 * eps)
        with torch.autocast("cpu", dtype):
            out = layer(x, causal=True, attn_bias=torch.zeros(5, 5))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=8 * eps)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own: its fused kernel has no batching rule
@pytest.mark.parametrize("widths", [{}, RAGGED])
def test_batch_axes_may_be_many_none_or_mapped(widths: dict) -> None:
    layer, x = MultiHead(12, 3, **widths), torch.randn(2, 4, 5, 12)
    expected = layer(x.flatten(0, 1)).unflatten(0, (2, 4))
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0, 0]), expected[0, 0])
    torch.testing.assert_close(torch.vmap(layer)(x), expected)


def test_ragged_keys_need_a_builder_by_dot_product() -> None:
    def features(q: Tensor, k: Tensor, **masks: Tensor):
        return softmax(q.softmax(-1), k)

    with pytest.raises(UnsupportedError, match=r"padded with zeros.*features does not declare.*by_dot_product"):
        MultiHead(8, 2, build=features, key_width=(3, 5))
    MultiHead(8, 2, build=features, value_width=(3, 5))(torch.randn(1, 3, 8))
    features.by_dot_product = True  # pyright: ignore[reportFunctionMemberAccess]
    MultiHead(8, 2, build=features, key_width=(3, 5))


X = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: MultiHead(8, 3), ShapeError, "width 8 does not divide into 3 heads"),
        (lambda: MultiHead(8, 2, key_width=(4, 4, 4)), ShapeError, r"axis 'k' has 3 widths \(4, 4, 4\) for 2 heads"),
        (lambda: MultiHead(8, 2, value_width=(4, 0)), ShapeError, r"axis 'd' has widths \(4, 0\)"),
        (lambda: MultiHead(8, 0), ShapeError, "heads is 0"),
        (lambda: MultiHead(8, 2, out_width=0), ShapeError, "out_width must be at least 1, but is 0"),
        (lambda: MultiHead(8, 2)(torch.zeros(2, 5, 7)), ShapeError, "'width' must agree, but layer has 8, x has 7"),
        (lambda: MultiHead(8, 2)(X, torch.zeros(2, 5, 6)), ShapeError, r"layer has 8, context \(keys\) has 6"),
        (lambda: MultiHead(8, 2)(X, torch.zeros(3, 5, 8)), ShapeError, r"queries has \(2,\), keys has \(3,\)"),
        (lambda: MultiHead(8, 2)(torch.zeros(2, 0, 8)), ShapeError, r"x has shape \(2, 0, 8\): an empty axis"),
        (lambda: MultiHead(8, 2)(X.double()), DtypeError, "x is torch.float64, weight is torch.float32"),
        (lambda: MultiHead(8, 2)(X * math.nan), NonFiniteError, "Softmax: q has 80 non-finite of 80"),
        (
            lambda: MultiHead(8, 2)(X, pair_mask=torch.ones(2, 5, 5) > 0),
            ShapeError,
            r"one mask per sequence is \(b, 1, m",
        ),
        (lambda: MultiHead(8, 2)(X, pair_mask=torch.ones(5, 4) > 0), ShapeError, r"mask has shape \(5, 4\)"),
        (lambda: MultiHead(8, 2)(X, pair_mask=torch.ones(5, 5)), DtypeError, "pair_mask must be boolean"),
        (lambda: MultiHead(8, 2)(X, attn_bias=torch.ones(5, 5) > 0), DtypeError, "attn_bias must be floating point"),
        (lambda: MultiHead(8, 2)(X, key_mask=torch.ones(2, 4) > 0), ShapeError, r"key_mask has shape \(2, 4\)"),
        (lambda: MultiHead(8, 2)(X, key_mask=torch.ones(2, 5)), DtypeError, "key_mask must be boolean"),
    ],
)
def test_bad_input_is_rejected(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
