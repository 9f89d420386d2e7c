"""`replace`: other operators in foreign models, against the same models with attention by definition."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.errors import InputError, UnsupportedError
from headwise.models.intercept import InterceptionError
from headwise.nn import LearnedProjection
from headwise.replacement import Choice
from tests.replacement import attention_reference as reference

B, N, E, H = 3, 13, 16, 4
LENGTHS = torch.tensor([13, 7, 10])
MASKS = ("none", "left", "right", "causal")


def padding(which: str) -> Tensor | None:
    """(b, n), True where there is padding."""
    if which == "left":
        return torch.arange(N) < (N - LENGTHS)[:, None]
    return torch.arange(N) >= LENGTHS[:, None] if which == "right" else None


# ---- six types of models; each is called with the name of a mask ----


class Block(nn.Module):
    """A block as in timm: one linear layer for q, k and v, scaled_dot_product_attention, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(E), nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.dropout = 0.0

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, H, E // H).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal)
        return x + self.proj(out.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x, attn_mask, is_causal)
        return x


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)


class Grouped(nn.Module):
    """Fewer key heads than query heads, another scale, and attention in a function of its own."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        width = E // H * key_heads
        self.q, self.k, self.v = nn.Linear(E, E), nn.Linear(E, width), nn.Linear(E, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, E // H)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + grouped_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def encoder(*, batch_first: bool) -> tuple[nn.Module, Callable[..., Tensor]]:
    layer = nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=batch_first, norm_first=not batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)

    def call(model: nn.Module, x: Tensor, which: str) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=x.dtype) if which == "causal" else None
        keys = padding(which)
        if keys is not None and not batch_first:  # torch's additive form
            keys = torch.zeros(B, N, dtype=x.dtype).masked_fill(keys, -math.inf)
        x = x if batch_first else x.transpose(0, 1)
        out = model(x, mask=mask, src_key_padding_mask=keys, is_causal=mask is not None)
        return out if batch_first else out.transpose(0, 1)

    return model, call


def timm_like() -> tuple[nn.Module, Callable[..., Tensor]]:
    def call(model: nn.Module, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        return model(x, None if keys is None else ~keys[:, None, None, :], which == "causal")

    return Blocks(), call


def by_hand(key_heads: int) -> tuple[nn.Module, Callable[..., Tensor]]:
    def call(model: nn.Module, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        visible = torch.ones(B, 1, N, N, dtype=torch.bool) if keys is None else (~keys)[:, None, None, :]
        mask = visible.tril() if which == "causal" else visible.expand(B, 1, N, N)
        return model(x, torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min))

    return Grouped(key_heads), call


def bert() -> tuple[nn.Module, Callable[..., Tensor]]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 24}
    model = BertModel(BertConfig(vocab_size=9, max_position_embeddings=N, **sizes))

    def call(model: Any, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        mask = None if keys is None else (~keys).long()
        if which == "causal":
            mask = torch.ones(B, 1, N, N, dtype=torch.bool).tril()
        return model(inputs_embeds=x, attention_mask=mask).last_hidden_state

    return model, call


def llama() -> tuple[nn.Module, Callable[..., Tensor]]:
    """Rotary, grouped queries, always causal."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 24}
    model = LlamaModel(LlamaConfig(vocab_size=9, num_key_value_heads=2, max_position_embeddings=N, **sizes))

    def call(model: Any, x: Tensor, which: str) -> Tensor:
        keys = padding(which)
        mask = None if keys is None else (~keys).long()
        return model(inputs_embeds=x, attention_mask=mask, use_cache=False).last_hidden_state

    return model, call


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor]]]] = {
    "nn.TransformerEncoder": partial(encoder, batch_first=True),
    "nn.TransformerEncoder, sequence first": partial(encoder, batch_first=False),
    "timm": timm_like,
    "grouped": partial(by_hand, 2),
    "one key head": partial(by_hand, 1),
    "BERT": bert,
    "Llama": llama,
}
OPERATORS: dict[str, dict[str, Any]] = {
    "window": {"width": 5, "leading": 1},
    "strided": {"stride": 3},
    "fixed": {"block": 4, "summaries": 1},
    "efficient": {"sharpness": 2.0},
    "uniform": {},
    "dot_product": {},
    "softmax": {},
    "projected": {"rank": 4},
}


