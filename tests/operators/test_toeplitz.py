"""Weights by relative position: Fourier transforms against the matrix written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import DtypeError, HeadwiseError, NonFiniteError, ShapeError
from headwise.operators._kernels import limits
from headwise.operators.claims import Claim
from headwise.operators.relative.toeplitz import toeplitz, toeplitz_softmax
from headwise.testing import assert_operator, references

T, F = True, False
PADDING = torch.tensor([[T, T, T, T, T, T, T], [F, F, T, T, F, T, F]])
INFINITY = math.inf


@pytest.fixture(params=["by transforms", "by rows"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing, on sizes a loop can check."""
    monkeypatch.setattr(limits, "SHORT_TOEPLITZ", 0 if request.param == "by transforms" else 256)
    monkeypatch.setattr(limits, "SCORE_ENTRIES", 60)
    return request.param


def relative_softmax(logits: Tensor, m: int, n: int, **masks: object) -> Tensor:
    table = references.toeplitz(logits, m, n)
    seen = references.visible(m, n, **masks) & (table > -INFINITY)  # type: ignore[arg-type]
    return references.normalised(table.masked_fill(~seen, 0.0), seen)


@pytest.mark.parametrize("m, n", [(5, 7), (9, 4)])
def test_contract(path: str, m: int, n: int) -> None:
    assert_operator(
        lambda weights: toeplitz(weights, m, n),
        {"weights": (2, 3, m + n - 1)},
        lambda weights: references.toeplitz(weights, m, n),
    )


@pytest.mark.parametrize("m", [4, pytest.param(7, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)])
def test_contract_of_softmax(path: str, m: int) -> None:
    assert_operator(
        lambda logits: toeplitz_softmax(logits, m, 7, causal=m != 7, key_mask=PADDING),
        {"logits": (2, 3, m + 6)},
        lambda logits: relative_softmax(logits, m, 7, causal=m != 7, key_mask=PADDING[:, None]),
    )
    assert toeplitz_softmax(torch.randn(2, 3, m + 6), m, 7).fourier == (path == "by transforms")


