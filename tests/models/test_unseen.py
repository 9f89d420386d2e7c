"""Attention that cannot be seen is named: where it is, its class, and why; nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.examination import examine
from headwise.models.unseen import BY_HAND, DID_NOT_RUN, FLEXIBLE, OTHERWISE, SCRIPTED, unseen_attention
from tests.models.tiny_models import ALL


class ByHand(nn.Module):
    """O^T = V^T P^T, written out: the weights are the second factor, so that it is not recognised."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(8, 24), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = self.dropout((q @ k.mT / 2).softmax(-1)).to(v.dtype)
        return x + (v.mT @ p.mT).mT.transpose(1, 2).flatten(-2)


class Recognised(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        p = torch.nn.functional.softmax(torch.einsum("bic,bjc->bij", q, k), dim=-1, dtype=torch.float32)
        return x + torch.einsum("bij,bjc->bic", p, v)


class Library(nn.Module):
    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.layer, self.need_weights = nn.MultiheadAttention(8, 2, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.layer(x, x, x, need_weights=self.need_weights)
        return x + (out if weights is None else out + weights.sum())


class LinearAttention(nn.Module):
    """No softmax at all: known by its names."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        return q.relu() @ (k.relu().mT @ v)


class Gate(nn.Module):
    """A softmax over experts is no attention, though it has three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.router(x).softmax(-1).amax(-1, keepdim=True) * self.experts(x)


def names(model: nn.Module, x: Any) -> dict[str, tuple[str, str]]:
    return {found["name"]: (found["class"], found["why"]) for found in unseen_attention(model.eval(), x)}


X = torch.randn(1, 6, 8)


def test_two_of_four_layers_written_by_hand() -> None:
    model = nn.Sequential(Library(), ByHand(0.5), Library(need_weights=True), Recognised())
    assert names(model, X) == {"1": ("ByHand", BY_HAND)}
    found = examine(model, [X])
    assert [site["name"] for site in found.sites] == ["0.layer", "2.layer", "3"]
    assert [x["name"] for x in found.unseen] == ["1"]
    assert "1 module that may attend was not measured: 1 (ByHand)" in found.advice[0]["text"]


def test_a_bert_with_a_trunk_written_by_hand() -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.narrow, self.trunk = ALL["bert"]()[0], nn.Linear(32, 8), nn.ModuleList([ByHand(), ByHand()])

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.narrow(self.bert(input_ids).last_hidden_state)
            for block in self.trunk:
                x = block(x)
            return x

    batch = {"input_ids": torch.randint(99, (1, 12))}
    assert names(Trunk(), batch) == {"trunk.0": ("ByHand", BY_HAND), "trunk.1": ("ByHand", BY_HAND)}


@pytest.mark.filterwarnings("ignore")  # torch advises against TorchScript
@pytest.mark.parametrize("make", [Library, ByHand])
def test_traced_submodules(make: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(make().eval(), X, check_trace=False)
    assert names(nn.Sequential(Library(), traced), X) == {"1": (make.__name__, SCRIPTED)}


def test_flex_attention() -> None:
    """It can neither be seen nor watched, compiled or not; the model runs all the same."""
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.project, self.function = nn.Linear(8, 32), function

        def forward(self, x: Tensor) -> Tensor:
            q = self.project(x).unflatten(-1, (2, 16)).transpose(1, 2)
            return x + self.function(q, q, q).sum((1, 3))[..., None]

    functions = (flex_attention, torch.compile(flex_attention, backend="eager"))
    model = nn.Sequential(Library(), *map(Flexible, functions), ByHand())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to be compiled
        found = names(model, torch.randn(1, 16, 8))
    assert found == {"1": ("Flexible", FLEXIBLE), "2": ("Flexible", FLEXIBLE), "3": ("ByHand", BY_HAND)}


def test_modules_that_are_called_attention() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.linear_attn, self.cross_attn = Library(), LinearAttention(), Library().layer

        def forward(self, x: Tensor) -> Tensor:
            return self.linear_attn(self.layer(x))

    assert names(Model(), X) == {
        "linear_attn": ("LinearAttention", OTHERWISE),
        "cross_attn": ("MultiheadAttention", DID_NOT_RUN),
    }


def test_what_is_seen_or_no_attention_is_not_named() -> None:
    for name, build in ALL.items():
        assert unseen_attention(build()[0].eval(), build()[1]) == [], name
    assert names(nn.Sequential(Library(), Gate(), nn.Linear(8, 8)), X) == {}
    assert names(Root(), X) == {}


class Root(nn.Module):
    """The model is the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.attention_dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x)[:, None], self.key(x)[:, None], x[:, None])[:, 0]


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(Library(), ByHand(0.5)).train()
    state = torch.get_rng_state()
    assert len(unseen_attention(model, X)) == 1
    assert model.training
    assert model[1].dropout.training
    assert torch.equal(torch.get_rng_state(), state)
