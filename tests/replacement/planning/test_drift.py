"""Drift against its formula written out, and what is recorded of a call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headwise.replacement import Choice
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.planning import drift as module
from headwise.replacement.planning.capture import capture, find_sites, layers_of
from headwise.replacement.planning.drift import PooledStates, Predictions, answer_for, run_with
from tests.models.tiny_models import ALL

pytest.importorskip("transformers")


def test_divergence_and_loss_of_a_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 5)
    torch.manual_seed(0)
    model = ALL["gpt2"]()[0].eval().double()
    batch = {"input_ids": torch.randint(99, (2, 12))}
    sites = find_sites(model, batch)
    answer = answer_for(model, batch, causal=True)
    heads = {name: MixedHeads([Choice("uniform")] * site.heads, site.width, 12) for name, site in sites.items()}
    before, after = run_with(model, batch, answer, {}), run_with(model, batch, answer, heads)
    found = answer.drift(model, batch, before, after)
    weight = model.get_input_embeddings().weight.double()
    p, q = ((states.double() @ weight.T).log_softmax(-1)[:, :-1] for states in (before, after))
    labels = batch["input_ids"][:, 1:]
    losses = [F.nll_loss(x.mT, labels, reduction="none") for x in (p, q)]
    torch.testing.assert_close(
        found[0], F.kl_div(q, p, reduction="none", log_target=True).sum(-1), rtol=1e-3, atol=1e-7
    )
    torch.testing.assert_close(found[1], losses[1] - losses[0], rtol=1e-3, atol=1e-5)
    assert found[0][:, 1:].min() > 0  # the first token has one key


def test_a_model_with_a_head_is_compared_by_its_predictions() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    body = ALL["llama"]()[0]
    config = body.config
    config.tie_word_embeddings = False
    whole = transformers.LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(99, (1, 9))}
    answer = answer_for(whole, batch, causal=True)
    assert isinstance(answer, Predictions)
    states = run_with(whole, batch, answer, {})
    with torch.no_grad():
        torch.testing.assert_close(whole.lm_head(states), whole(**batch).logits)
    assert isinstance(answer_for(whole.model, batch, causal=True), PooledStates)  # its output embedding is not known


def test_a_text_that_is_all_masked_has_not_moved() -> None:
    before, after = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    answer, nothing = PooledStates(), torch.nn.Identity()
    assert answer.drift(nothing, {}, before, after).flatten().tolist() == [1.0, 0.0]
    assert answer.drift(nothing, {}, before, after[[0, 0]]).flatten().tolist() == [1.0, 1.0]
    gradient = next(answer.gradients(nothing, before, torch.Generator()))
    assert gradient[1].abs().max() == gradient[0, 0].abs() == 0


def test_captured_padding_stands_at_the_end() -> None:
    torch.manual_seed(0)
    model, _ = ALL["bert"]()
    ids = torch.randint(99, (2, 10))
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    batch = {"input_ids": ids, "attention_mask": mask}
    name = next(iter(find_sites(model.eval(), batch)))
    (sample,) = capture(model, [batch], [name])[name]
    x = sample.inputs
    assert x.mask.key_mask is not None
    assert x.mask.key_mask[1, 0].tolist() == [True] * 6 + [False] * 4
    weights = (x.scale * x.q @ x.k.mT).masked_fill(~x.mask.key_mask[:, None], -1e30).softmax(-1)
    torch.testing.assert_close(weights @ sample.v, sample.output, atol=1e-5, rtol=1e-4)


def test_layers_are_members_of_lists() -> None:
    model, batch = ALL["bert"]()
    found = layers_of(model, list(find_sites(model.eval(), batch)))
    assert [type(layer).__name__ for layer in found.values()] == ["BertLayer", "BertLayer"]
    assert layers_of(model, ["embeddings"]) == {}
