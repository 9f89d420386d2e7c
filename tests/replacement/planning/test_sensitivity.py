"""Predicted drift against measured drift of small changes, gradients against finite differences, models restored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise.models.run import as_it_was
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.planning.allocation import Allocation, DriftModel, gram_of
from headwise.replacement.planning.capture import find_sites
from headwise.replacement.planning.drift import PooledStates, Predictions, answer_for, run_with
from headwise.replacement.planning.sensitivity import sensitivities
from headwise.replacement.standard_kinds import SOFTMAX
from tests.models.tiny_models import ALL

pytest.importorskip("transformers")


def made(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, _ = ALL[family]()
    model = model.eval().double()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            weight.data.mul_(4)  # at random, answers hardly depend on the input
    return model, {"input_ids": torch.randint(99, (1, 24))}


def shaken(heads: int, width: int, which: tuple[int, ...], size: float) -> Callable[..., Tensor]:
    """Exact attention, with the outputs of some heads moved by a fixed random tensor of a small size."""
    exact = MixedHeads([SOFTMAX] * heads, width, 24)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        out = exact(q, k, v, key_mask=key_mask, causal=causal, scale=scale)
        noise = torch.zeros_like(out)
        for head in which:
            generator = torch.Generator().manual_seed(head)
            noise[:, head] = size * torch.randn(out[:, head].shape, generator=generator, dtype=out.dtype)
        return out + noise

    return attend


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_predicted_drift_is_the_measured_one_for_small_changes(family: str) -> None:
    """Of one key-value head alone, and of all heads of two sites together, cross terms included."""
    model, batch = made(family)
    sites = find_sites(model, batch)
    answer = answer_for(model, batch, causal=family != "bert")
    answer = PooledStates(probes=600) if isinstance(answer, PooledStates) else answer
    assert isinstance(answer, PooledStates | Predictions)
    site = next(iter(sites.values()))
    groups, shared = site.key_value_heads, site.heads // site.key_value_heads
    every = tuple(range(site.heads))
    candidates = {name: [shaken(site.heads, site.width, every, size) for size in (0.0, 1e-4)] for name in sites}
    repeats = 1 if isinstance(answer, PooledStates) else 80  # labels are drawn again
    x = [
        torch.cat(
            list(sensitivities(model, batch, sites, candidates, answer, torch.Generator().manual_seed(i)).values())
        )
        for i in range(repeats)
    ]
    together = torch.cat(x, dim=-1)
    assert together.shape[:2] == (groups * len(sites), 2)
    model_of_drift = DriftModel(torch.ones(len(together), 2), {"text": gram_of(together)})
    before = run_with(model, batch, answer, {})

    def measured(replacements: dict[str, Callable[..., Tensor]]) -> float:
        after = run_with(model, batch, answer, replacements)
        return float(answer.drift(model, batch, before, after)[0].mean())

    one = measured({site.name: shaken(site.heads, site.width, every[:shared], 1e-4)})
    units = len(together)
    first = model_of_drift.predicted(Allocation((1, *[0] * (units - 1)), 0.0))["text"]
    assert first == pytest.approx(one, rel=0.25)
    all_heads = measured({name: candidates[name][1] for name in sites})
    assert model_of_drift.predicted(Allocation((1,) * units, 0.0))["text"] == pytest.approx(all_heads, rel=0.3)
    assert model_of_drift.predicted(Allocation((0,) * units, 0.0))["text"] < 1e-12 * one


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_model_is_left_as_it_was(family: str, frozen: bool) -> None:
    model, batch = made(family)
    model.train()
    for weight in model.parameters():
        weight.requires_grad_(not frozen)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with as_it_was(model):
        sites = find_sites(model, batch)
        answer = answer_for(model, batch, causal=family != "bert")
        candidates = {n: [shaken(s.heads, s.width, (0,), 0.1)] for n, s in sites.items()}
        x = sensitivities(model, batch, sites, candidates, answer, torch.Generator())
    assert all(float(each.abs().max()) > 0 for each in x.values())
    assert model.training
    assert all(weight.grad is None and weight.requires_grad is not frozen for weight in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_recomputed_layers_give_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made("llama")
    sites = find_sites(model, batch)
    candidates = {n: [shaken(s.heads, s.width, (0, 1), 0.1)] for n, s in sites.items()}

    def run() -> dict[str, Tensor]:
        return sensitivities(model, batch, sites, candidates, Predictions(), torch.Generator().manual_seed(0))

    recomputed = run()
    monkeypatch.setattr("headwise.replacement.planning.sensitivity.layers_of", lambda model, sites: {})
    for name, x in run().items():
        torch.testing.assert_close(x, recomputed[name])


class Decoder(nn.Module):
    """A causal language model whose layers call torch's attention themselves; all uses of one if `shared`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(out.transpose(1, 2).flatten(2))

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(99, 16), nn.Linear(16, 99)
        self.layers = nn.ModuleList(Decoder.Layer() for _ in range(1 if shared else 2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index in range(2):
            x = self.layers[index % len(self.layers)](x)
        return self.lm_head(x)


@pytest.mark.parametrize("shared", [False, True])
def test_layers_that_attend_themselves(shared: bool) -> None:
    """Every use of a layer has samples of its own, none of which is zero."""
    torch.manual_seed(0)
    model, batch = Decoder(shared).eval(), {"input_ids": torch.randint(99, (1, 24))}
    sites = find_sites(model, batch)
    assert list(sites) == ["layers.0", "layers.0@2" if shared else "layers.1"]
    candidates = {n: [shaken(s.heads, s.width, (0, 1), 0.1)] for n, s in sites.items()}
    x = sensitivities(model, batch, sites, candidates, Predictions(), torch.Generator().manual_seed(0))
    assert x.keys() == sites.keys()
    assert all((each != 0).any() for each in x.values())