@given(m=st.integers(1, 12), n=st.integers(1, 12), rows=st.booleans(), causal=st.booleans(), keys=st.integers(0, 4095))
def test_every_size(m: int, n: int, rows: bool, causal: bool, keys: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SHORT_TOEPLITZ", 256 if rows else 0)
        patch.setattr(limits, "SCORE_ENTRIES", 20)
        w, key_mask = torch.randn(m + n - 1, dtype=torch.float64), torch.tensor([bool(keys >> j & 1) for j in range(n)])
        w = torch.where(w > 1, -INFINITY, w)
        v, u = torch.randn(n, 2, dtype=torch.float64), torch.randn(m, 2, dtype=torch.float64)
        masks = {"causal": causal, "key_mask": key_mask}
        p = relative_softmax(w, m, n, **masks)
        op = toeplitz_softmax(w, m, n, **masks)
        torch.testing.assert_close(op(v), p @ v)
        torch.testing.assert_close(op.adjoint(u), p.mT @ u)
        assert (Claim.STOCHASTIC in op.claims) == bool((p.sum(-1) > 0.5).all())
        w = w.clamp(min=-3)
        torch.testing.assert_close(toeplitz(w, m, n)(v), references.toeplitz(w, m, n) @ v)
        torch.testing.assert_close(toeplitz(w, m, n).adjoint(u), references.toeplitz(w, m, n).mT @ u)


DISTANCE = torch.arange(-599, 600, dtype=torch.float64)
LOGITS = {
    "flat": 0 * DISTANCE,
    "linear bias": -0.1 * DISTANCE.abs(),
    "window": torch.where(DISTANCE.abs() < 5, 0.0, -INFINITY),
    "rising": 0.02 * DISTANCE,
    "rising faster": 0.042 * DISTANCE,
    "rising steeply": DISTANCE,
    "one far spike": torch.where(DISTANCE == 500, 40.0, 0.0),
    "rough": 5 * torch.randn(1199, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", LOGITS)
def test_every_row_is_right_whatever_the_range_of_the_logits(shape: str, causal: bool) -> None:
    """Error in units of rounding, relative to sum_j P_ij |v_j|: row by row, not relative to the largest row."""
    n, gather = 600, torch.arange(600)[None] - torch.arange(600)[:, None] + 599
    for dtype, roundings in ((torch.float32, 16), (torch.float64, 1000)):
        logits, v = LOGITS[shape].to(dtype), torch.randn(n, 3, dtype=dtype)
        scores = logits.double()[gather]
        p = (scores.masked_fill(gather > 599, -INFINITY) if causal else scores).softmax(-1)
        found = toeplitz_softmax(logits, n, n, causal=causal)(v).double()
        error = (found - p @ v.double()).abs() / (p @ v.double().abs())
        assert error.max().item() <= roundings * torch.finfo(dtype).eps


def test_transforms_are_used_only_where_every_row_bears_them() -> None:
    used = {
        (shape, dtype): toeplitz_softmax(logits.to(dtype), 600, 600).fourier
        for shape, logits in LOGITS.items()
        for dtype in (torch.float32, torch.float64)
    }
    assert [shape for shape in LOGITS if not used[shape, torch.float32]] == [
        "rising faster",
        "rising steeply",
        "one far spike",
    ]
    assert [shape for shape in LOGITS if used[shape, torch.float64]] == ["flat", "linear bias", "window"]


def test_gradients_through_transforms_at_full_size() -> None:
    logits, v = (
        LOGITS["linear bias"].clone().requires_grad_(),
        torch.randn(600, 2, dtype=torch.float64).requires_grad_(),
    )
    op = toeplitz_softmax(logits, 600, 600)
    assert op.fourier
    p = logits[torch.arange(600)[None] - torch.arange(600)[:, None] + 599].softmax(-1)
    pull = torch.randn(600, 2, dtype=torch.float64)
    found = torch.autograd.grad(op(v), (logits, v), pull)
    torch.testing.assert_close(found, torch.autograd.grad(p @ v, (logits, v), pull))


def test_the_error_of_a_transform_is_what_the_docstring_says() -> None:
    m, n = 700, 500
    w, v = torch.randn(m + n - 1).mul(4).exp(), torch.randn(n, 3)
    exact = toeplitz(w.double(), m, n).dense() @ v.double()
    error = (toeplitz(w, m, n)(v).double() - exact).abs().amax(-2)
    bound = torch.finfo(torch.float32).eps * math.log2(m + n) * w.norm() * v.norm(dim=-2)
    assert bool((error <= bound).all())


def test_nothing_as_large_as_p_is_made() -> None:
    n = 100_000  # P would hold 1e10 numbers
    v = torch.ones(n, 1)
    torch.testing.assert_close(toeplitz(torch.full((2 * n - 1,), 1 / n), n, n)(v), v)
    op = toeplitz_softmax(-0.01 * torch.arange(-(n - 1), n).abs(), n, n, causal=True)
    torch.testing.assert_close(op(v), v)
    assert op.cost(1).multiply_adds < n * 1000


def test_claims_follow_the_value() -> None:
    circulant = torch.tensor([0.25, 0.25, 0.5, 0.25, 0.25])
    assert toeplitz(circulant, 3, 3).claims == {Claim.STOCHASTIC, Claim.NONNEGATIVE, Claim.SYMMETRIC}
    assert toeplitz(torch.tensor([0.2, 0.3, 0.5, 0.2, 0.3]), 3, 3).claims == {Claim.STOCHASTIC, Claim.NONNEGATIVE}
    assert toeplitz(torch.tensor([0.2, 0.3, 0.5, 0.2, 0.2]), 3, 3).claims == {Claim.NONNEGATIVE}
    assert toeplitz(torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0]), 3, 3).claims == {Claim.CAUSAL}
    assert toeplitz(torch.tensor([1.0, -1.0, 1.0, 2.0, 0.0]), 3, 3).claims == frozenset()
    full = {Claim.STOCHASTIC, Claim.NONNEGATIVE}
    assert toeplitz_softmax(torch.zeros(5), 3, 3).claims == full
    assert toeplitz_softmax(torch.zeros(5), 3, 3, causal=True).claims == full | {Claim.CAUSAL}
    assert toeplitz_softmax(torch.zeros(7), 5, 3, causal=True).claims == {Claim.NONNEGATIVE, Claim.CAUSAL}
    blind = torch.tensor([0.0, 0.0, -INFINITY, -INFINITY, -INFINITY])  # the first query looks at what it may not see
    assert toeplitz_softmax(blind, 3, 3).claims == {Claim.NONNEGATIVE}
    assert toeplitz_softmax(blind, 3, 3).dense()[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "build, error, text",
    [
        (lambda: toeplitz(torch.zeros(5), 3, 4), ShapeError, r"Toeplitz: .* m = 3 and n = 4 has 6, weights has 5"),
        (lambda: toeplitz(torch.zeros(()), 1, 1), ShapeError, r"Toeplitz: weights must be \(\*batch, m \+ n - 1\)"),
        (lambda: toeplitz(torch.zeros(0, 1), 1, 1), ShapeError, r"have shape \(0, 1\)"),
        (lambda: toeplitz(torch.zeros(2), 0, 3), ShapeError, r"Toeplitz: m has 0, n has 3"),
        (lambda: toeplitz(torch.zeros(5, dtype=torch.int64), 3, 3), DtypeError, r"must be floating point"),
        (lambda: toeplitz(torch.full((5,), -INFINITY), 3, 3), NonFiniteError, r"5 non-finite of 5"),
        (lambda: toeplitz_softmax(torch.full((5,), INFINITY), 3, 3), NonFiniteError, r"ToeplitzSoftmax: logits has 5"),
        (lambda: toeplitz_softmax(torch.full((5,), math.nan), 3, 3), NonFiniteError, r"ToeplitzSoftmax: logits has 5"),
        (lambda: toeplitz_softmax(torch.zeros(5), 3, 3, key_mask=PADDING), ShapeError, r"but there are n = 3 keys"),
        (
            lambda: toeplitz_softmax(torch.zeros(3, 13), 7, 7, key_mask=PADDING),
            ShapeError,
            r"logits has \(3,\), key_mask has \(2,\)",
        ),
    ],
)
def test_bad_input_is_named(build: Callable[[], object], error: type[HeadwiseError], text: str) -> None:
    with pytest.raises(error, match=text):
        build()
