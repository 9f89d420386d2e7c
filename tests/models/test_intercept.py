"""Every attention call of a model is seen while the context is open, and nothing is left behind."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.examination.measure.observe import observe
from headwise.models import InterceptionError, attention, intercept
from headwise.models.intercept import AttentionCall
from tests.models.tiny_models import ALL


def seen(model: nn.Module, batch: dict) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with torch.no_grad(), intercept(model.eval(), calls.append):
        model(**batch)
    return calls


def test_names_kinds_and_causality() -> None:
    kinds = {name: [(c.kind, c.causal) for c in seen(*build())] for name, build in ALL.items()}
    assert kinds["bert"] == kinds["vit"] == kinds["torch_encoder"] == [("self", False)] * 2
    assert kinds["gpt2"] == kinds["llama"] == [("self", True)] * 2
    encoder_decoder = [("self", False)] * 2 + [("self", True), ("cross", False)] * 2
    assert kinds["t5"] == kinds["whisper"] == encoder_decoder
    names = [c.site for c in seen(*ALL["bert"]())]
    assert names == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def test_grouped_queries_are_seen_as_the_model_uses_them() -> None:
    (first, _) = seen(*ALL["llama"]())
    assert (first.groups, first.q.shape[:-1]) == (2, torch.Size((1, 4, 40)))
    torch.testing.assert_close(first.k[:, 0], first.k[:, 1])
    assert not torch.equal(first.k[:, 1], first.k[:, 2])


def test_a_module_used_twice_gets_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x):
            return self.layer(self.layer(x))

    calls = seen(Twice(), {"x": torch.randn(1, 5, 8)})
    assert [c.site for c in calls] == ["layer.self_attn", "layer.self_attn@2"]


def test_the_output_of_the_model_is_unchanged() -> None:
    for build in ALL.values():
        model, batch = build()
        model.eval()
        with torch.no_grad():
            plain = model(**batch)
            with intercept(model, lambda call: None):
                watched = model(**batch)
        first, second = (x if isinstance(x, torch.Tensor) else x[0] for x in (plain, watched))
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_everything_is_removed_also_after_an_error() -> None:
    original, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    model, batch = ALL["bert"]()

    def fail(call: AttentionCall) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"), intercept(model, fail):
        model(**batch)
    assert F.scaled_dot_product_attention is original
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(seen(model, batch)) == 2  # and it works again


def test_operands_are_freed_with_their_call() -> None:
    """Not when the garbage collector runs: on long texts the calls of all layers would be held at once."""
    model, batch = ALL["llama"]()
    seen_before: list[weakref.ref[AttentionCall]] = []
    alive: list[int] = []

    def see(call: AttentionCall) -> None:
        alive.append(sum(before() is not None for before in seen_before))
        seen_before.append(weakref.ref(call.measurable))

    gc.disable()
    try:
        with torch.no_grad(), intercept(model.eval(), see):
            model(**batch)
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_a_nested_interception_is_refused() -> None:
    model, batch = ALL["bert"]()
    with intercept(model, lambda call: None):
        with pytest.raises(InterceptionError, match="another interception is open in this thread"):
            seen(model, batch)
        with pytest.raises(InterceptionError, match="another interception"):  # and the first one is still open
            seen(*ALL["gpt2"]())
    assert len(seen(model, batch)) == 2


def test_a_compiled_model_is_seen_uncompiled() -> None:
    model, batch = ALL["bert"]()
    plain = seen(model, batch)
    compiled = torch.compile(model, backend="eager")
    for each in (compiled, model):  # the compiled wrapper, and the module again
        calls = seen(each, batch)
        assert [c.site.removeprefix("_orig_mod.") for c in calls] == [c.site for c in plain]
        assert all(torch.equal(a.q, b.q) for a, b in zip(calls, plain, strict=True))
    model.encoder.layer[1].compile(backend="eager")  # in place
    model.encoder.layer[0] = torch.compile(model.encoder.layer[0], backend="eager")
    assert [c.q.sum() for c in seen(model, batch)] == [c.q.sum() for c in plain]
    with torch.no_grad():
        assert model(**batch)[0].isfinite().all()  # and it runs compiled again


def test_interception_does_not_touch_the_model() -> None:
    model, batch = ALL["bert"]()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad(), intercept(model, lambda call: None):
        model(**batch)
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_attention_that_is_not_recognised_is_named_not_reported_empty() -> None:
    """What transformers has no other implementation of is not advised."""
    from transformers import LongformerConfig, LongformerModel

    config = LongformerConfig(
        vocab_size=99,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        attention_window=4,
    )
    with pytest.raises(
        InterceptionError, match=r"LongformerSelfAttention.*is written by hand.*headwise.models"
    ) as error:
        observe(LongformerModel(config).eval(), {"input_ids": torch.randint(99, (1, 8))})
    assert "attn_implementation" not in str(error.value)


def test_the_documented_one_line_wrapper_makes_it_visible() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return attention(q, k, v).transpose(1, 2).flatten(-2)

    (found,) = observe(ByHand(), {"x": torch.randn(1, 7, 8)})
    assert [site.heads for site in found.sites] == [2]


def test_the_function_is_seen_by_whatever_name_it_is_called() -> None:
    """Names imported before the context was opened, in the file of the model or of a helper, and stored references."""
    from tests.models import imported_name

    ways = {
        "imported": imported_name.Attends(),
        "helper": imported_name.AttendsThroughHelper(),
        "stored": Stored(F.scaled_dot_product_attention),
        "partial": Stored(functools.partial(F.scaled_dot_product_attention, is_causal=True)),
        "builtin": Stored(torch._C._nn.scaled_dot_product_attention),
        "operator": Stored(torch.ops.aten.scaled_dot_product_attention),
        "overload": Stored(torch.ops.aten.scaled_dot_product_attention.default),
    }
    x = torch.randn(1, 6, 8)
    found = {way: [(c.site, c.causal) for c in seen(model, {"x": x})] for way, model in ways.items()}
    assert found == {way: [("", way == "partial")] for way in ways}


class Stored(nn.Module):
    """Calls a function that it was given."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return self.function(x, x, x).squeeze(1)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_weights_that_a_caller_asks_for(average: bool, padded: bool) -> None:
    """need_weights=True: the layer is seen, and returns the output and the weights that torch returns."""
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x, y = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    options = {"need_weights": True, "average_attn_weights": average, "key_padding_mask": padding}
    calls: list[AttentionCall] = []
    with torch.no_grad():
        right = layer(x, y, y, **options)
        with intercept(layer, calls.append):
            found = layer(x, y, y, **options)
            default = layer(x, y, y)
            alone = layer(x[0], y[0], y[0])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(default[1], layer(x, y, y)[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone[1], layer(x[0], y[0], y[0])[1], rtol=1e-5, atol=1e-6)
    assert [c.q.shape for c in calls] == [(2, 4, 7, 4)] * 2 + [(1, 4, 7, 4)]


class Layouts(nn.Module):
    """The same attention of two sequences and two heads with operands of three, four and five axes."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.project, self.axes = nn.Linear(8, 24), axes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (b, h, n, k)
        if self.axes == 3:
            out = F.scaled_dot_product_attention(*(y.flatten(0, 1) for y in (q, k, v)), mask.repeat_interleave(2, 0))
            return out.unflatten(0, (len(x), 2)).transpose(1, 2).flatten(-2)
        if self.axes == 5:  # windows of three
            q, k, v = (y.unflatten(2, (2, 3)).transpose(1, 2) for y in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, mask.unflatten(1, (2, 3))[:, :, None, :, :3])
            return out.transpose(2, 3).flatten(1, 2).flatten(-2)
        return F.scaled_dot_product_attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(-2)


def test_three_four_and_five_axes() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 6, 8), torch.randn(2, 6, 6)
    weights = Layouts(4).state_dict()
    calls = {}
    for axes in (3, 4, 5):
        model = Layouts(axes).eval()
        model.load_state_dict(weights)
        (calls[axes],) = seen(model, {"x": x, "mask": mask})
    for a in (calls[3], calls[4]):
        assert (a.q.shape, a.windows, a.kind) == ((2, 2, 6, 4), 1, "self")
    assert torch.equal(calls[3].q, calls[4].q)
    assert calls[3].mask.attn_bias is not None
    assert torch.equal(calls[3].mask.attn_bias.expand(2, 2, 6, 6), mask[:, None].expand(2, 2, 6, 6))
    five = calls[5]
    assert (five.q.shape, five.windows) == ((4, 2, 3, 4), 2)
    assert torch.equal(five.q[3], calls[4].q[1, :, 3:])  # the second window of the second sequence
    assert five.mask.attn_bias is not None
    assert torch.equal(five.mask.attn_bias[3, 0], mask[1, 3:, :3])


def test_sequences_first_are_told_from_windows() -> None:
    """torch's default layout (rows, batch, width): no axis of a call is a multiple of the rows by accident."""
    for rows, batch in ((40, 1), (4, 8), (2, 3), (6, 3)):
        (call,) = seen(nn.TransformerEncoderLayer(8, 2, 8).eval(), {"src": torch.randn(rows, batch, 8)})
        assert (call.q.shape[0], call.q.shape[2], call.windows) == (batch, rows, 1)


class TwoInputs(nn.Module):
    """Attention over its first or second argument, in a layer whose name says neither or the wrong thing."""

    def __init__(self, keys: str) -> None:
        super().__init__()
        self.multihead_attn, self.keys = nn.MultiheadAttention(8, 2, batch_first=True), keys
        self.query, self.key, self.attend = nn.Linear(8, 8), nn.Linear(8, 8), Attend()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        source = {"own": x, "own, again": x + 0, "other": other, "own with positions": x}[self.keys]
        if self.keys == "own with positions":  # `other` is added to both
            return self.attend(self.query(x + other), self.key(source + other))
        return self.multihead_attn(x, source, source)[0] + self.attend(self.query(x), self.key(source))


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[:, None], k[:, None], k[:, None])[:, 0]