def made(name: str) -> tuple[nn.Module, Callable[..., Tensor], Tensor]:
    torch.manual_seed(0)
    model, call = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)  # far from uniform attention
    return model.double().eval(), call, torch.randn(B, N, E, dtype=torch.float64)


def by_definition(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, call: Callable[..., Tensor], x: Tensor, which: str, name: str
) -> Tensor:
    """The output of the unchanged model with attention by definition."""
    expected = reference.Reference(getattr(reference, name), **OPERATORS[name])
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", expected)
        patch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
        out = call(model, x, which)
    assert expected.calls
    return out


@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", MODELS)
def test_a_replaced_model_is_the_model_with_that_operator(
    monkeypatch: pytest.MonkeyPatch, name: str, operator: str, which: str
) -> None:
    model, call, x = made(name)
    before = call(model, x, which)
    expected = by_definition(monkeypatch, model, call, x, which, operator)
    keys = padding(which)
    real = torch.ones(B, N, dtype=torch.bool) if keys is None else ~keys
    with headwise.replace(model, operator, **OPERATORS[operator]) as receipt, torch.no_grad():
        assert len(receipt.sites) == len(receipt.known)
        if operator == "projected" and (which == "causal" or name == "Llama"):
            with pytest.raises(UnsupportedError, match="projected rank=4 attends to later keys; use one of softmax"):
                call(model, x, which)
            return
        after = call(model, x, which)
    # the means of segments are in single precision
    torch.testing.assert_close(after[real], expected[real], rtol=0, atol=1e-6 if operator == "projected" else 1e-9)
    if operator != "softmax":
        assert (after - before)[real].abs().max() > 1e-3
    torch.testing.assert_close(call(model, x, which)[real], before[real], rtol=0, atol=1e-12)


# ---- training, dropout, state dicts, copies, undo ----


def dropping(name: str, p: float) -> tuple[nn.Module, Callable[..., Tensor], Tensor]:
    model, call, x = made(name)
    for module in model.modules():
        if isinstance(module, (nn.MultiheadAttention, Block)):
            module.dropout = p
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = p
        elif type(module).__name__ == "BertSelfAttention":
            module.dropout.p = p  # type: ignore[union-attr]
    return model, call, x


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("grouped", "one key head")])
def test_dropout_is_that_of_the_model(name: str) -> None:
    """With softmax and one seed, the same entries are dropped as in the model itself; with a window, some are."""
    model, call, x = dropping(name, 0.3)
    outputs = []
    for operator in (None, "softmax", "window"):
        receipt = None if operator is None else headwise.replace(model.train(), operator)
        torch.manual_seed(5)
        outputs.append(call(model.train(), x, "none").detach())
        if receipt is not None:
            quiet = call(model.eval(), x, "none").detach()
            assert torch.equal(quiet, call(model, x, "none"))
            assert (quiet - outputs[-1]).abs().max() > 1e-3
            receipt.undo()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-9)  # other parts of these models drop nothing


@pytest.mark.parametrize("name", MODELS)
def test_names_parameters_and_gradients_stay(name: str) -> None:
    model, call, x = made(name)
    state, parameters = model.state_dict(), list(model.parameters())
    other, _, _ = made(name)
    receipt = headwise.replace(model.train(), "window", width=3)
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    call(model, x, "left").square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)
    assert all(p.grad is None or p.grad.isfinite().all() for p in parameters)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(call(copied.eval(), x, "right"), call(model.eval(), x, "right"))
    classes = [type(module) for module in other.modules()]
    receipt.undo()
    receipt.undo()
    assert [type(module) for module in model.modules()] == classes
    torch.testing.assert_close(call(model.eval(), x, "none"), call(other, x, "none"), rtol=0, atol=1e-12)


