"""Models of transformers with replaced heads: equal to the original for softmax, to an explicit P otherwise.

The reference is the original model in float64 with attention that forms P entry by entry.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.replacement import Choice, Plan, load
from headwise.replacement.install.mixed_heads import MixedHeads
from tests.models.tiny_models import ALL
from tests.replacement.plans import CACHED, CAUSAL, SMALL, plan_for, written_out

transformers = pytest.importorskip("transformers")
SOFTMAX = Choice("softmax")
SOME = [SOFTMAX, Choice("window", {"width": 5, "leading": 1}), Choice("toeplitz", {"reach": 4}), Choice("uniform")]


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = ALL[name]()
    return model.eval(), batch


def causal_lm(**options) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 99, shape)


def states(model: nn.Module, batch: dict) -> Tensor:
    with torch.no_grad():
        return model(**batch)[0]


def shaken(model: nn.Module) -> nn.Module:
    """Give the learned tensors random values."""
    for name, x in model.named_parameters():
        if ".headwise." in name:
            nn.init.normal_(x, std=0.5)
    return model


@contextmanager
def explicit_weights(keep: Tensor | None) -> Iterator[None]:
    """An implementation of attention called "explicit" that forms P of every head from its module's choices."""

    def attend(module, query, key, value, attention_mask, scaling=None, is_causal=None, **kwargs):
        causal = module.is_causal if is_causal is None else is_causal
        shared, rows = query.shape[1] // key.shape[1], []
        for i, choice in enumerate(module.headwise.choices):
            own = module.headwise.head_parameters(i)
            p = written_out(
                choice, query[:, i], key[:, i // shared], key_mask=keep, causal=causal, scale=scaling, own=own
            )
            rows.append(p @ value[:, i // shared])
        return torch.stack(rows, dim=2), None

    transformers.AttentionInterface.register("explicit", attend)
    try:
        yield
    finally:
        transformers.AttentionInterface._global_mapping.pop("explicit")


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "whisper"])
def test_softmax_everywhere_is_the_original_model(name: str) -> None:
    model, batch = made(name)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    expected, kind = states(model, batch), model.config._attn_implementation
    new, receipt = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX]), probe=batch)
    torch.testing.assert_close(states(new, batch), expected, rtol=1e-6, atol=1e-6)
    assert receipt.largest_change <= 1e-6 * max(1.0, receipt.scale)
    assert receipt.cost_after == receipt.cost_before
    assert type(new).__name__ == f"Headwise{type(model).__name__}"
    assert isinstance(new, type(model))
    # the given model is unchanged
    assert model.config._attn_implementation == kind
    assert not hasattr(model.config, "headwise")
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert torch.equal(states(model, batch), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
def test_hidden_states_are_recorded_on_demand(name: str) -> None:
    """In memory as in a model that was loaded: transformers keeps a list of classes that can."""
    model, batch = made(name)
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX]), probe=batch)
    with torch.no_grad():
        found, expected = (m(**batch, output_hidden_states=True) for m in (new, model))
    names = [key for key in expected if key.endswith("hidden_states")]
    assert names
    for key in names:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-6)


LENGTHS = torch.tensor([[13], [8]])


