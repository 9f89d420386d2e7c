"""The encoder, its reversible form, learned projections, the recurrent baseline and embeddings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn.builders import LearnedBlocks, LearnedConvolution, LearnedProjection
from headwise.nn.embeddings import PatchEmbedding, frame_embedding
from headwise.nn.encoder import Encoder
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.nn.recurrent import Recurrent
from headwise.nn.reversible import Reversible
from headwise.operators import (
    efficient,
    factored,
    factored_blocks,
    fixed,
    hashed,
    nystrom,
    projected,
    projected_blocks,
    softmax,
    strided,
    window,
)
from headwise.operators.relative.encodings import cells, sinusoidal

BUILDERS = {
    "softmax": softmax,
    "window": partial(window, width=5),
    "strided": partial(strided, stride=4),
    "fixed": partial(fixed, block=4),
    "hashed": partial(hashed, chunk=4, rounds=2),
    "efficient": efficient,
    "nystrom": partial(nystrom, landmarks=4),
    "projected": LearnedProjection(projected, 12, 4),
    "factored": LearnedProjection(factored, 12, 4, heads=2, shared=False),
    "convolution": LearnedConvolution(factored, 3),
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("reversible", [False, True])
def test_every_operator_trains_in_a_stack(name: str, reversible: bool) -> None:
    model = Encoder(8, 2, depth=2, build=BUILDERS[name], reversible=reversible)
    x = torch.randn(3, 12, 8)
    out = model(x, key_mask=torch.arange(12) < torch.tensor([[12], [9], [5]]))
    assert out.shape == x.shape
    out.square().mean().backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None, parameter
        assert p.grad.isfinite().all()


def test_padding_does_not_change_real_positions() -> None:
    model = Encoder(8, 2, depth=3, build=partial(window, width=5))
    x = torch.randn(1, 12, 8)
    out = model(x, key_mask=(torch.arange(12) < 9).unsqueeze(0))
    torch.testing.assert_close(out[:, :9], model(x[:, :9]), atol=1e-5, rtol=0)


def test_causal_stack_does_not_look_ahead() -> None:
    for build in (efficient, LearnedBlocks(projected_blocks, 4, 2), LearnedBlocks(factored_blocks, 4, 2, shared=False)):
        model = Encoder(8, 2, depth=2, build=build)
        x = torch.randn(1, 12, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x, causal=True)[:, 6, 0].sum(), x)
        assert gradient[:, 7:].abs().max() == 0
        assert gradient[:, :7].abs().amax(-1).min() > 0


def test_one_builder_for_all_layers_and_one_for_each() -> None:
    shared = LearnedProjection(projected, 12, 4)
    assert sum(p.numel() for p in Encoder(8, 2, 3, build=shared).parameters()) == 48 + sum(
        p.numel() for p in Encoder(8, 2, 3).parameters()
    )
    each = [LearnedProjection(projected, 12, 4) for _ in range(3)]
    assert sum(p.numel() for p in Encoder(8, 2, 3, build=each).parameters()) == 144 + sum(
        p.numel() for p in Encoder(8, 2, 3).parameters()
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_reversible_gradients_equal_the_plain_ones(dropout: float) -> None:
    pairs = [
        (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
        for _ in range(4)
    ]
    pairs[3] = pairs[0]  # shared parameters add up
    stack = Reversible(pairs).double()
    x = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves = [*x, *stack.parameters()]
    results = []
    for run in (stack, stack.plain):
        torch.manual_seed(1)
        one, two = run(*x)
        loss = (one * torch.linspace(0, 1, 6)).sum() + two.square().sum()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_reversible_stores_no_activations() -> None:
    """What autograd stores for the backward pass does not grow with depth; without `reversible` it does."""

    def stored(depth: int, reversible: bool) -> int:
        model, sizes = Encoder(8, 2, depth, reversible=reversible), {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in parameters:
                sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model(torch.randn(1, 64, 8, requires_grad=True))
            total = sum(sizes.values())
        del out
        return total

    assert stored(8, True) == stored(2, True)
    assert stored(8, False) > 3 * stored(2, False)


def test_post_norm_and_other_layers() -> None:
    x = torch.randn(2, 7, 8)
    out = Encoder(8, 2, 2, norm_first=False)(x)
    torch.testing.assert_close(out.mean(-1), torch.zeros(2, 7), atol=1e-6, rtol=0)
    assert Encoder(8, 2, 2, layer=lambda: Recurrent(8))(x).shape == x.shape


def test_recurrent_padding_and_causality() -> None:
    x = torch.randn(2, 9, 8)
    key_mask = torch.arange(9) < torch.tensor([[9], [4]])
    bidirectional = Recurrent(8)
    out = bidirectional(x, key_mask=key_mask)
    torch.testing.assert_close(out[1, :4], bidirectional(x[1, :4]))
    torch.testing.assert_close(out[0], bidirectional(x[:1])[0])
    forward = Recurrent(8, causal=True)
    torch.testing.assert_close(forward(x, causal=True)[:, :5], forward(x[:, :5]))
    assert forward.cost(100).depth == 100
    with pytest.raises(UnsupportedError, match="build it with causal=True"):
        bidirectional(x, causal=True)
    with pytest.raises(UnsupportedError, match="padding must follow"):
        bidirectional(x, key_mask=key_mask.flip(-1))


def test_projections_of_other_lengths() -> None:
    q = torch.randn(1, 6, 4)
    sliced = LearnedProjection(projected, 12, 3)
    torch.testing.assert_close(sliced.fitted(sliced.e, 6).apply(torch.eye(6)), sliced.e[:, :6])
    with pytest.raises(UnsupportedError, match="at most 12 positions, but there are 20; use fit='interpolate'"):
        sliced(torch.randn(1, 20, 4), torch.randn(1, 20, 4))
    stretched = LearnedProjection(projected, 12, 3, fit="interpolate")
    for n in (6, 20):
        wide = stretched.fitted(stretched.e, n).apply(torch.ones(n, 1)).squeeze(-1)
        assert wide.shape == (3,)
    constant = LearnedProjection(projected, 12, 3, fit="interpolate")
    nn.init.ones_(constant.e)
    torch.testing.assert_close(constant.fitted(constant.e, 20).apply(torch.ones(20, 1)), torch.full((3, 1), 12.0))
    assert stretched(q, q)(q).shape == q.shape


def test_embeddings() -> None:
    embed = PatchEmbedding(3, (4, 2), 16)
    x = torch.randn(2, 3, 8, 8)
    tokens = embed(x) - sinusoidal(cells((2, 4)), 16)
    patch = x[:, :, 4:8, 2:4].reshape(2, -1) @ embed.project.weight.reshape(16, -1).mT
    assert embed.project.bias is not None
    patch = patch + embed.project.bias
    torch.testing.assert_close(tokens[:, 5], patch)
    assert frame_embedding(100, 8, hop=50)(torch.randn(2, 1, 400)).shape == (2, 7, 8)
    positions = sinusoidal(cells((3, 5)), 12)
    assert len({tuple(row.tolist()) for row in positions}) == 15


def test_unsupported_arguments_are_rejected() -> None:
    with pytest.raises(InputError, match="build has 2 operators for a depth of 3"):
        Encoder(8, 2, 3, build=[softmax, softmax])
    with pytest.raises(InputError, match="depth must be at least 1"):
        Encoder(8, 2, 0)
    with pytest.raises(UnsupportedError, match="use norm_first=True"):
        Encoder(8, 2, 1, norm_first=False, reversible=True)
    with pytest.raises(ShapeError, match="rank must be between 1 and length = 4, but is 5"):
        LearnedProjection(projected, 4, 5)
    with pytest.raises(ShapeError, match="is smaller than a patch of"):
        PatchEmbedding(1, (4, 4), 8)(torch.zeros(1, 1, 3, 3))
    with pytest.raises(ShapeError, match="a multiple of 4"):
        PatchEmbedding(1, (4, 4), 6)
    with pytest.raises(ShapeError, match="even to be split"):
        Recurrent(7)
    with pytest.raises(InputError, match="at least one pair"):
        Reversible([])


@pytest.mark.parametrize("shared", [False, True])
def test_linformer_attention_equals_multihead_with_a_learned_projection(shared: bool) -> None:
    """E (x W) = (E x) W: values and gradients of a MultiHead with the same weights."""
    first = LinformerAttention(8, 2, 12, 4, shared=shared, bias=False).double()
    last = MultiHead(8, 2, build=LearnedProjection(projected, 12, 4, shared=shared), bias=False).double()
    last.load_state_dict(
        {
            **first.attend.state_dict(),
            **{f"build.{name}": value for name, value in first.projection.state_dict().items()},
        }
    )
    x = torch.randn(2, 10, 8, dtype=torch.float64, requires_grad=True)
    key_mask = torch.arange(10) < torch.tensor([[10], [6]])
    for masks in ({}, {"key_mask": key_mask}):
        a, b = first(x, **masks), last(x, **masks)
        torch.testing.assert_close(a, b)
        pull = torch.randn_like(a)
        leaves = [[x, *sorted_parameters(m, part)] for m, part in ((first, "projection"), (last, "build"))]
        gradients = [torch.autograd.grad(out, of, pull) for out, of in zip((a, b), leaves, strict=True)]
        torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(first(x, key_mask=key_mask)[1, :6], first(x[1:, :6])[0])


def sorted_parameters(layer: nn.Module, projection: str) -> list[nn.Parameter]:
    """Parameters in the order of their names without those of the modules that hold them."""
    named = {name.replace(projection, "projection").replace("attend.", ""): p for name, p in layer.named_parameters()}
    return [named[name] for name in sorted(named)]


def test_linformer_attention_rejects_causal_and_longer_sequences() -> None:
    layer = LinformerAttention(8, 2, 12, 4)
    with pytest.raises(UnsupportedError, match="use MultiHead with LearnedBlocks"):
        layer(torch.randn(1, 12, 8), causal=True)
    with pytest.raises(UnsupportedError, match="at most 12 positions, but there are 13"):
        layer(torch.randn(1, 13, 8))
