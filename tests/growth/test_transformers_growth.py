"""Growth of transformers models: what they compute, the gradient behind growth, optimizers, saving and loading."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from headwise.errors import InputError, UnsupportedError
from headwise.growth import Grower
from headwise.models.run import in_double
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.resized_models import resized
from headwise.models.widths.widened_attention import NAME

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=24, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def distilbert() -> Any:
    config = transformers.DistilBertConfig(
        vocab_size=40, dim=24, hidden_dim=32, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0
    )
    return transformers.DistilBertModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=40, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


FAMILIES = {"llama": llama, "gpt2": gpt2, "distilbert": distilbert, "bert": bert, "vit": vit, "t5": t5}


def batch(name: str, b: int = 3, padding: str | None = None) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(b)
    if name == "vit":
        return {"pixel_values": torch.randn(b, 3, 16, 16, generator=draws)}
    ids = torch.randint(3, 40, (b, 9), generator=draws)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[0, 6:] = 0
    elif padding == "left":
        mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    return {**inputs, "decoder_input_ids": ids[:, :7]} if name == "t5" else inputs


def output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Rows of padding are left out: they hold whatever the implementation makes of them."""
    cached = {} if "pixel_values" in inputs or type(model).__name__.endswith("BertModel") else {"use_cache": False}
    y = model(**inputs, **cached)[0]
    mask = inputs.get("attention_mask")
    return y if mask is None or y.shape[1] != mask.shape[1] else y[mask.bool()]


def loss_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    y = output(model, inputs)
    return (y - torch.linspace(-1, 1, y.numel()).to(y).view_as(y)).square().mean()


def made(name: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[name]().train()


CASES = [(name, b, padding) for name in FAMILIES for b, padding in ((3, None), (1, None), (3, "right"), (3, "left"))]
CASES = [case for case in CASES if not (case[0] == "vit" and case[2])]


@pytest.mark.parametrize(("name", "b", "padding"), CASES)
def test_added_dimensions_change_the_scores_by_their_own_term_and_nothing_else(
    name: str, b: int, padding: str | None
) -> None:
    """Against dense attention in float64, written out here, with the new term added to the scores."""
    model, inputs = made(name).eval(), batch(name, b, padding)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    model = in_double(model)
    stock = copy.deepcopy(model)
    modules = resized(model)
    torch.testing.assert_close(output(model, inputs), output(stock, inputs), rtol=0, atol=1e-12)
    torch.manual_seed(1)
    for module in modules.values():
        dimensions = getattr(module, NAME)
        dimensions.resize_([2, *[1] * (dimensions.key_heads - 1)])  # heads of different widths
        dimensions.query_weight.data.normal_()
        dimensions.query_bias.data.normal_()
    torch.testing.assert_close(output(model, inputs), output(stock, inputs), rtol=0, atol=1e-12)  # zero keys
    for module in modules.values():
        getattr(module, NAME).key_weight.data.normal_()
    grown = output(model, inputs)
    assert (grown - output(stock, inputs)).abs().max() > 1e-3
    with dense_attention(stock, {site: getattr(module, NAME) for site, module in modules.items()}):
        expected = output(stock, inputs)
    torch.testing.assert_close(grown, expected, rtol=0, atol=1e-10)


class dense_attention:
    """The eager attention of a stock model, plus scaling x W_q (c W_k)^T head by head: no code of models/widths."""

    def __init__(self, model: Any, dimensions: dict[str, HeadDimensions]) -> None:
        self.model, self.hooks = model, []
        self.new = {id(model.get_submodule(site)): x for site, x in dimensions.items()}
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register("dense_for_tests", self.attend)
        AttentionMaskInterface.register("dense_for_tests", eager_mask)
        self.model.set_attn_implementation("dense_for_tests")
        for module in self.model.modules():
            if id(module) in self.new:
                self.hooks.append(module.register_forward_pre_hook(self.note, with_kwargs=True))

    def note(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        context = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))
        self.inputs[id(module)] = x, x if context is None else context

    def attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        new, (x, c) = self.new[id(module)], self.inputs[id(module)]
        factor = q.shape[-1] ** -0.5 if scaling is None else scaling
        group, outputs = q.shape[1] // k.shape[1], []
        for h in range(q.shape[1]):
            j, p = h // group, new.added[h // group]
            start = group * sum(new.added[:j]) + (h - j * group) * p
            wq, b = new.query_weight[start : start + p], new.query_bias[start : start + p]
            wk = new.key_weight[sum(new.added[:j]) :][:p]
            s = factor * (q[:, h] @ k[:, j].mT + (x @ wq.T + b) @ (c @ wk.T).mT)
            if rest.get("position_bias") is not None:
                s = s + rest["position_bias"][:, h]
            if mask is not None:
                s = s + mask[:, 0].to(s)
            elif getattr(module, "is_causal", False) and s.shape[-2] > 1:
                s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -math.inf)
            outputs.append(s.softmax(-1) @ v[:, j])
        return torch.stack(outputs, 2), None

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_statistics_are_the_gradient_of_the_loss(name: str) -> None:
    """M = -dL/dZ is gathered: the gradient with respect to new dimensions, by autograd in float64."""
    model = in_double(made(name)).train()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in batch(name, 2).items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    grower = Grower(model, optimizer, rows=None, folds=1)
    loss_of(model, inputs).backward()
    grower.observe()
    measured = {site: x.folds[0].clone() for site, x in grower.statistics.items()}  # (h, d_q, d_k)
    for site, layer in grower.layers.items():
        dimensions = getattr(layer.module, NAME)
        draws = torch.Generator().manual_seed(3)
        dimensions.resize_([1] * dimensions.key_heads)
        u = torch.randn(dimensions.heads, dimensions.inputs[0] + 1, generator=draws, dtype=torch.float64)
        dimensions.query_weight.data, dimensions.query_bias.data = u[:, :-1].clone(), u[:, -1].clone()
        loss_of(model, inputs).backward()
        # keys are zero, so dL/dW_k = -scaling sum over the heads that share it of M_h^T u_h
        product = torch.einsum("hqk,hq->hk", measured[site], u).unflatten(0, (dimensions.key_heads, -1)).sum(1)
        torch.testing.assert_close(dimensions.key_weight.grad, -product / layer.unit(1), rtol=1e-8, atol=1e-12)
        dimensions.resize_([0] * dimensions.key_heads)
        model.zero_grad()