@pytest.mark.parametrize(
    "name, choice",
    [*itertools.product(["bert"], SMALL), *itertools.product(["llama", "gpt2"], CAUSAL), ("vit", SMALL[5])],
    ids=str,
)
def test_each_kind_equals_the_model_with_explicit_weights(name: str, choice: Choice) -> None:
    """Batches of unequal length, padded at the end; real positions agree in float64."""
    model, batch = made(name)
    plan, keep = plan_for(model, batch, [choice]), None
    if name != "vit":
        keep = torch.arange(13) < LENGTHS
        batch = {"input_ids": ids(2, 13), "attention_mask": keep.long()}
    new = shaken(headwise.rewrite(model.double(), plan)[0])
    found = states(new, batch)
    with explicit_weights(keep):
        new.set_attn_implementation("explicit")
        expected = states(new, batch)
    real = slice(None) if keep is None else keep
    torch.testing.assert_close(found[real], expected[real], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_agrees_with_the_original_for_softmax_heads(name: str, side: str) -> None:
    model, batch = made(name)
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX]))
    keep = torch.arange(13) < LENGTHS
    keep = keep if side == "right" else keep.flip(-1)
    batch = {"input_ids": ids(2, 13), "attention_mask": keep.long()}
    torch.testing.assert_close(states(new, batch)[keep], states(model, batch)[keep], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_sequence_equals_the_shorter_one(name: str, side: str) -> None:
    model, batch = made(name)
    new = shaken(headwise.rewrite(model, plan_for(model, batch, SOME))[0])
    keep = torch.arange(13) < LENGTHS
    keep = keep if side == "right" else keep.flip(-1)
    tokens, at = ids(2, 13), (keep.long().cumsum(-1) - 1).clamp(min=0)
    padded = states(new, {"input_ids": tokens, "attention_mask": keep.long(), "position_ids": at})[1, keep[1]]
    alone = states(new, {"input_ids": tokens[1:, keep[1]]})[0]
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_layers_of_softmax_heads_run_the_kernels_from_32_keys_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the original to rounding; bit for bit below `exact_below`, and where only the original can do it."""
    calls = []
    run = MixedHeads._at_once
    monkeypatch.setattr(MixedHeads, "_at_once", lambda self, *args: (calls.append(1), run(self, *args))[1])
    model = causal_lm() if name == "llama" else made(name)[0]
    plan = plan_for(model, {"input_ids": ids(1, 5)}, [SOFTMAX], length=96)
    new, _ = headwise.rewrite(model, replace(plan, exact_below=dict.fromkeys(plan.sites, 40)))
    calls.clear()  # of the probe, which runs every head
    for n, keep, kernels in ((31, None, False), (39, None, False), (40, None, True), (60, padded(60), True)):
        batch = {"input_ids": ids(2, n)} | ({} if keep is None else {"attention_mask": keep})
        found, expected = states(new, batch), states(model, batch)
        assert bool(calls) == kernels
        real = slice(None) if keep is None else keep.bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
        assert kernels or torch.equal(found, expected)
        calls.clear()
    pairs = torch.rand(1, 1, 50, 50) > 0.5
    pairs = pairs | torch.eye(50, dtype=torch.bool)
    batch = {"input_ids": ids(1, 50), "attention_mask": torch.where(pairs, 0.0, torch.finfo(torch.float32).min)}
    assert torch.equal(states(new, batch), states(model, batch))
    assert not calls


def padded(n: int) -> Tensor:
    keep = torch.ones(2, n, dtype=torch.long)
    keep[1, : n // 4] = 0
    return keep


def test_masks_of_four_axes() -> None:
    """A mask (b, 1, m, n) that is padding or causal is recognised in every dtype; others are for softmax heads."""
    model, batch = made("llama")
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOME[1]]))
    same, _ = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX]))
    keep = torch.arange(13) < LENGTHS
    tokens = ids(2, 13)
    square = torch.ones(13, 13, dtype=torch.bool).tril() & keep[:, None, None, :]
    additive = torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min)
    target = states(new, {"input_ids": tokens, "attention_mask": keep.long()})
    for mask in (square, additive):
        assert torch.equal(states(new, {"input_ids": tokens, "attention_mask": mask})[keep], target[keep])
    holes = square.clone()
    holes[:, :, 5, 2] = False
    odd = {"input_ids": tokens, "attention_mask": holes}
    torch.testing.assert_close(states(same, odd)[keep], states(model, odd)[keep], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UnsupportedError, match=r"head 0 is window width=5 leading=1, .* \(m = 13, n = 13\) .* nor causal"
    ):
        states(new, odd)


@pytest.mark.parametrize("choices", [[choice] for choice in CACHED] + [SOME], ids=str)
def test_generate_is_the_same_with_and_without_a_cache(choices: list[Choice]) -> None:
    model = causal_lm()
    new = shaken(headwise.rewrite(model, plan_for(model, {"input_ids": ids(1, 8)}, choices, length=64))[0])
    keep = torch.ones(2, 9, dtype=torch.long)
    keep[0, :4] = 0
    tokens = ids(2, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": keep, "output_scores": True}
    cached, plain = (
        new.generate(tokens, use_cache=cache, return_dict_in_generate=True, **options) for cache in (True, False)
    )
    for a, b in zip(cached.scores, plain.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    alone = new.generate(tokens[:1, 4:], max_new_tokens=6, do_sample=False)
    assert torch.equal(cached.sequences[:1, 4:], alone)


@pytest.mark.parametrize("choice", [choice for choice in CAUSAL if not choice.definition.cached], ids=str)
def test_a_cache_that_cannot_be_used_is_refused_before_decoding(choice: Choice) -> None:
    model = causal_lm()
    plan = plan_for(model, {"input_ids": ids(1, 8)}, [SOFTMAX, SOFTMAX, SOFTMAX, choice], length=64)
    new, _ = headwise.rewrite(model, plan)
    called = []
    new.register_forward_pre_hook(lambda *args: called.append(1))
    message = rf"generate: head 3 of model.layers.0.self_attn is {choice}, .* pass use_cache=False"
    with pytest.raises(UnsupportedError, match=message):
        new.generate(ids(1, 5), max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        new.generate(ids(1, 5), generation_config=transformers.GenerationConfig(max_new_tokens=2))
    assert not called
    assert new.generate(ids(1, 5), max_new_tokens=2, use_cache=False).shape == (1, 7)


def test_a_static_cache_is_for_softmax_heads() -> None:
    model = causal_lm()
    batch, options = {"input_ids": ids(1, 8)}, {"max_new_tokens": 4, "do_sample": False}
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX], length=64))
    static = new.generate(**batch, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, model.generate(**batch, **options))
    new, _ = headwise.rewrite(model, plan_for(model, batch, SOME, length=64))
    with pytest.raises(UnsupportedError, match=r"head 1 of model.layers.0.self_attn is window .* static cache"):
        new.generate(**batch, cache_implementation="static", **options)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_saved_and_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, batch = made(name)
    kinds = [Choice("toeplitz"), SOFTMAX, SOME[1], Choice("projected", {"rank": 3}) if name == "bert" else SOFTMAX]
    new = shaken(headwise.rewrite(model, plan_for(model, batch, kinds))[0])
    new.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    for again in (load(tmp_path), type(new).from_pretrained(tmp_path)):
        assert type(again) is type(new)
        assert torch.equal(states(again, batch), states(new, batch))
    # and once more, from what was loaded
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(states(load(tmp_path / "twice"), batch), states(new, batch))


def test_copied_and_pickled() -> None:
    model, batch = made("bert")
    new = shaken(headwise.rewrite(model, plan_for(model, batch, SOME))[0])
    for again in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert type(again) is type(new)
        assert torch.equal(states(again, batch), states(new, batch))


def test_directories_that_cannot_be_loaded(tmp_path: Path) -> None:
    made("bert")[0].save_pretrained(tmp_path)
    with pytest.raises(InputError, match="was not rewritten; load it with AutoModel"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"has no config.json"):
        load(tmp_path / "nowhere")


def test_fitted_tensors_come_from_the_plan() -> None:
    model, batch = made("bert")
    plan = plan_for(model, batch, [Choice("toeplitz", {"reach": 1})])
    site = next(iter(plan.sites))
    at = site, 2, plan.sites[site][2]
    new, _ = headwise.rewrite(model, replace(plan, fitted={at: {"profile": torch.tensor([1.0, 2.0, 3.0])}}))
    assert new.get_submodule(site).headwise.head_parameters(2)["profile"].tolist() == [1, 2, 3]
    assert new.get_submodule(site).headwise.head_parameters(1)["profile"].tolist() == [0, 0, 0]
    with pytest.raises(ShapeError, match=r"head 2 is toeplitz reach=1 .* profile \(3,\), but was given profile \(5,\)"):
        headwise.rewrite(model, replace(plan, fitted={at: {"profile": torch.zeros(5)}}))


BAD: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "class": (
        lambda plan: replace(plan, model={**plan.model, "class": "GPT2Model"}),
        "the plan was made for a GPT2Model, but the model is a LlamaModel",
    ),
    "module": (
        lambda plan: replace(
            plan,
            sites={"layers.7.self_attn": [SOFTMAX] * 4},
            model={"sites": {"layers.7.self_attn": {"heads": 4, "width": 8}}},
        ),
        "made for another model: LlamaModel has no module 'layers.7.self_attn'",
    ),
    "site": (
        lambda plan: replace(plan, sites={"layers.7.self_attn": [SOFTMAX] * 4}),
        "the model has no site 'layers.7.self_attn'; it has layers.0.self_attn, layers.1.self_attn",
    ),
    "heads": (
        lambda plan: replace(plan, sites={"layers.0.self_attn": [SOFTMAX] * 3}),
        "layers.0.self_attn has 4 heads, but the plan has 3 choices",
    ),
    "length": (
        lambda plan: replace(plan, length=4096, lengths=()),
        "the plan is for a length of 4096, but LlamaModel has 2048 positions",
    ),
    "causal": (
        lambda plan: replace(plan, sites={"layers.1.self_attn": [SOFTMAX, Choice("nystrom"), SOFTMAX, SOFTMAX]}),
        "layers.1.self_attn: head 1 is causal, but nystrom landmarks=64 attends to later keys",
    ),
    "ahead": (
        lambda plan: replace(plan, sites={"layers.1.self_attn": [Choice("offset", {"by": 1})] * 4}),
        "layers.1.self_attn: head 0 is causal, but offset by=1 attends to later keys",
    ),
    "empty": (lambda plan: replace(plan, sites={}), "the plan lists no attention sites"),
    "no attention": (
        lambda plan: replace(
            plan, sites={"layers.0.mlp": [SOFTMAX]}, model={"sites": {"layers.0.mlp": {"heads": 1, "width": 1}}}
        ),
        "layers.0.mlp: LlamaMLP of LlamaModel does not call transformers' attention interface",
    ),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_plans_that_do_not_fit(change, message: str) -> None:
    model, batch = made("llama")
    with pytest.raises((InputError, UnsupportedError)) as error:
        headwise.rewrite(model, change(plan_for(model, batch, [SOFTMAX])))
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_families_without_the_interface_are_refused_by_name() -> None:
    config = transformers.DebertaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.DebertaModel(config)
    site = "encoder.layer.0.attention.self"
    plan = Plan({"class": "DebertaModel", "sites": {site: {"heads": 4, "width": 8}}}, 16, {site: [SOFTMAX] * 4})
    with pytest.raises(UnsupportedError, match="DebertaModel computes attention by hand"):
        headwise.rewrite(model, plan)


def test_a_site_that_never_calls_the_interface_is_refused() -> None:
    """A module that has the interface in its code but is not used in a pass."""
    model, batch = made("llama")
    plan = plan_for(model, batch, [SOFTMAX])
    model.layers.append(copy.deepcopy(model.layers[0]))  # beyond config.num_hidden_layers
    site = "layers.2.self_attn"
    sites = {**plan.model["sites"], site: plan.model["sites"]["layers.0.self_attn"]}
    more = replace(plan, sites={**plan.sites, site: [SOFTMAX] * 4}, model={**plan.model, "sites": sites})
    with pytest.raises(UnsupportedError, match=r"layers.2.self_attn: LlamaModel did not call"):
        headwise.rewrite(model, more)


def test_shared_layers_have_one_operator_per_head() -> None:
    config = transformers.AlbertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        embedding_size=8,
    )
    model, batch = transformers.AlbertModel(config).eval(), {"input_ids": ids(1, 12)}
    plan = plan_for(model, batch, [SOME[1]])
    assert [name.partition("@")[2] for name in plan.sites] == ["", "2"]
    _, receipt = headwise.rewrite(model, plan)
    assert receipt.cost_after.multiply_adds < receipt.cost_before.multiply_adds
    second = list(plan.sites)[1]
    with pytest.raises(UnsupportedError, match="used several times in a pass"):
        headwise.rewrite(model, replace(plan, sites={**plan.sites, second: [SOFTMAX] * 4}))


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"softcap": 30.0}, r"capped scores \(softcap\) is not supported"),
        ({"s_aux": torch.zeros(4)}, r"an extra sink in the softmax \(s_aux\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, r"sequences packed into one"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, r"head 0 is window .* position bias of shape \(1, 4, 5, 5\)"),
        ({"dropout": 0.1}, r"head 0 is window .* attention dropout of 0.1; call model.eval\(\)"),
    ],
)
def test_unsupported_arguments_are_refused(extra: dict, message: str) -> None:
    from headwise.replacement.install.transformers_attention import attention

    model, batch = made("bert")
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOME[1]]))
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(UnsupportedError, match=message):
        attention(new.encoder.layer[0].attention.self, q, q, q, None, **extra)


def test_packed_sequences_are_for_softmax_heads() -> None:
    model, batch = made("llama")
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = {"input_ids": ids(1, 7), "position_ids": at, "use_cache": False}
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX]))
    torch.testing.assert_close(states(new, packed), states(model, packed), rtol=1e-5, atol=1e-6)
    new, _ = headwise.rewrite(model, plan_for(model, batch, SOME))
    with pytest.raises(UnsupportedError, match="neither padding nor causal"):
        states(new, packed)


def sliding(name: str) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    if name == "mistral":
        config = transformers.MistralConfig(num_hidden_layers=1, num_key_value_heads=2, sliding_window=6, **sizes)
        return transformers.MistralModel(config).eval()
    # one layer attends to all keys, the next to neighbours on both sides
    config = transformers.ModernBertConfig(
        num_hidden_layers=2, local_attention=12, global_attn_every_n_layers=2, pad_token_id=0, **sizes
    )
    return transformers.ModernBertModel(config).eval()


@pytest.mark.parametrize("name", ["mistral", "modernbert"])
def test_sliding_windows_are_for_softmax_heads(name: str) -> None:
    model, batch = sliding(name), {"input_ids": ids(1, 8)}
    new, _ = headwise.rewrite(model, plan_for(model, batch, [SOFTMAX], length=6))
    for n in (5, 6, 7, 13):
        keep = torch.arange(n) < torch.tensor([[n], [4]])
        for mask in (torch.ones(2, n, dtype=torch.long), keep.long()):
            long = {"input_ids": ids(2, n), "attention_mask": mask}
            there = mask.bool()
            torch.testing.assert_close(states(new, long)[there], states(model, long)[there], rtol=1e-5, atol=1e-6)
    new, _ = headwise.rewrite(model, plan_for(model, batch, SOME, length=6))
    assert states(new, {"input_ids": ids(1, 5)}).isfinite().all()  # shorter than the sliding window
    beyond = {"input_ids": ids(1, 13)}
    assert torch.equal(states(new, beyond), states(model, beyond))  # longer than planned: the original attention
    with pytest.raises(UnsupportedError, match="neither padding nor causal"):
        headwise.rewrite(model, plan_for(model, batch, SOME, length=13))


def test_training_reaches_the_new_tensors() -> None:
    model, batch = made("bert")
    new, _ = headwise.rewrite(model, plan_for(model, batch, [Choice("toeplitz"), SOFTMAX, SOME[1], SOFTMAX]))
    new(**batch)[0].square().mean().backward()
    for name, x in new.named_parameters():
        if "pooler" not in name:
            assert (x.grad is not None and x.grad.abs().sum() > 0) or "key.bias" in name, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled(name: str) -> None:
    model, batch = made(name)
    new = shaken(headwise.rewrite(model, plan_for(model, batch, SOME))[0])
    keep = torch.arange(40) < torch.tensor([[33]])
    batch = {**batch, "attention_mask": keep.long()}
    compiled = torch.compile(new, backend="aot_eager")
    torch.testing.assert_close(states(compiled, batch)[keep], states(new, batch)[keep], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("choice", SMALL, ids=str)
def test_each_kind_compiled(choice: Choice) -> None:
    model, batch = made("bert")
    new = shaken(headwise.rewrite(model, plan_for(model, batch, [choice]))[0])
    compiled = torch.compile(new, backend="aot_eager")
    torch.testing.assert_close(states(compiled, batch), states(new, batch), rtol=1e-4, atol=1e-5)
