"""Any other PyTorch model: called as before, its heads replaced while it runs, its modules unchanged."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.errors import UnsupportedError
from headwise.models.intercept import InterceptionError
from headwise.replacement import Choice
from tests.replacement.plans import CAUSAL, SMALL, plan_for, written_out

SOFTMAX, WINDOW = Choice("softmax"), Choice("window", {"width": 4, "leading": 1})
N, WIDTH, HEADS = 11, 16, 2


class HandWritten(nn.Module):
    """A hand-written layer that calls scaled_dot_product_attention."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def parts(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def drawn(b: int = 2, n: int = N) -> Tensor:
    return torch.randn(b, n, WIDTH)


def test_softmax_everywhere_is_the_original_model() -> None:
    model, x = encoder(), drawn()
    new, receipt = headwise.rewrite(model, plan_for(model, {"src": x}, [SOFTMAX]), probe=x)
    key_mask = torch.arange(N) >= torch.tensor([[N], [7]])
    square = nn.Transformer.generate_square_subsequent_mask(N)
    for options in ({}, {"src_key_padding_mask": key_mask}, {"mask": square}, {"mask": square, "is_causal": True}):
        torch.testing.assert_close(new(x, **options), model(x, **options), rtol=1e-5, atol=1e-5)
    assert receipt.largest_change < 1e-5
    assert receipt.what == "TransformerEncoder"
    assert [part.what for part in receipt.parts] == ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize(
    "choice, causal", [*itertools.product(SMALL, [False]), *itertools.product(CAUSAL, [True])], ids=str
)
def test_each_kind_equals_the_model_with_explicit_weights(choice: Choice, causal: bool) -> None:
    model, x = HandWritten(causal=causal).double(), drawn().double()
    new, _ = headwise.rewrite(model, plan_for(model, {"x": x}, [choice], length=N))
    for p in new.heads.parameters():
        nn.init.normal_(p)
    q, k, v = model.parts(x)
    own = [new.heads[0].head_parameters(i) for i in range(HEADS)]
    scale = (WIDTH // HEADS) ** -0.5
    parts = [
        written_out(choice, q[:, i], k[:, i], causal=causal, scale=scale, own=own[i]) @ v[:, i] for i in range(HEADS)
    ]
    expected = model.out(torch.stack(parts, dim=2).flatten(2))
    torch.testing.assert_close(new(x), expected, rtol=1e-6, atol=1e-8)
    if not causal:
        return
    # the same causality written as a mask, floating or boolean
    square = torch.ones(N, N, dtype=torch.bool).tril()
    model.causal = new.model.causal = False
    for mask in (square, torch.zeros(N, N).double().masked_fill(~square, -torch.inf)):
        torch.testing.assert_close(new(x, mask), expected, rtol=1e-6, atol=1e-8)


def test_padding_of_an_encoder_has_no_effect() -> None:
    model, x = encoder(), drawn()
    new, _ = headwise.rewrite(model, plan_for(model, {"src": x}, [WINDOW, Choice("uniform")], length=N))
    key_mask = torch.arange(N) >= torch.tensor([[N], [7]])
    whole = new(x, src_key_padding_mask=key_mask)
    torch.testing.assert_close(whole[1, :7], new(x[1:, :7])[0], rtol=1e-5, atol=1e-5)


def test_gradients_and_state() -> None:
    model, x = encoder(), drawn()
    new, receipt = headwise.rewrite(model, plan_for(model, {"src": x}, [Choice("toeplitz"), WINDOW], length=N), probe=x)
    assert receipt.parameters_after - receipt.parameters_before == 2 * 257
    new(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in new.heads.parameters())
    assert all(p.grad is None for p in model.parameters())  # the given model is another
    again, _ = headwise.rewrite(model, plan_for(model, {"src": x}, [Choice("toeplitz"), WINDOW], length=N))
    for p in new.parameters():
        p.data.add_(0.01)
    again.load_state_dict(new.state_dict())
    assert torch.equal(again(x), new(x))
    assert torch.equal(torch.compile(new, backend="eager")(x), new(x))  # left as it is


def test_a_frozen_part_stays_in_eval_mode() -> None:
    model = encoder().train()
    model.layers[0].eval()
    new, _ = headwise.rewrite(model, plan_for(model, {"src": drawn()}, [SOFTMAX]))
    assert new.training
    for encoder_of in (model, new.get_submodule("model")):
        assert [layer.training for layer in encoder_of.get_submodule("layers").children()] == [False, True]


def test_nothing_is_left_behind_after_errors() -> None:
    model, x, original = HandWritten().eval(), drawn(), F.scaled_dot_product_attention
    new, _ = headwise.rewrite(model, plan_for(model, {"x": x}, [WINDOW], length=N))
    odd = torch.rand(N, N) < 0.5
    with pytest.raises(UnsupportedError, match=r"head 0 is window .* mask \(m = 11, n = 11\)"):
        new(x, odd)
    with pytest.raises(UnsupportedError, match="head 0 is window"):
        new(x, torch.randn(N, N))
    assert F.scaled_dot_product_attention is original
    assert not any(module._forward_hooks for module in new.modules())

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = HandWritten(), HandWritten()

        def forward(self, x: Tensor, twice: bool = True) -> Tensor:
            return self.second(self.first(x)) if twice else x if twice is None else self.first(x)

    model = Sometimes().eval()
    new, _ = headwise.rewrite(model, plan_for(model, {"x": x}, [WINDOW], length=N))
    with pytest.raises(UnsupportedError, match="Sometimes did not compute attention at second"):
        new(x, twice=False)
    with pytest.raises(InterceptionError, match="never called scaled_dot_product_attention"):
        new(x, twice=None)


def test_dropout_in_attention_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), drawn()
    new, _ = headwise.rewrite(model, plan_for(model, {"src": x}, [WINDOW], length=N))
    new(x)
    with pytest.raises(UnsupportedError, match=r"layers.0.self_attn: head 0 is window .* dropout of 0.1"):
        new.train()(x)


