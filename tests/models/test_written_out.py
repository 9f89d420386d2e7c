"""Attention that a model writes out is seen too: its P, in float64, is what the model computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.examination.measure.observe import observe
from headwise.models import intercept
from headwise.models.intercept import AttentionCall
from headwise.models.provenance.written_out import _values, mask_of_scores
from headwise.models.unseen import unseen_attention
from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax

transformers = pytest.importorskip("transformers")

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


class Layer(nn.Module):
    """Two heads of width four, in one of the ways in which people write attention."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.project, self.way, self.num_heads = nn.Linear(8, 24), way, 2
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        hidden = torch.full((x.shape[1],) * 2, -1e9).triu(1)
        match self.way:
            case "matmul":
                p = ((q @ k.mT) / 2).softmax(-1)
                out = nn.functional.dropout(p, 0.5, self.training) @ v
            case "causal":
                p = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 2 + hidden, dim=-1, dtype=torch.float32)
                out = torch.matmul(p.to(v.dtype), v)
            case "einsum":
                p = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).softmax(dim=-1)
                out = torch.einsum("bhij,bjhd->bihd", p, v.transpose(1, 2)).transpose(1, 2)
            case _:  # heads in the batch axis, scores added to a bias
                q, k, v = (y.flatten(0, 1) for y in (q, k, v))
                bias = torch.linspace(0, 1, x.shape[1]).expand(len(q), x.shape[1], -1)
                p = nn.functional.softmax(bias.baddbmm(batch1=q, batch2=k.mT, alpha=0.5), dim=-1)
                out, p = (y.unflatten(0, (len(x), 2)) for y in (torch.bmm(p, v), p))
        self.weights.append(p.double())
        return x + out.transpose(1, 2).flatten(-2)


def dense(call: AttentionCall) -> Tensor:
    return Softmax(Scores(call.q.double(), call.k.double(), call.scale, call.mask)).dense()


@pytest.mark.parametrize("way", ["matmul", "causal", "einsum", "folded"])
def test_ways_to_write_it(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(way), Layer(way)).eval()
    calls: list[AttentionCall] = []
    x = torch.randn(3, 6, 8)
    with torch.no_grad(), intercept(model, calls.append):
        model(x)
    assert [(c.site, c.kind, c.causal) for c in calls] == [
        ("0", "self", way == "causal"),
        ("1", "self", way == "causal"),
    ]
    for call, layer in zip(calls, model, strict=True):
        assert call.q.shape == (3, 2, 6, 4)  # their width is that of the model's own
        assert isinstance(layer, Layer)
        torch.testing.assert_close(dense(call), layer.weights[0], rtol=1e-5, atol=1e-6)
    found = observe(model, x)
    assert len(found) == 3
    expected = torch.special.entr(torch.stack([layer.weights[0] for layer in model]))  # pyright: ignore
    entropy = expected.sum(-1).mean(-1).transpose(0, 1).flatten(1)  # (sequences, layers x heads)
    torch.testing.assert_close(torch.stack([x.numbers["entropy"] for x in found]), entropy, rtol=1e-4, atol=1e-5)
    assert unseen_attention(model, x) == []


def test_keys_of_another_sequence() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return (self.query(x) @ self.key(other).mT).softmax(-1) @ other

    calls: list[AttentionCall] = []
    model, x, other = Two(), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    with torch.no_grad(), intercept(model, calls.append):
        model(x, other)
        model(x, x)
    assert [c.kind for c in calls] == ["cross", "self"]


def test_a_router_is_no_attention() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.router(x).softmax(-1) @ self.experts

    calls: list[AttentionCall] = []
    with torch.no_grad(), intercept(model := nn.Sequential(Layer("matmul"), Experts()), calls.append):
        model(torch.randn(1, 6, 8))
    assert [c.site for c in calls] == ["0"]


def test_orders_of_axes() -> None:
    v = torch.randn(9, 2, 4, 5)
    found = _values("bhij,jbhd->bihd", 4, v)
    assert found is not None
    assert torch.equal(found, v.permute(1, 2, 0, 3))
    shared = _values("b h i j, b j d -> b h i d", 4, torch.randn(2, 9, 5))
    assert shared is not None
    assert shared.shape == (2, 1, 9, 5)
    windows = _values("...hij,...jhd->...ihd", 5, v := torch.randn(2, 3, 9, 4, 5))
    assert windows is not None
    assert torch.equal(windows, v.transpose(2, 3))
    fewer = _values("...ij,...jd->...id", 4, torch.randn(3, 9, 5))  # an ellipsis stands for the last axes of the batch
    assert fewer is not None
    assert fewer.shape == (1, 3, 9, 5)
    assert _values("bij,jk->bijk", 3, torch.randn(9, 5)) is None  # nothing is summed