def test_the_nested_tensors_of_an_encoder_are_switched_off_and_on() -> None:
    model, _, _ = made("nn.TransformerEncoder")
    assert model.use_nested_tensor
    with headwise.replace(model, "uniform"):
        assert not model.use_nested_tensor
    assert model.use_nested_tensor


def test_layers_by_name_and_by_number() -> None:
    model, call, x = made("BERT")
    names = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    with headwise.replace(model, "window", width=3) as receipt:
        assert list(receipt.sites) == names == list(receipt.known)
        both = call(model, x, "none")
    outputs = []
    for layers in ({0: Choice("window", {"width": 3})}, {"encoder.layer.0": partial(headwise.window, width=3)}):
        with headwise.replace(model, layers) as receipt:
            assert list(receipt.sites) == names[:1]
            outputs.append(call(model, x, "left"))
            assert str(receipt).startswith("BertModel: 1 of 2 attention layers: 1 window")
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    with headwise.replace(model, {0: "efficient", "encoder.layer.1.attention": "uniform"}) as receipt:
        assert list(receipt.sites.values()) == ["efficient sharpness=1", "uniform"]
        assert (call(model, x, "none") - both).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Llama"])  # which is always causal
def test_an_operator_with_parameters_is_trained_and_saved(name: str) -> None:
    model, call, x = made(name)
    count = len(list(model.parameters()))
    build = LearnedProjection(headwise.projected, length=N, rank=4)
    with headwise.replace(model.train(), build):
        call(model, x, "right").sum().backward()
        assert build.e.grad is not None
        assert build.e.dtype == torch.float64
        assert any(key.endswith("headwise.choice.e") for key in model.state_dict())
        assert len(list(model.parameters())) == count + 1  # shared by all layers
    assert len(list(model.parameters())) == count


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Sometimes(nn.Module):
    """Names the function, but does not call it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) if x.shape[-1] > 99 else x


def test_what_cannot_be_replaced_is_said() -> None:
    model, _, x = made("nn.TransformerEncoder")
    for wrong, message in (
        ((model, "wndow"), "unknown operator 'wndow'; by name there are dot_product, efficient, .* window"),
        ((model, 3), "operator must be a name, a builder or {layer: operator}, but is 3"),
        (
            (model, {"layers.7": "window"}),
            r"no attention at 'layers.7'; the 2 attention layers are 'layers.0.self_attn'",
        ),
        ((model, {5: "window"}), "no attention at 5"),
        ((model, "concatenation"), "concatenation needs w; give a value, or pass a builder"),
        (("model", "window"), "model must be an nn.Module, but is 'model'"),
    ):
        with pytest.raises(InputError, match=message):
            headwise.replace(*wrong)
    with pytest.raises(InputError, match="window: unknown option 'size'"):
        headwise.replace(model, "window", size=3)
    with pytest.raises(InputError, match="gaussian has no option 'width'; its options are"):
        headwise.replace(model, "gaussian", width=3)
    with pytest.raises(InputError, match=r"are for operators by name; use functools\.partial"):
        headwise.replace(model, headwise.window, width=3)
    with (
        headwise.replace(model, lambda q, k, **masks: q),  # type: ignore[arg-type, return-value]
        pytest.raises(InputError, match=r"<lambda> must return an AttentionOperator, but returned a Tensor"),
    ):
        model(torch.randn(1, 5, 16).double())
    with pytest.raises(UnsupportedError, match="toeplitz is fitted to recorded attention"):
        headwise.replace(model, "toeplitz")
    receipt = headwise.replace(model, "window")
    with pytest.raises(UnsupportedError, match=r"layers.0.self_attn was replaced already; undo that first, or give"):
        headwise.replace(model, "uniform")
    with pytest.raises(
        UnsupportedError, match=r"self_attn: window width=65 .* does not support attn_bias .*use softmax"
    ):
        model(x, mask=torch.randn(N, N).double())
    receipt.undo()
    assert all(type(module).__module__.startswith("torch.nn") for module in model.modules())
    for wrong_model in (ByHand(), Sometimes()):
        with headwise.replace(wrong_model, "window"), pytest.raises(InterceptionError, match="never called scaled_dot"):
            wrong_model(torch.randn(1, 4, 8))
    bias_kv = nn.MultiheadAttention(E, H, add_bias_kv=True)
    with pytest.raises(UnsupportedError, match="a key without a token"):
        headwise.replace(bias_kv, "window")
    assert type(bias_kv) is nn.MultiheadAttention
    model.layers[0].self_attn.forward = print
    with pytest.raises(UnsupportedError, match=r"the forward of this MultiheadAttention was replaced by another"):
        headwise.replace(model, "window")


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_that_a_module_checkpoints_is_refused_and_checkpointing_the_module_is_not(reentrant: bool) -> None:
    """What torch computes again in the backward pass would be the module's own attention: wrong gradients."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Block):
        def forward(self, x: Tensor, *masks: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return checkpoint(super().forward, x, *masks, use_reentrant=reentrant)

    torch.manual_seed(0)
    block, inner, x = Block().double(), Checkpointed().double(), torch.randn(B, N, E).double().requires_grad_()
    inner.load_state_dict(block.state_dict())
    with headwise.replace(block, "window", width=3), headwise.replace(inner, "window", width=3):
        expected = torch.autograd.grad(block(x).square().sum(), block.qkv.weight)[0]
        checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(block.qkv.weight.grad, expected)
        with pytest.raises(UnsupportedError, match=r"Checkpointed: torch\.utils\.checkpoint is called inside of this"):
            inner(x)
        with torch.no_grad():
            torch.testing.assert_close(inner(x), block(x))


def test_patterns_choose_the_layers_and_cross_attention_says_where_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 1, 24, batch_first=True, dropout=0.0).double().eval()
    x, y = torch.randn(B, N, E).double(), torch.randn(B, 7, E).double()
    before = model(x, y)
    message = "decoder.layers.0.multihead_attn: window: m = 7 queries against n = 13 keys.*naming the other layers"
    with headwise.replace(model, "window", width=3), pytest.raises(UnsupportedError, match=message):
        model(x, y)
    with headwise.replace(model, {"*.self_attn": Choice("window", {"width": 3})}) as receipt:
        assert list(receipt.sites) == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]
        assert (model(x, y) - before).abs().max() > 1e-3
    with pytest.raises(InputError, match=r"no attention at '\*\.attention'"):
        headwise.replace(model, {"*.attention": "window"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.jit"):
        headwise.replace(scripted, "window")


def test_a_failure_half_way_leaves_the_model_as_it_was() -> None:
    model, call, x = made("nn.TransformerEncoder")
    before = call(model, x, "none")
    model.layers[1].self_attn = nn.MultiheadAttention(E, H, add_zero_attn=True, batch_first=True).double().eval()
    with pytest.raises(UnsupportedError):
        headwise.replace(model, "window")
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert not hasattr(model.layers[0].self_attn, "headwise")
    assert before.shape == x.shape


def test_a_subclass_of_multihead_attention_with_a_forward_of_its_own_is_intercepted() -> None:
    class Twice(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, _ = super().forward(*args, **{**kwargs, "need_weights": False})
            return 2 * out, None

    torch.manual_seed(0)
    module, x = Twice(E, H, batch_first=True).double().eval(), torch.randn(B, N, E).double()
    plain = nn.MultiheadAttention(E, H, batch_first=True).double().eval()
    plain.load_state_dict(module.state_dict())
    hidden = padding("left")
    with headwise.replace(module, "window", width=3), headwise.replace(plain, "window", width=3), torch.no_grad():
        out, expected = module(x, x, x, key_padding_mask=hidden)[0], plain(x, x, x, key_padding_mask=hidden)[0]
    torch.testing.assert_close(out, 2 * expected)


# ---- models of transformers ----


def tiny(name: str) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": H, "hidden_size": E, "intermediate_size": 24}
    ids = {"input_ids": torch.randint(50, (2, 20))}
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=E, n_layer=2, n_head=H)), ids
    if name == "distilbert":
        config = transformers.DistilBertConfig(vocab_size=50, dim=E, n_layers=2, n_heads=H, hidden_dim=24)
        return transformers.DistilBertModel(config), ids
    if name == "vit":
        config = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=50, d_model=E, encoder_layers=1, decoder_layers=1, encoder_attention_heads=H,
            decoder_attention_heads=H, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=10,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": torch.randint(3, 50, (2, 6))}
        return transformers.WhisperModel(config), inputs
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config), ids


