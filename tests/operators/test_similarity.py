"""The general form o = (1/C) sum f(q, k) g(v): every similarity, every mask, against loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise.errors import DtypeError, HeadwiseError, InputError, NonFiniteError, ShapeError, UnsupportedError
from headwise.operators._kernels import limits
from headwise.operators.claims import Claim
from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product
from headwise.operators.similarity import attend, embedded_gaussian, gaussian, similarity
from headwise.operators.softmax import Softmax
from headwise.testing import assert_operator, references
from tests.operators.cases import inverse_square
from tests.operators.properties import Largest

# the package has builders of these names
T, F = True, False
PADDING = torch.tensor([[T, T, T, T, T, T, T], [F, F, T, T, F, T, F]])
MASK = torch.rand(3, 1, 7, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 9)[:, None]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a handful of tokens takes many of them."""
    monkeypatch.setattr(limits, "DIAGONAL_BLOCK", 2)
    monkeypatch.setattr(limits, "SCORE_ENTRIES", 40)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_value_and_gradients(fast: Callable[..., Tensor], slow: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    a, b = fast(*leaves), slow(*leaves)
    pull = torch.randn_like(a)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.autograd.grad(a, leaves, pull), torch.autograd.grad(b, leaves, pull))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "m, masks",
    [
        (4, "none"),
        *[pytest.param(m, masks, marks=pytest.mark.slow) for m, masks in ((9, "causal"), (7, "all"))],
        *[pytest.param(m, "causal and padding", marks=pytest.mark.slow) for m in (4, 7, 9)],
    ],
)
def test_contract_of_the_averages(m: int, masks: str) -> None:
    given: dict[str, dict] = {
        "none": {},
        "causal": {"causal": True},
        "causal and padding": {"causal": True, "key_mask": PADDING},
        "all": {"causal": True, "key_mask": PADDING, "pair_mask": MASK[:, :m]},
    }
    kept = given[masks]
    seen = {name: x[:, None] if name == "key_mask" else x for name, x in kept.items()}  # one padding for all heads
    inputs = {"q": (2, 3, m, 4), "k": (3, 7, 4) if masks == "none" else (2, 3, 7, 4)}
    assert_operator(lambda q, k: dot_product(q, k, **kept), inputs, lambda q, k: references.dot_product(q, k, **seen))
    assert_operator(
        lambda q, k, w: concatenation(q, k, w, **kept),
        {**inputs, "w": (3, 8)},
        lambda q, k, w: references.concatenation(q, k, w, **seen),
    )


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=100)
@given(
    m=st.integers(1, 11),
    n=st.integers(1, 11),
    causal=st.booleans(),
    keys=st.none() | st.integers(0, 2047),
    looks=st.none() | st.integers(0, 2**32 - 1),
)
def test_every_size_and_mask(m: int, n: int, causal: bool, keys: int | None, looks: int | None) -> None:
    generator = torch.Generator().manual_seed(looks or 0)
    masks = {
        "causal": causal,
        "key_mask": None if keys is None else torch.tensor([bool(keys >> j & 1) for j in range(n)]),
        "pair_mask": None if looks is None else torch.rand(m, n, generator=generator) < 0.6,
    }
    q, k, w, v, u = normal(m, 2), normal(n, 2, seed=1), normal(4, seed=2), normal(n, 3), normal(m, 3)
    for op, p in (
        (dot_product(q, k, **masks), references.dot_product(q, k, **masks)),
        (concatenation(q, k, w, **masks), references.concatenation(q, k, w, **masks)),
    ):
        torch.testing.assert_close(op(v), p @ v)
        torch.testing.assert_close(op.adjoint(u), p.mT @ u)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_the_kinked_form_at_its_real_block_size(causal: bool) -> None:
    """Three leaf blocks and two sizes of squares; gradients reach q, k, w and v."""

    def fast(q: Tensor, k: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return concatenation(q, k, w, causal=causal)(v)

    def slow(q: Tensor, k: Tensor, w: Tensor, v: Tensor) -> Tensor:
        weights = ((q @ w[:2])[:, None] + (k @ w[2:])[None]).relu()
        seen = torch.ones(150, 171).tril(21 if causal else 200)
        return (weights * seen) @ v / seen.sum(-1, keepdim=True)

    same_value_and_gradients(fast, slow, normal(150, 2), normal(171, 3, seed=1), normal(5, seed=2), normal(171, 4))


def test_keys_of_equal_height_and_a_sum_on_the_kink() -> None:
    """Ties in the sorted order, and a_i + b_j = 0 exactly, where relu and its derivative are both zero."""
    q, k = torch.tensor([[1.0], [-1.0], [0.0]]).double(), torch.tensor([[1.0], [-1.0], [1.0], [0.0], [-1.0]]).double()
    w, v = torch.ones(2).double(), normal(5, 2)
    same_value_and_gradients(
        lambda q, k, w, v: concatenation(q, k, w)(v),
        lambda q, k, w, v: references.concatenation(q, k, w) @ v,
        q,
        k,
        w,
        v,
    )


def test_the_gaussians_are_softmax_with_scale_one() -> None:
    q, k, v = normal(2, 5, 4), normal(2, 7, 4, seed=1), normal(2, 7, 3)
    theta, phi = normal(6, 4, seed=2), normal(6, 4, seed=3)
    masks = {"causal": True, "key_mask": PADDING}
    same_value_and_gradients(
        lambda q, k, v: gaussian(q, k, **masks)(v), lambda q, k, v: references.gaussian(q, k, **masks) @ v, q, k, v
    )
    same_value_and_gradients(
        lambda q, k, a, b, v: embedded_gaussian(q, k, theta=a, phi=b, **masks)(v),
        lambda q, k, a, b, v: references.embedded_gaussian(q, k, a, b, **masks) @ v,
        *(q, k, theta, phi, v),
    )
    assert isinstance(gaussian(q, k), Softmax)
    torch.testing.assert_close(embedded_gaussian(q, k).dense(), gaussian(q, k).dense())


def test_dot_product_is_two_factors() -> None:
    q, k = normal(2, 5, 4), normal(2, 7, 4, seed=1)
    factors = (q / math.sqrt(7)) @ (k / math.sqrt(7)).mT
    torch.testing.assert_close(dot_product(q, k).dense(), factors)


def test_theta_phi_and_g_are_matrices_or_callables() -> None:
    q, k, v = normal(5, 4), normal(7, 3, seed=1), normal(7, 2)
    theta, phi, g = (nn.Linear(size, 6, bias=False, dtype=torch.float64) for size in (4, 3, 2))
    p = references.dot_product(q @ theta.weight.mT, k @ phi.weight.mT)
    expected = p @ (v @ g.weight.mT)
    torch.testing.assert_close(attend(dot_product(q, k, theta=theta, phi=phi), v, g), expected)
    by_matrix = dot_product(q, k, theta=theta.weight, phi=phi.weight)
    torch.testing.assert_close(attend(by_matrix, v, g.weight), expected)
    torch.testing.assert_close(attend(by_matrix, v), p @ v)
    w = normal(12, seed=4)
    torch.testing.assert_close(
        concatenation(q, k, w, theta=theta, phi=phi.weight).dense(),
        references.concatenation(q @ theta.weight.mT, k @ phi.weight.mT, w),
    )


def test_claims() -> None:
    q, k = normal(5, 4), normal(5, 4, seed=1)
    assert dot_product(q, k).claims == frozenset()
    assert dot_product(q, k, causal=True).claims == {Claim.CAUSAL}
    assert concatenation(q, k, normal(8)).claims == {Claim.NONNEGATIVE}
    assert concatenation(q, k, normal(8), causal=True).claims == {Claim.NONNEGATIVE, Claim.CAUSAL}


def test_a_softmax_by_its_definition() -> None:
    """f = exp(q . k): equation (1) of Ji & Xie as it stands is the softmax that `gaussian` computes."""
    q, k, v = normal(2, 5, 4), normal(2, 7, 4, seed=1), normal(2, 7, 3)
    same_value_and_gradients(
        lambda q, k, v: similarity(q, k, lambda q, k: (q @ k.mT).exp())(v),
        lambda q, k, v: references.gaussian(q, k) @ v,
        *(q, k, v),
    )
    torch.testing.assert_close(similarity(q, k, lambda q, k: q @ k.mT, "n").dense(), references.dot_product(q, k))


@pytest.mark.parametrize("blocks", [1, 8])
def test_parameters_of_a_module_f_have_gradients(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """f a small network of pairs of two widths; the blocks are computed again in the backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1), nn.Softplus()).double()

    def f(q: Tensor, k: Tensor) -> Tensor:
        pairs = torch.broadcast_tensors(q.unsqueeze(-2)[..., :1], k.unsqueeze(-3)[..., :1])[0].shape[:-1]
        q, k = q.unsqueeze(-2).expand(*pairs, -1), k.unsqueeze(-3).expand(*pairs, -1)
        return net(torch.cat([q, k], dim=-1)).squeeze(-1)

    q, k, v = normal(8, 2), normal(6, 3, seed=1), normal(6, 3)
    monkeypatch.setattr(limits, "SCORE_ENTRIES", 8 * 6 * 3 // blocks)
    out = similarity(q, k, f, causal=True)(v)
    p = references.similarity(q, k, lambda q, k: net(torch.cat([q, k], dim=-1)).squeeze(-1), causal=True)
    torch.testing.assert_close(out, p @ v)
    found, expected = (torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in (out, p @ v))
    assert all(x.abs().max() > 0 for x in found)
    torch.testing.assert_close(found, expected)


def test_claims_of_a_similarity_are_measured() -> None:
    q, k = normal(5, 4), normal(5, 4, seed=1)
    positive, signed, kinked = (
        lambda q, k: 1 / (1 + torch.cdist(q, k)),
        lambda q, k: q @ k.mT,
        lambda q, k: (q @ k.mT).relu(),
    )
    assert similarity(q, k, positive).claims == {Claim.NONNEGATIVE, Claim.STOCHASTIC}
    assert similarity(q, k, positive, causal=True).claims == {Claim.NONNEGATIVE, Claim.STOCHASTIC, Claim.CAUSAL}
    assert similarity(q, k, positive, "n").claims == {Claim.NONNEGATIVE}
    assert similarity(q, k, signed).claims == frozenset()
    assert similarity(q, k, signed, causal=True).claims == {Claim.CAUSAL}
    assert similarity(q, k, kinked, pair_mask=(q @ k.mT) < 0).claims == {Claim.NONNEGATIVE}  # rows of zeros
    assert similarity(q, k, kinked, pair_mask=(q @ k.mT) < 0).dense().abs().max() == 0
    only_positive = similarity(q, k, signed, pair_mask=(q @ k.mT) > 0)
    assert Claim.NONNEGATIVE in only_positive.claims, "masked values of f are not looked at"


def test_a_similarity_in_half_precision_and_under_autocast() -> None:
    n = 3000  # the sum of the row is beyond float16
    q, k, v = (torch.full((n, 1), x, dtype=torch.float16) for x in (1.0, 6.0, 4.0))
    op = similarity(q[:3], k, lambda q, k: (q @ k.mT) * 8)
    assert op(v).flatten().tolist() == [4.0] * 3
    net = nn.Linear(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        build = similarity(q[:3].bfloat16(), k.bfloat16(), lambda q, k: net(q).exp() * k.mT)
        assert build(v.bfloat16()).dtype == torch.bfloat16


def test_a_similarity_of_any_length_holds_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    n, entries = 256, 1 << 13
    monkeypatch.setattr(limits, "SCORE_ENTRIES", entries)
    q, k, v = (torch.randn(n, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        similarity(q, k, inverse_square)(v).sum().backward()
    assert largest.elements <= entries


def test_half_precision_does_not_overflow_between_the_products() -> None:
    """K^T V holds n k v = 800,000 here, which float16 (up to 65504) has no number for."""
    n = 50_000
    q, k, v = (torch.full((n, 1), x, dtype=torch.float16) for x in (1.0, 4.0, 4.0))
    assert dot_product(q[:3], k)(v).flatten().tolist() == [16.0] * 3
    assert dot_product(q, k, causal=True)(v)[-1].item() == 16.0
    assert concatenation(q[:3], k, torch.ones(2, dtype=torch.float16))(v).flatten().tolist() == [20.0] * 3


def test_nothing_as_large_as_p_is_made() -> None:
    n = 100_000  # P would hold 1e10 numbers
    q, k, v = torch.randn(n, 2), torch.randn(n, 2), torch.randn(n, 1)
    for causal in (False, True):
        assert dot_product(q, k, causal=causal)(v).isfinite().all()
        assert concatenation(q, k, torch.randn(4), causal=causal).adjoint(v).isfinite().all()


def test_a_padded_value_is_never_read() -> None:
    q, k, v = normal(3, 2), normal(4, 2), normal(4, 2)
    key_mask = torch.tensor([T, F, T, F])
    v[~key_mask] = math.nan
    for op in (dot_product(q, k, key_mask=key_mask), concatenation(q, k, normal(4), key_mask=key_mask)):
        assert op(v).isfinite().all()


def test_blocks_are_computed_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, pair_mask = normal(8, 2), normal(8, 2, seed=1), normal(8, 3), torch.rand(8, 8) < 0.7
    q.requires_grad_()
    whole = torch.autograd.grad(dot_product(q, k, pair_mask=pair_mask)(v).square().sum(), q)
    monkeypatch.setattr(limits, "SCORE_ENTRIES", 16)
    in_blocks = torch.autograd.grad(dot_product(q, k, pair_mask=pair_mask)(v).square().sum(), q)
    torch.testing.assert_close(in_blocks, whole)
    functional = torch.func.grad(lambda q: dot_product(q, k, pair_mask=pair_mask)(v).square().sum())(q.detach())
    torch.testing.assert_close((functional,), whole)


@pytest.mark.parametrize(
    "build, error, text",
    [
        (lambda: dot_product(normal(5, 4), normal(5, 3)), ShapeError, r"DotProduct: axis 'k' .* q has 4, k has 3"),
        (lambda: dot_product(normal(0, 4), normal(5, 4)), ShapeError, r"DotProduct: q has shape \(0, 4\)"),
        (lambda: dot_product(normal(4), normal(5, 4)), ShapeError, r"DotProduct: q must be"),
        (
            lambda: dot_product(normal(5, 4), normal(5, 4).float()),
            DtypeError,
            r"q is torch.float64, k is torch.f",
        ),
        (
            lambda: dot_product(normal(2, 5, 4), normal(3, 5, 4)),
            ShapeError,
            r"q has \(2,\), k has \(3,\)",
        ),
        (lambda: dot_product(normal(5, 4) / 0, normal(5, 4)), NonFiniteError, r"DotProduct: q has 20 non-finite"),
        (lambda: dot_product(normal(5, 4), normal(6, 4), key_mask=PADDING), ShapeError, r"but there are n = 6 keys"),
        (lambda: dot_product(normal(5, 4), normal(7, 4), key_mask=PADDING), ShapeError, r"key_mask has shape \(2, 7\)"),
        (
            lambda: dot_product(normal(5, 4), normal(7, 4), pair_mask=MASK),
            ShapeError,
            r"pair_mask has shape \(.*\), which does not broadcast to \(5, 7\)",
        ),
        (lambda: dot_product(normal(9, 4), normal(7, 4), pair_mask=MASK), ShapeError, r"mask has shape \(3, 9, 7\)"),
        (lambda: dot_product(normal(5, 4), normal(7, 4), pair_mask=normal(5, 7)), DtypeError, r"mask must be boolean"),
        (lambda: dot_product(normal(5, 4), normal(7, 4), theta=normal(4, 3)), ShapeError, r"q has 4, matrix has 3"),
        (
            lambda: dot_product(normal(5, 4), normal(7, 4), phi=lambda k: k[:3]),
            ShapeError,
            r"before has 7, after has",
        ),
        (lambda: similarity(normal(5, 4), normal(7, 4), "exp"), InputError, r"f must be a function .* is 'exp'"),
        (lambda: similarity(normal(5, 4), normal(7, 4), torch.mul, "rows"), InputError, r"'sum' or 'n', but is 'rows'"),
        (
            lambda: similarity(normal(5, 4), normal(7, 4), lambda q, k: q[..., :1])(normal(7, 1)),
            ShapeError,
            r"Similarity: f of 5 queries and 7 keys must be \(\*batch, 5, 7\), but has shape \(5, 1\)",
        ),
        (
            lambda: similarity(normal(5, 4), normal(7, 4), lambda q, k: q @ k.mT > 0)(normal(7, 1)),
            DtypeError,
            r"f\(q, k\) must be floating point, but is torch.bool",
        ),
        (
            lambda: similarity(normal(5, 4), normal(7, 4), lambda q, k: (1e3 * q @ k.mT).exp())(normal(7, 1)),
            NonFiniteError,
            r"Similarity: f\(q, k\) has \d+ non-finite of 35 entries",
        ),
        (
            lambda: similarity(normal(5, 4), normal(7, 4), torch.cdist, attn_bias=normal(5, 7)),
            UnsupportedError,
            r"similarity: does not support attn_bias; use an f that includes it",
        ),
        (lambda: concatenation(normal(5, 4), normal(7, 3), normal(8)), ShapeError, r"must be 7: q has width 4, k .* 3"),
        (lambda: concatenation(normal(5, 4), normal(7, 3), normal(7) / 0), NonFiniteError, r"w has 7 non-finite"),
        (lambda: dot_product(normal(5, 4), normal(7, 4))(normal(6, 1)), ShapeError, r"operator has 7, v has 6"),
    ],
)
def test_bad_input_is_named(build: Callable[[], object], error: type[HeadwiseError], text: str) -> None:
    with pytest.raises(error, match=text):
        build()