def test_scores_that_are_large_by_themselves_are_not_masked() -> None:
    """A mask of -1e4 or less is one only beside scores of ordinary size."""
    visible, hidden = torch.tensor([[3.0, -2.0]]), torch.tensor([[3.0, -1e4]])
    assert mask_of_scores(visible[None, None]).visible is None
    found = mask_of_scores(hidden[None, None]).visible
    assert found is not None
    assert found.flatten().tolist() == [True, False]
    for large in ([[7e5, -7e5]], [[-9e4, -8e4]]):
        assert mask_of_scores(torch.tensor(large)[None, None]).visible is None
    both = mask_of_scores(torch.tensor([[[[7e5, -7e5, -math.inf]]]])).visible
    assert both is not None
    assert both.flatten().tolist() == [True, True, False]


def mpnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.MPNetConfig(vocab_size=60, **LAYERS, attn_implementation="eager")
    return transformers.MPNetModel(config), {"input_ids": torch.randint(5, 60, (2, 12))}


def bloom() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)
    mask = torch.ones(2, 12, dtype=torch.long)
    return transformers.BloomModel(config), {"input_ids": torch.randint(5, 60, (2, 12)), "attention_mask": mask}


def deberta() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.DebertaV2Config(vocab_size=60, **LAYERS, relative_attention=True, pos_att_type=["c2p", "p2c"])
    return transformers.DebertaV2Model(config), {"input_ids": torch.randint(5, 60, (2, 12))}


def perceiver() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.PerceiverConfig(
        num_latents=6,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
    )
    return transformers.PerceiverModel(config), {"inputs": torch.randn(2, 10, 16)}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # in that model's own source
@pytest.mark.parametrize("build", [mpnet, bloom, deberta, perceiver], ids=lambda build: build.__name__)
def test_families_of_transformers(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    """Entropy of every head from the weights that transformers returns, in float64."""
    torch.manual_seed(0)
    model, batch = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # away from uniform attention
        out: Any = model.eval()(**batch, output_attentions=True)
    weights = [*(getattr(out, "cross_attentions", None) or ()), *out.attentions]
    found = observe(model, batch, with_spectra=False)
    for index in range(2):
        expected = torch.cat([torch.special.entr(p[index].double()).sum(-1).mean(-1) for p in weights])
        torch.testing.assert_close(found[index].numbers["entropy"], expected, rtol=1e-4, atol=1e-5)
    assert {site.causal for site in found[0].sites} == {build is bloom}
    assert unseen_attention(model, batch) == []


def test_two_softmaxes_of_sums_of_the_same_products() -> None:
    """As in LiLT: scores of text and of layout are computed first, and each attention adds the other's."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 32)

        def forward(self, x: Tensor) -> Tensor:
            a, b, v, w = self.project(x).unflatten(-1, (4, 2, 4)).permute(2, 0, 3, 1, 4)
            text, layout = a @ a.mT, b @ b.mT
            first = (layout + text).softmax(-1) @ v
            return first + (text + 2 * layout).softmax(-1) @ w

    calls: list[AttentionCall] = []
    model, x = nn.Sequential(Both()), torch.randn(2, 5, 8)
    with torch.no_grad(), intercept(model, calls.append):
        model(x)
    assert [(c.site, c.v.shape) for c in calls] == [("0", (2, 2, 5, 4)), ("0@2", (2, 2, 5, 4))]
    assert unseen_attention(model, x) == []


def test_padding_that_attends_to_itself_is_no_token() -> None:
    """XLNet's mask leaves each token its own key, also where the batch says that it is padding."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24, initializer_range=0.5)
    model, ids = transformers.XLNetModel(config).double().eval(), torch.randint(50, (1, 12))
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[1, :8] = 0
    padded = observe(model, {"input_ids": ids.repeat(2, 1), "attention_mask": keep})[1]
    (alone,) = observe(model, {"input_ids": ids[:, 8:]})
    assert padded.lengths == alone.lengths == [(4, 4)] * 2
    torch.testing.assert_close(padded.numbers["entropy"], alone.numbers["entropy"])
    torch.testing.assert_close(padded.spectral["effective_rank"], alone.spectral["effective_rank"])


def test_attention_of_a_model_that_takes_its_mask_from_the_cache_is_that_of_its_own_call() -> None:
    """FSMT's decoder is causal only without use_cache, which its configuration sets."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "src_vocab_size": 50, "tgt_vocab_size": 50}
    model = transformers.FSMTModel(transformers.FSMTConfig(langs=["a", "b"], **sizes, **heads)).eval()
    batch = {"input_ids": torch.randint(3, 50, (1, 8)), "decoder_input_ids": torch.randint(3, 50, (1, 8))}

    def later(batch: dict) -> Tensor:
        return observe(model, batch)[0].numbers["next_mass"][2:4]  # of the decoder's self-attention

    assert torch.equal(later({**batch, "use_cache": False}), torch.zeros(2))
    assert bool((later(batch) > 0).all())
