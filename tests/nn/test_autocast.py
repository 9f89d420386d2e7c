"""Every builder and layer under autocast on the CPU: it runs forward and backward, returns the dtype that torch's own
layers return, and stays near the result in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from headwise.convolution import convert, soft
from headwise.nn import (
    DropIn,
    Encoder,
    GridAttention,
    LearnedBlocks,
    LearnedConvolution,
    LearnedProjection,
    LearnedQuery,
    LinformerAttention,
    MultiHead,
    PatchEmbedding,
    Recurrent,
    Reversible,
    frame_embedding,
)
from headwise.nn.attention_layer import Builder
from headwise.operators import (
    concatenation,
    dot_product,
    efficient,
    embedded_gaussian,
    factored,
    factored_blocks,
    fixed,
    fixed_steps,
    gaussian,
    hashed,
    near_far,
    nystrom,
    offset,
    positional,
    projected,
    projected_blocks,
    quadratic,
    softmax,
    strided,
    strided_steps,
    toeplitz,
    toeplitz_softmax,
    uniform,
    window,
    window_low_rank,
)
from headwise.operators.linear.projections import pooling
from headwise.testing.contract import normal

N, WIDTH = 12, 8
HALVES = [torch.bfloat16, torch.float16]
ERROR = {torch.bfloat16: 6e-2, torch.float16: 1e-2}


class NearFarBuilder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(normal(3, 4, seed=seed).float()) for seed in (0, 1))
        self.c = nn.Parameter(normal(3, seed=2).float())

    def forward(self, q: Tensor, k: Tensor, **masks: Tensor):
        return near_far(q, k, self.a, self.b, self.c, block=2, leading=1, **masks)


ROTATIONS = normal(2, 4, 2, seed=3).float()
BUILDERS: dict[str, Callable[[], Builder]] = {
    "softmax": lambda: softmax,
    "gaussian": lambda: gaussian,
    "embedded_gaussian": lambda: partial(embedded_gaussian, theta=nn.Linear(4, 4), phi=normal(4, 4, seed=0).float()),
    "dot_product": lambda: dot_product,
    "concatenation": lambda: lambda q, k: concatenation(q, k, normal(8, seed=1).float()),
    "uniform": lambda: lambda q, k: uniform(q.shape[-2], k.shape[-2]),
    "window": lambda: partial(window, width=3),
    "strided": lambda: strided,
    "strided_steps": lambda: strided_steps,
    "fixed": lambda: fixed,
    "fixed_steps": lambda: fixed_steps,
    # one bucket: which pairs meet does not depend on rounding
    "hashed": lambda: partial(hashed, rotations=ROTATIONS, chunk=N),
    "efficient": lambda: efficient,
    "efficient causal": lambda: partial(efficient, causal=True),
    "factored": lambda: LearnedProjection(factored, N, 4),
    "factored_blocks": lambda: LearnedBlocks(factored_blocks, 4, 2),
    "projected": lambda: LearnedProjection(projected, N, 4, shared=False),
    "projected_blocks": lambda: LearnedBlocks(projected_blocks, 4, 2),
    "projected convolution": lambda: LearnedConvolution(projected, 3),
    "nystrom": lambda: partial(nystrom, landmarks=4),
    "window_low_rank": lambda: lambda q, k: window_low_rank(q, k, 3, pooling(N, 4)),
    "near_far": NearFarBuilder,
    "positional": lambda: lambda q, k: positional([normal(3, 3, seed=0).float(), normal(4, 4, seed=1).float()]),
    "quadratic": lambda: lambda q, k: quadratic((3, 4), normal(2, seed=0).float(), torch.zeros(2)),
    "offset": lambda: lambda q, k: offset(N, N, -1),
    "toeplitz": lambda: lambda q, k: toeplitz(normal(2 * N - 1, seed=0).float(), N, N),
    "toeplitz_softmax": lambda: lambda q, k: toeplitz_softmax(normal(2 * N - 1, seed=0).float(), N, N),
}

SEQUENCE, IMAGE = (2, N, WIDTH), (2, 3, 6, 5)
# layer, shape of its input, and the layer of torch whose output dtype it has
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[], nn.Module]]] = {
    "MultiHead": (lambda: MultiHead(WIDTH, 2), SEQUENCE, lambda: nn.Linear(WIDTH, WIDTH)),
    "MultiHead, ragged": (
        lambda: MultiHead(WIDTH, 2, key_width=(2, 5)),
        SEQUENCE,
        lambda: nn.Linear(WIDTH, WIDTH),
    ),
    "LearnedQuery": (lambda: LearnedQuery(WIDTH, 3, 2), SEQUENCE, lambda: nn.Linear(WIDTH, WIDTH)),
    "LinformerAttention": (lambda: LinformerAttention(WIDTH, 2, N, 4), SEQUENCE, lambda: nn.Linear(WIDTH, WIDTH)),
    "Recurrent": (lambda: Recurrent(WIDTH), SEQUENCE, lambda: nn.Linear(WIDTH, WIDTH)),
    "Encoder": (
        lambda: Encoder(WIDTH, 2, 2),
        SEQUENCE,
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, norm_first=True),
            2,
            nn.LayerNorm(WIDTH),
            enable_nested_tensor=False,
        ),
    ),
    "Encoder, norm last": (
        lambda: Encoder(WIDTH, 2, 2, norm_first=False),
        SEQUENCE,
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0), 2, enable_nested_tensor=False),
    ),
    "Encoder, reversible": (
        lambda: Encoder(WIDTH, 2, 2, reversible=True),
        SEQUENCE,
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, norm_first=True),
            2,
            nn.LayerNorm(WIDTH),
            enable_nested_tensor=False,
        ),
    ),
    "GridAttention": (lambda: GridAttention(3, 1), IMAGE, lambda: nn.Conv2d(3, 3, 1)),
    "PatchEmbedding": (lambda: PatchEmbedding(3, (2, 2), WIDTH), IMAGE, lambda: nn.Conv2d(3, WIDTH, 2)),
    "frame_embedding": (lambda: frame_embedding(4, WIDTH), (2, 1, 16), lambda: nn.Conv1d(1, WIDTH, 4)),
    **{
        f"convert, {mode}, {border}": (
            lambda mode=mode, border=border: _converted(mode, border),
            IMAGE,
            lambda: nn.Conv2d(3, 4, 3),
        )
        for mode in ("exact", "soft", "free")
        for border in ("zeros", "circular")
    },
}


def _converted(mode: str, border: str) -> nn.Module:
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode=border)
    if mode == "exact":
        return convert(conv)[0]
    if mode == "soft":
        return convert(conv, soft(2.0))[0]
    from headwise.convolution.conversion import geometry_of
    from headwise.nn import QuadraticAttention

    return QuadraticAttention(
        geometry_of(conv),
        conv.weight.detach().clone(),
        None,
        centres=normal(9, 2, seed=0).float(),
        log_widths=torch.zeros(2),
    )


def _agrees(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The output under autocast, after comparing it and its gradients with those in float32."""

    def gradients(out: Tensor) -> list[Tensor]:
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        pull = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
        return list(torch.autograd.grad(out, leaves, pull, allow_unused=True, materialize_grads=True))

    x = x.requires_grad_()
    plain = layer(x)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    for a, b in zip([out, *gradients(out)], [plain, *gradients(plain)], strict=True):
        error = (a.float() - b).abs().amax() / b.abs().amax().clamp(min=1)
        assert error < ERROR[dtype], f"error {error:.1e} in {dtype}"
    return out


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_in_a_layer(name: str, dtype: torch.dtype) -> None:
    layer = MultiHead(WIDTH, 2, build=BUILDERS[name]())
    assert _agrees(layer, normal(2, N, WIDTH, seed=0).float(), dtype).dtype == dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name: str, dtype: torch.dtype) -> None:
    make, shape, twin = LAYERS[name]
    x = normal(*shape, seed=0).float()
    out = _agrees(make(), x, dtype)
    with torch.autocast("cpu", dtype):
        assert out.dtype == twin()(x).dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_converted_convolution_behind_another_layer(dtype: torch.dtype) -> None:
    """Its input is in half precision, its weights are not."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), *(_converted(mode, "reflect") for mode in ("exact",)))
    for mode in ("exact", "soft", "free"):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), _converted(mode, "zeros"))
        assert _agrees(model, normal(*IMAGE, seed=0).float(), dtype).dtype == dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_drop_in_with_weights(dtype: torch.dtype) -> None:
    torch_layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True).eval()
    x = normal(2, N, WIDTH, seed=0).float()
    with torch.autocast("cpu", dtype), torch.no_grad():
        out, weights = DropIn(MultiHead.from_torch(torch_layer))(x, x, x)
        expected, _ = torch_layer(x, x, x)
    assert out.dtype == expected.dtype
    assert weights is not None
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(2, N), rtol=0, atol=ERROR[dtype])


def test_sums_do_not_overflow_in_half_precision() -> None:
    """K^T V of 60 000 is 65504 times too close to the end of float16 to be summed there."""
    k = torch.full((1024, 4), 16.0)
    with torch.autocast("cpu", torch.float16):
        for operator in (dot_product(k.half(), k.half()), dot_product(k, k)):
            out = operator(torch.ones(1024, 4, dtype=operator.like.dtype))
            torch.testing.assert_close(out.float(), torch.full((1024, 4), 1024.0))


def test_reversible_pairs() -> None:
    stack = Reversible([(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))])
    x = normal(2, WIDTH, seed=0).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = stack(x, x)[1]
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(stack.plain(x, x)[1].sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=ERROR[torch.bfloat16])