@pytest.mark.parametrize("name", ["gpt2", "distilbert", "vit", "whisper", "llama"])
def test_families_of_transformers(name: str) -> None:
    """Windows longer than the input change nothing, another operator does, and `undo` restores every bit."""
    model, batch = tiny(name)
    model = model.double().eval()
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    with torch.no_grad():
        before = model(**batch)[0]
        if name == "whisper":  # cross-attention is between other positions
            with headwise.replace(model, "window"), pytest.raises(UnsupportedError, match="use softmax for cross-att"):
                model(**batch)
            sites = {"encoder": Choice("window", {"width": 99}), "decoder": "softmax"}
        else:
            sites = Choice("window", {"width": 99})
        with headwise.replace(model, sites) as receipt:
            wide = model(**batch)[0]
            assert len(receipt.known) == (3 if name == "whisper" else 2)
            assert model.config._attn_implementation == "headwise"
        assert model.config._attn_implementation == "sdpa"
        with headwise.replace(model, "uniform" if name != "whisper" else {"encoder": "uniform"}):
            other = model(**batch)[0]
    torch.testing.assert_close(wide, before, rtol=0, atol=1e-9)
    assert (other - before).abs().max() > 1e-9
    assert torch.equal(model(**batch)[0], before)


def test_generation_with_a_cache_is_that_without() -> None:
    model, batch = tiny("llama")
    model = model.double().eval()
    batch["attention_mask"] = torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with headwise.replace(model, "window", width=4, leading=1), torch.no_grad():
        cached, whole = (model.generate(**batch, **settings, use_cache=use) for use in (True, False))
        assert torch.equal(cached, whole)
        logits = model(**batch, use_cache=False).logits[:, -1]
        past = model(**{key: x[:, :-1] for key, x in batch.items()}, use_cache=True).past_key_values
        last = {"input_ids": batch["input_ids"][:, -1:], "attention_mask": batch["attention_mask"]}
        torch.testing.assert_close(model(**last, past_key_values=past).logits[:, -1], logits)
    with headwise.replace(model, "strided", stride=4), pytest.raises(UnsupportedError, match="use_cache=False"):
        model.generate(**batch, **settings)