@pytest.mark.parametrize("name", FAMILIES)
def test_growth_lowers_the_held_out_loss_and_goes_on_training(name: str) -> None:
    model, held = made(name), batch(name, 4)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, 1e-3)
    grower = Grower(model, optimizer)
    params = list(model.parameters())  # as clipping code caches it
    for b in (2, 3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(name, b))
        loss.backward()
        grower.observe()
        optimizer.step()
    before = loss_of(model, held).item()
    site = grower.scores()[0]
    event = grower.grow(2, [(site.layer, site.head)], loss=lambda: loss_of(model, held))
    assert event.changes[0].after == event.changes[0].before + 2 == 8
    assert event.loss_after is not None
    assert event.loss_after <= before
    assert len(params) == len(list(model.parameters()))
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    optimizer.zero_grad()
    loss_of(model, batch(name, 2)).backward()  # `loss` of before the growth is still alive
    new = getattr(model.get_submodule(site.layer), NAME)
    assert float(new.key_weight.grad.norm()) > 0
    total = torch.nn.utils.clip_grad_norm_(params, 1e-9)
    assert float(total) > 0
    assert float(new.key_weight.grad.norm()) <= 1e-9  # the cached list clips the new dimensions too
    moved = new.key_weight.detach().clone()
    optimizer.step()
    assert not torch.equal(moved, new.key_weight)
    event.undo()
    assert new.added == (0,) * new.key_heads


