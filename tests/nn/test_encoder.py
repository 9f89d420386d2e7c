"""The encoder with every operator, masks, norms and other layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headwise.errors import InputError, UnsupportedError
from headwise.nn.builders import LearnedBlocks, LearnedConvolution, LearnedProjection
from headwise.nn.encoder import Encoder
from headwise.nn.recurrent import Recurrent
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


def test_post_norm_and_other_layers() -> None:
    x = torch.randn(2, 7, 8)
    out = Encoder(8, 2, 2, norm_first=False)(x)
    torch.testing.assert_close(out.mean(-1), torch.zeros(2, 7), atol=1e-6, rtol=0)
    assert Encoder(8, 2, 2, layer=lambda: Recurrent(8))(x).shape == x.shape


def test_unsupported_arguments_are_rejected() -> None:
    with pytest.raises(InputError, match="build has 2 operators for a depth of 3"):
        Encoder(8, 2, 3, build=[softmax, softmax])
    with pytest.raises(InputError, match="depth must be at least 1"):
        Encoder(8, 2, 0)
    with pytest.raises(UnsupportedError, match="use norm_first=True"):
        Encoder(8, 2, 1, norm_first=False, reversible=True)