class Checkpointed(nn.Module):
    """Keeps no activations of its layer, which is run again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.encoder, self.reentrant = encoder(), reentrant

    def forward(self, src: Tensor) -> Tensor:
        return checkpoint(self.encoder, src, use_reentrant=self.reentrant)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_inside_is_refused_and_outside_is_right(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant=reentrant), drawn().requires_grad_()
    new, _ = headwise.rewrite(model, plan_for(model, {"src": x}, [Choice("uniform")]))
    with pytest.raises(UnsupportedError, match=r"encoder.layers.0.self_attn: Checkpointed uses torch.utils.checkpoint"):
        new(x)
    with torch.no_grad():
        assert new(x).shape == x.shape
    plain, _ = headwise.rewrite(model.encoder, plan_for(model.encoder, {"src": x}, [Choice("uniform")]))
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    checkpoint(plain, x, use_reentrant=reentrant).square().sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(x.grad, expected)


def test_the_original_attention_below_and_beyond_the_planned_lengths() -> None:
    model, x = encoder(), drawn(n=20)
    plan = replace(plan_for(model, {"src": x}, [WINDOW], length=15), exact_below={"layers.1.self_attn": 9})
    new, _ = headwise.rewrite(model, plan, probe=x)
    half, _ = headwise.rewrite(model, replace(plan, sites={"layers.0.self_attn": [WINDOW] * HEADS}), probe=x)
    with torch.no_grad():
        torch.testing.assert_close(
            new(x), model(x), rtol=1e-5, atol=1e-5
        )  # 20 keys; its own fast path rounds otherwise
        assert torch.equal(new(x[:, :8]), half(x[:, :8]))
        assert not torch.equal(new(x[:, :9]), half(x[:, :9]))
    refusing, _ = headwise.rewrite(model, replace(plan, beyond="refuse"), probe=x[:, :15])
    with pytest.raises(UnsupportedError, match=r"planned for at most 15 keys, but there are 20"):
        refusing(x)
