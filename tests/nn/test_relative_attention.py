"""RelativeAttention against its four terms written out pair by pair, and against convolutions that it starts from."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from headwise.convolution import convert, soft, to_convolution, with_content
from headwise.errors import HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.nn import (
    AbsoluteEncoding,
    ConvolutionGeometry,
    LearnedEncoding,
    QuadraticEncoding,
    RelativeAttention,
    SinusoidalEncoding,
)
from headwise.nn.position_encodings import Encoding, PositionEncoding
from headwise.operators.claims import Claim
from headwise.operators.relative.encodings import cells
from headwise.operators.relative.positional import Positional
from headwise.testing import references
from headwise.testing.contract import normal
from headwise.testing.counting import count_multiply_adds

GRIDS = {1: (6,), 2: (3, 4), 3: (2, 3, 2)}
ENCODINGS: dict[str, Callable[[int], Encoding]] = {
    "quadratic": lambda axes: partial(QuadraticEncoding, alpha=0.7),
    "sinusoidal": lambda axes: partial(SinusoidalEncoding, width=4 * axes),
    "learned": lambda axes: partial(LearnedEncoding, grid=[g + 1 for g in GRIDS[axes]], width=5),
    "absolute": lambda axes: AbsoluteEncoding,
    "absolute, learned": lambda axes: partial(AbsoluteEncoding, grid=[g + 1 for g in GRIDS[axes]]),
}


def layer(kind: str, axes: int, seed: int = 0, **options) -> RelativeAttention:
    torch.manual_seed(seed)
    options = {"key_width": 3, "out_width": 5, **options}
    made = RelativeAttention(12, 4, axes=axes, encoding=ENCODINGS[kind](axes), **options).double()
    with torch.no_grad():
        for parameter in made.parameters():  # nothing is small
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return made


def sinusoids(d: tuple[int, ...], width: int) -> Tensor:
    """sin and cos of d_a / 10000^(2i/w), w = width / D columns for each axis."""
    w = width // len(d)
    angles = [[x / 10000 ** (2 * i / w) for i in range(w // 2)] for x in d]
    return torch.tensor([f(y) for row in angles for y in row for f in (math.sin, math.cos)], dtype=torch.float64)


def terms(made: RelativeAttention) -> tuple[Callable, Callable, Callable]:
    """r(d), s(d) and p(cell) of a layer, from its parameters by their definitions."""
    e, zero = made.encoding, torch.zeros(made.heads, made.key_width, dtype=torch.float64)
    none = lambda d: zero[:, 0]  # noqa: E731
    if isinstance(e, QuadraticEncoding):
        weight = torch.zeros(made.heads, len(e.centres[0]) + 1, made.key_width) if e.weight is None else e.weight

        def r(d: tuple[int, ...]) -> Tensor:
            return torch.stack(
                [w.mT @ torch.tensor([sum(x * x for x in d), *d], dtype=w.dtype) for w in weight.double()]
            )

        def s(d: tuple[int, ...]) -> Tensor:
            away = (torch.tensor(d) - e.centres) / e.log_widths.exp()
            return -(away**2).sum(-1) / 2

        return r, s, lambda cell: 0.0
    if isinstance(e, (SinusoidalEncoding, LearnedEncoding)):

        def encoded(d: tuple[int, ...]) -> Tensor:
            if isinstance(e, SinusoidalEncoding):
                return sinusoids(d, e.width)
            return e.table[tuple(x + g - 1 for x, g in zip(d, e.grid, strict=True))]

        def r_(d: tuple[int, ...]) -> Tensor:
            return torch.stack([w.mT @ encoded(d) for w in e.weight])

        return r_, lambda d: (r_(d) * e.place).sum(-1) / math.sqrt(made.key_width), lambda cell: 0.0
    assert isinstance(e, AbsoluteEncoding)
    return lambda d: zero, none, lambda cell: sinusoids(cell, 12) if e.table is None else e.table[cell]


def by_definition(made: RelativeAttention, x: Tensor, **masks) -> tuple[Tensor, Tensor]:
    """(P, y) from loops over cells."""
    g, grid = made.geometry, tuple(x.shape[2:])
    padded, queries = g.padded_size(grid), g.output_size(grid)
    r, s, p = terms(made)
    rows = g.pad(x).flatten(2).mT
    with_place = torch.stack([rows[:, i] + p(cell) for i, cell in enumerate(references.cells(padded))], dim=1)
    middle = [
        references.cells(padded).index(tuple(t * y + z // 2 for t, y, z in zip(g.stride, cell, g.reach, strict=True)))
        for cell in references.cells(queries)
    ]
    heads = (made.heads, made.key_width)
    if made.query is None or made.key is None or made.u is None:
        u = torch.zeros(heads, dtype=torch.float64)
        a, c = (torch.zeros(1, made.heads, n, made.key_width) for n in (len(middle), rows.shape[1]))
    else:
        u = made.u
        a, c = (
            (y @ w.weight.mT).unflatten(-1, heads).transpose(1, 2)
            for y, w in ((with_place[:, middle], made.query), (with_place, made.key))
        )
    matrix = references.four_terms(a, c, u, r, s, queries, padded, stride=g.stride, **masks)
    inner, outer = g.in_channels // g.groups, made.out_channels // g.groups
    weight, parts = made.weight.flatten(2), []
    for group in range(g.groups):
        values = rows[..., group * inner : (group + 1) * inner]
        w = weight[group * outer : (group + 1) * outer]
        parts.append(sum(matrix[:, h] @ values @ w[:, :, h].mT for h in range(made.heads)))
    y = torch.cat(parts, dim=-1) + (0 if made.bias is None else made.bias)
    return matrix, y.mT.unflatten(-1, queries)


def same(made: RelativeAttention, x: Tensor, **masks) -> None:
    """P, the output, and the gradients of x and of every parameter."""
    x = x.requires_grad_()
    flat = {name: mask.flatten(1) if name == "key_mask" else mask for name, mask in masks.items()}
    p, expected = by_definition(made, x, **flat)
    torch.testing.assert_close(made.operator(x, **masks).dense().expand_as(p), p)
    output = made(x, **masks)
    torch.testing.assert_close(output, expected)
    pull, leaves = normal(*output.shape, seed=1), [x, *made.parameters()]
    options = {"allow_unused": True, "materialize_grads": True}
    found, wanted = (torch.autograd.grad(y, leaves, pull, **options) for y in (output, expected))
    for (name, _), a, b in zip([("x", x), *made.named_parameters()], found, wanted, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("kind", ENCODINGS)
def test_four_terms(kind: str, axes: int) -> None:
    same(layer(kind, axes), normal(2, 12, *GRIDS[axes], seed=0))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["quadratic", "sinusoidal", "learned"])
def test_places_alone(kind: str, axes: int) -> None:
    """P is the same for every input; with quadratic encodings it is the case of S4, as a Kronecker product."""
    made = layer(kind, axes, content=False)
    same(made, normal(2, 12, *GRIDS[axes], seed=0))
    other = made.operator(normal(1, 12, *GRIDS[axes], seed=5))
    assert torch.equal(other.dense(), made.operator(normal(1, 12, *GRIDS[axes], seed=6)).dense())
    assert other.shape[:-2] == (4,)
    assert isinstance(other, Positional) == (kind == "quadratic")
    names = {name for name, _ in made.named_parameters()}
    assert not names & {"query.weight", "key.weight", "u"}
    assert ("encoding.weight" in names) == (kind != "quadratic")


def test_the_formula_of_the_source() -> None:
    """v . r_d with v = -alpha (1, -2 centre) and r_d = (|d|^2, d), softmax over keys: what places alone compute."""
    made = layer("quadratic", 2, content=False)
    alpha, encoding = 0.9, made.encoding
    assert isinstance(encoding, QuadraticEncoding)
    with torch.no_grad():
        encoding.log_widths.fill_(-math.log(2 * alpha) / 2)
    at = cells((3, 4)).double()
    p = made.operator(normal(1, 12, 3, 4, seed=0)).dense()
    for h, centre in enumerate(encoding.centres):
        v = -alpha * torch.cat([torch.ones(1), -2 * centre])
        for q in range(12):
            d = at - at[q]
            scores = torch.cat([d.square().sum(-1, keepdim=True), d], dim=-1) @ v
            torch.testing.assert_close(p[h, q], torch.softmax(scores, -1))


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("kind", ["quadratic", "sinusoidal"])
def test_masks(kind: str, content: bool) -> None:
    key_mask = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    made, x = layer(kind, 2, content=content), normal(2, 12, 3, 4, seed=0)
    same(made, x, key_mask=key_mask)
    same(made, x, causal=True)
    same(made, x, causal=True, key_mask=key_mask)
    assert Claim.CAUSAL in made.operator(x, causal=True).claims


@pytest.mark.parametrize("content", [True, False])
def test_a_causal_layer_does_not_look_ahead(content: bool) -> None:
    made, x = layer("quadratic", 2, content=content), normal(1, 12, 3, 4, seed=0).requires_grad_()
    output = made(x, causal=True).flatten(2)
    for i in range(12):
        (gradient,) = torch.autograd.grad(output[..., i].square().sum(), x, retain_graph=True)
        assert gradient.flatten(2)[..., i + 1 :].abs().sum() == 0
        assert gradient.flatten(2)[..., : i + 1].abs().sum() > 0


GEOMETRY = {
    "line": ConvolutionGeometry(12, (3,), (2,), (2,), ((2, 1),)),
    "plane": ConvolutionGeometry(12, (3, 2), (1, 2), (1, 2), ((1, 0), (2, 2)), "reflect"),
    "grouped": ConvolutionGeometry(12, (2, 2), (1, 1), (1, 1), ((0, 1), (1, 0)), groups=3),
}


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("name", GEOMETRY)
def test_queries_and_keys_of_a_convolution(name: str, content: bool) -> None:
    g = GEOMETRY[name]
    torch.manual_seed(0)
    made = RelativeAttention(12, 4, axes=g.axes, out_width=6, key_width=3, content=content, geometry=g).double()
    same(made, normal(2, 12, *{1: (7,), 2: (4, 5)}[g.axes], seed=0))


CONVOLUTIONS = {
    "1-D": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "2-D": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 6, 7)),
    "2-D, stride, dilation": (
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2, padding_mode="circular"),
        (2, 4, 7, 8),
    ),
    "2-D, even, groups": (nn.Conv2d(4, 6, (2, 4), groups=2, bias=False), (2, 4, 6, 7)),
    "3-D": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 3, 4, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_becomes_a_layer_that_can_learn_content(name: str) -> None:
    conv, shape = CONVOLUTIONS[name]
    conv, x = conv.double(), normal(*shape, seed=0)
    made, receipt = convert(conv, with_content(20.0, key_width=5), probe=x)
    assert isinstance(made, RelativeAttention)
    assert made.query is not None
    assert made.key is not None
    assert made.query.weight.abs().max() == made.key.weight.abs().max() == 0
    torch.testing.assert_close(made(x), conv(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(made(x), convert(conv, soft(20.0))[0](x))
    assert receipt.largest_change < 1e-6
    assert made.cost(shape[2:]).multiply_adds == count_multiply_adds(lambda: made(x[:1])).products
    made(x).square().sum().backward()
    # at alpha = 20 the weight of a key moves by e^-20 with its score: gradients are small, but not zero
    for projection in (made.query, made.key):
        assert projection.weight.grad is not None
        assert projection.weight.grad.abs().max() > 0


def test_a_converted_layer_learns_content() -> None:
    """Copy the brightest cell of the row to every cell: no convolution of three cells can, content can."""
    torch.manual_seed(0)
    conv = nn.Conv1d(2, 1, 3, padding=1)
    made, _ = convert(conv, with_content(1.0))
    x = torch.randn(256, 2, 8)
    y = x[:, :1].gather(-1, x[:, 1:].argmax(-1, keepdim=True)).expand(-1, 1, 8)

    def trained(module: nn.Module) -> float:
        optimizer = torch.optim.Adam(module.parameters(), 2e-2)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert trained(made) < 0.5 * trained(convert(conv, soft(1.0))[0])


def test_whole_models_and_the_way_back() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))
    new, receipt = convert(model, with_content(18.0), probe=torch.randn(2, 1, 6, 6))
    assert receipt.largest_change < 1e-5 * max(1, receipt.scale)
    assert len(receipt.parts) == 2
    with pytest.raises(UnsupportedError, match="the heads of RelativeAttention spread over several cells"):
        to_convolution(new[0])


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("kind", ["quadratic", "sinusoidal", "learned", "absolute"])
def test_the_cost_is_what_is_counted(kind: str, content: bool) -> None:
    if kind == "absolute" and not content:
        return
    made, x = layer(kind, 2, content=content).float(), normal(1, 12, 3, 4, seed=0, dtype=torch.float32)
    count = count_multiply_adds(lambda: made(x))
    assert count.products <= made.cost((3, 4)).multiply_adds <= count.products + count.sums


@pytest.mark.parametrize("kind", ENCODINGS)
def test_it_exports_compiles_saves_and_maps(kind: str, tmp_path) -> None:
    made, x = layer(kind, 2).float(), normal(2, 12, 3, 4, seed=0, dtype=torch.float32)
    program = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(program(torch.cat([x, x])), made(torch.cat([x, x])))
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), made(x))
    torch.save(made.state_dict(), tmp_path / "layer.pt")
    other = layer(kind, 2, seed=1).float()
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(other(x), made(x))
    torch.testing.assert_close(made(x[0]), made(x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("content", [True, False])
def test_half_precision_and_autocast(dtype: torch.dtype, content: bool) -> None:
    made, x = layer("quadratic", 2, content=content), normal(2, 12, 3, 4, seed=0)
    expected = made(x)
    close = partial(torch.testing.assert_close, atol=0.1 * expected.abs().max().item(), rtol=0, check_dtype=False)
    assert layer("quadratic", 2, content=content).to(dtype)(x.to(dtype)).dtype == dtype
    close(layer("quadratic", 2, content=content).to(dtype)(x.to(dtype)).double(), expected)
    with torch.autocast("cpu", torch.bfloat16):
        close(layer("quadratic", 2, content=content).float()(x.float()).double(), expected)


@pytest.mark.parametrize(
    "build, error, text",
    [
        (lambda: RelativeAttention(0, 4), ShapeError, "width must be at least 1, but is 0"),
        (lambda: RelativeAttention(8, 4, axes=4), ShapeError, "axes must be at most 3, but is 4"),
        (lambda: RelativeAttention(8, 4, encoding="quadratic"), InputError, "encoding must be a class such as Quad"),
        (lambda: RelativeAttention(8, 4, encoding=AbsoluteEncoding, content=False), InputError, "content is False"),
        (lambda: RelativeAttention(6, 4, encoding=AbsoluteEncoding), ShapeError, "a multiple of 2 x 2 axes, but is 6"),
        (
            lambda: RelativeAttention(8, 4, encoding=PositionEncoding, content=False)(torch.zeros(1, 8, 3, 3)),
            InputError,
            "without content, PositionEncoding needs an s_d",
        ),
        (
            lambda: RelativeAttention(8, 4, encoding=partial(LearnedEncoding, grid=(3,))),
            ShapeError,
            "axis 'dimension' must agree, but grid has 1, layer has 2",
        ),
        (
            lambda: RelativeAttention(8, 4, encoding=partial(LearnedEncoding, grid=(3, 3)))(torch.zeros(1, 8, 3, 4)),
            ShapeError,
            r"learned for maps up to \(3, 3\), but cells are \(2, 3\) apart",
        ),
        (
            lambda: RelativeAttention(8, 4, encoding=partial(AbsoluteEncoding, grid=(3, 3)))(torch.zeros(1, 8, 4, 3)),
            ShapeError,
            r"learned for maps up to \(3, 3\), but this one has \(4, 3\)",
        ),
        (lambda: RelativeAttention(8, 4)(torch.zeros(1, 7, 3, 3)), ShapeError, "x has 7, the layer 8"),
        (
            lambda: RelativeAttention(8, 4)(torch.zeros(1, 8, 3, 3), key_mask=torch.ones(3, 3).bool()),
            ShapeError,
            r"key_mask has shape \(3, 3\), but x has \(b, \*grid\) = \(1, 3, 3\)",
        ),
        (
            lambda: convert(nn.Conv2d(2, 2, 3), with_content(3.0))[0](torch.zeros(1, 2, 4, 4), causal=True),  # pyright: ignore
            UnsupportedError,
            "this layer has the kernel, padding or stride of a convolution",
        ),
    ],
)
def test_bad_input_is_named(build: Callable, error: type[HeadwiseError], text: str) -> None:
    with pytest.raises(error, match=text):
        build()