def test_weights_on_request() -> None:
    model, _, x = made("BERT")
    keep = torch.arange(N) >= (N - LENGTHS)[:, None]
    with headwise.replace(model, "window", width=3), torch.no_grad():
        weights = model(inputs_embeds=x, attention_mask=keep.long(), output_attentions=True).attentions
    assert len(weights) == 2
    pairs = (torch.arange(N)[:, None] - torch.arange(N)).abs() <= 1
    visible = pairs & keep[:, None]
    real = keep[:, None, :, None]
    for each in weights:
        assert each.shape == (B, H, N, N)
        assert (each[real.expand_as(each) & ~visible[:, None].expand_as(each)] == 0).all()
        torch.testing.assert_close(
            each.sum(-1)[real[..., 0].expand(B, H, N)], torch.ones(H * int(LENGTHS.sum())).double()
        )


def test_replaced_attention_is_not_examined_as_if_it_were_exact() -> None:
    model, call, x = made("BERT")
    batches = [{"inputs_embeds": x}]
    with headwise.replace(model, {0: "window"}):
        for work in (
            lambda: headwise.examine(model, batches),
            lambda: headwise.plan(model, batches * 4, tolerance=0.1),
        ):
            with pytest.raises(
                InputError, match=r"replaced the attention of encoder\.layer\.0\.attention\.self, and only"
            ):
                work()
    with headwise.replace(model, "window"):
        monitor = headwise.Monitor(model, every=1)
        with pytest.raises(InputError, match=r"attention\.self and 1 more modules, and only"), monitor.step():
            call(model, x, "none")
    assert len(headwise.examine(model, batches).records) == 2 * H
