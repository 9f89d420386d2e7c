"""Functions of torch are replaced while the context is open: everything is seen, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


def test_a_nested_interception_is_refused() -> None:
    model, batch = ALL["bert"]()
    with intercept(model, lambda call: None):
        with pytest.raises(InterceptionError, match="another interception is open in this thread"):
            seen(model, batch)
        with pytest.raises(InterceptionError, match="another interception"):  # and the first one is still open
            seen(*ALL["gpt2"]())
    assert len(seen(model, batch)) == 2


def test_a_compiled_model_is_named() -> None:
    model, batch = ALL["bert"]()
    with pytest.raises(InterceptionError, match="OptimizedModule is compiled"):
        seen(torch.compile(model, backend="eager"), batch)


def test_interception_does_not_touch_the_model() -> None:
    model, batch = ALL["bert"]()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad(), intercept(model, lambda call: None):
        model(**batch)
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # in that model's own source
def test_hand_written_attention_is_named_not_reported_empty() -> None:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(InterceptionError, match=r"DebertaV2Attention.*attn_implementation=\"sdpa\".*headwise.models"):
        observe(DebertaV2Model(config).eval(), {"input_ids": torch.randint(99, (1, 9))})


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


def test_a_name_imported_from_torch_is_seen_too() -> None:
    """`from torch.nn.functional import scaled_dot_product_attention` binds the function before we replace it."""
    from tests.models import imported_name

    model = imported_name.Attends()
    assert [c.site for c in seen(model, {"x": torch.randn(1, 6, 8)})] == [""]
    assert imported_name.scaled_dot_product_attention is F.scaled_dot_product_attention