def test_the_kind_is_decided_by_the_tensors() -> None:
    x, other = torch.randn(2, 6, 8), torch.randn(2, 6, 8)  # equally long
    found = {
        keys: {c.kind for c in seen(TwoInputs(keys).eval(), {"x": x, "other": other})}
        for keys in ("own", "own, again", "other", "own with positions")
    }
    assert found == {"own": {"self"}, "own, again": {"self"}, "other": {"cross"}, "own with positions": {"self"}}


def test_learned_queries_are_cross_attention() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.key = nn.Parameter(torch.randn(1, 1, 6, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            k = self.key(x)[:, None]
            return F.scaled_dot_product_attention(self.queries, k, k)

    assert [c.kind for c in seen(Pool(), {"x": torch.randn(1, 6, 8)})] == ["cross"]


def test_keys_of_the_same_sequence_but_fewer_are_self_attention() -> None:
    """Segformer's keys are its own tokens, merged; a name or the lengths would say cross."""
    from transformers import SegformerConfig, SegformerModel

    config = SegformerConfig(
        num_encoder_blocks=1, depths=[1], sr_ratios=[2], hidden_sizes=[8], num_attention_heads=[2], image_size=32
    )
    model = SegformerModel(config)
    try:
        calls = seen(model, {"pixel_values": torch.randn(1, 3, 32, 32)})
    except InterceptionError:
        pytest.skip("this version of transformers computes Segformer by hand")
    for call in calls:
        assert call.q.shape[-2] != call.k.shape[-2]
        assert call.kind == "self"


@pytest.mark.parametrize("large", [-1e9, -1e4, -float("inf"), torch.finfo(torch.float32).min])
def test_finite_masks_are_masks(large: float) -> None:
    """Causality and padding that are written as a large negative number."""
    n = 6
    causal = torch.full((n, n), large).triu(1)
    padding = torch.zeros(2, 1, 1, n)
    padding[1, ..., 4:] = large
    layer = Masked().eval()
    (call,) = seen(layer, {"x": torch.randn(2, n, 8), "mask": causal})
    assert call.causal
    assert call.mask.attn_bias is None
    (call,) = seen(layer, {"x": torch.randn(2, n, 8), "mask": padding})
    assert not call.causal
    assert call.mask.key_mask is not None
    assert call.mask.key_mask[:, 0].tolist() == [[True] * 6, [True] * 4 + [False] * 2]
    (call,) = seen(layer, {"x": torch.randn(2, n, 8), "mask": causal + padding})
    assert call.causal
    assert call.mask.attn_bias is None


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