def grown_llama(name: str = "llama") -> Any:
    model = made(name).eval()
    for module in resized(model).values():
        dimensions = getattr(module, NAME)
        dimensions.resize_([2, *[1] * (dimensions.key_heads - 1)])
        for parameter in dimensions.parameters():
            parameter.data.normal_()
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grown_model_is_saved_and_loaded_by_the_auto_classes(name: str, tmp_path: Path) -> None:
    model = grown_llama(name)
    model.save_pretrained(tmp_path)
    auto = {"llama": "AutoModelForCausalLM", "gpt2": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM"}
    again = getattr(transformers, auto.get(name, "AutoModel")).from_pretrained(tmp_path)
    assert isinstance(again, FAMILIES[name]().__class__)
    inputs = batch(name, 2)
    assert torch.equal(output(again, inputs), output(model, inputs))
    torch.testing.assert_close(output(copy.deepcopy(again), inputs), output(model, inputs), rtol=0, atol=0)


def test_a_stock_class_refuses_a_grown_checkpoint(tmp_path: Path) -> None:
    grown_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load this with AutoModel after import headwise"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_an_unchanged_model_is_saved_as_what_it_was(tmp_path: Path) -> None:
    model = made("llama").eval()
    resized(model)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    inputs = batch("llama", 2)
    torch.testing.assert_close(output(again, inputs), output(model, inputs))
    assert type(model).__name__ == "HeadwiseLlamaForCausalLM"


def test_missing_tensors_of_a_grown_checkpoint_raise(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    grown_llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if "query_bias" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks tensors, 2 in all: .*headwise_widths.query_bias"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_holds_keys_at_their_new_width(name: str, beams: int) -> None:
    model = grown_llama(name)
    ids = batch(name, 2, "left")
    ids.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": beams, "do_sample": False}
    assert torch.equal(model.generate(**ids, **options), model.generate(**ids, **options, use_cache=False))
    if name == "llama":
        cache = model(**ids, use_cache=True).past_key_values
        assert cache.layers[0].keys.shape[-1] == 8
        assert cache.layers[0].values.shape[-1] == 6


def test_a_cache_of_something_else_than_keys_is_refused() -> None:
    """DeepSeek caches latents, from which it computes the keys of all heads."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    widths = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    config = transformers.DeepseekV3Config(vocab_size=20, hidden_size=16, intermediate_size=24, **sizes, **widths)
    model, ids = transformers.DeepseekV3ForCausalLM(config), torch.randint(20, (2, 9))

    def loss() -> Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    grower = Grower(model, torch.optim.AdamW(model.parameters(), 1e-3))
    for _ in range(2):
        loss().backward()
        grower.observe()
    grower.grow(2, [("model.layers.0.self_attn", 0)], loss=loss)
    assert loss().isfinite()
    with pytest.raises(UnsupportedError, match=r"1 heads of width 8 are cached, but attention has 2 .*use_cache=False"):
        model(ids)


def test_several_optimizers_and_an_average_of_the_weights() -> None:
    model = made("llama")
    attention = [p for name, p in model.named_parameters() if "self_attn" in name]
    others = [p for name, p in model.named_parameters() if "self_attn" not in name]
    first, second = torch.optim.AdamW(attention, 1e-3), torch.optim.SGD(others, 1e-3)
    average = AveragedModel(model)
    grower = Grower(model, [first, second], averages=[average])
    for b in (2, 3):
        loss_of(model, batch("llama", b)).backward()
        grower.observe()
        first.step()
        average.update_parameters(model)
    grower.grow(2, [("model.layers.0.self_attn", 1)], loss=lambda: loss_of(model, batch("llama", 4)))
    new = model.model.layers[0].self_attn.headwise_widths
    assert any(p is new.key_weight for group in first.param_groups for p in group["params"])
    average.update_parameters(model)
    copied = average.module.model.layers[0].self_attn.headwise_widths
    assert copied.added == new.added == (0, 2)
    torch.testing.assert_close(copied.key_weight, new.key_weight)
    shared = torch.optim.SGD(attention, 1e-3)
    with pytest.raises(InputError, match="2 optimizers hold"):
        Grower(model, [first, shared, torch.optim.SGD([new.key_weight], 1.0)])


def test_models_that_cannot_grow_say_why() -> None:
    class Sharded(nn.Module):
        pass

    with pytest.raises(InputError, match="no trainable MultiHead layer and is no trainable model of transformers"):
        Grower(Sharded(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0))
    model = made("llama")
    model.model.rewritten = None
    model.config.headwise = {"sites": {}}
    with pytest.raises(UnsupportedError, match="was rewritten; resize heads before"):
        resized(model)
