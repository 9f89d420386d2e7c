"""The mean and the running mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import DtypeError, ShapeError
from headwise.operators.claims import Claim
from headwise.operators.uniform import uniform
from headwise.testing import assert_operator, references


@pytest.mark.parametrize("m, n", [(6, 6), (5, 7), (7, 5), (1, 1), (1, 4), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_contract(m: int, n: int, causal: bool) -> None:
    assert_operator(lambda: uniform(m, n, causal=causal), {}, lambda: references.uniform(m, n, causal=causal))


@pytest.mark.parametrize("m", [4, 7, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_contract_with_padding(m: int, causal: bool) -> None:
    t, f = True, False
    key_mask = torch.tensor([[t, t, t, t, t, t, t], [f, f, t, t, f, t, f], [f, f, f, f, f, f, f]])
    assert_operator(
        lambda key_mask: uniform(m, 7, causal=causal, key_mask=key_mask),
        {"key_mask": key_mask},
        lambda key_mask: references.uniform(m, 7, causal=causal, key_mask=key_mask),
    )


@given(m=st.integers(1, 9), n=st.integers(1, 9), causal=st.booleans(), keys=st.integers(0, 511))
def test_every_size_and_padding(m: int, n: int, causal: bool, keys: int) -> None:
    key_mask = torch.tensor([bool(keys >> j & 1) for j in range(n)])
    op, p = uniform(m, n, causal=causal, key_mask=key_mask), references.uniform(m, n, causal=causal, key_mask=key_mask)
    v, u = torch.randn(n, 2, dtype=torch.float64), torch.randn(m, 2, dtype=torch.float64)
    torch.testing.assert_close(op(v), p @ v)
    torch.testing.assert_close(op.adjoint(u), p.mT @ u)
    assert (Claim.STOCHASTIC in op.claims) == bool((p.sum(-1) > 0.5).all())


def test_an_empty_row_drops_stochastic_and_nothing_else() -> None:
    full, silent = torch.tensor([True, False]), torch.tensor([False, True])
    assert uniform(2, 2, causal=True, key_mask=full).claims == {Claim.STOCHASTIC, Claim.NONNEGATIVE, Claim.CAUSAL}
    assert uniform(2, 2, causal=True, key_mask=silent).claims == {Claim.NONNEGATIVE, Claim.CAUSAL}
    assert Claim.STOCHASTIC not in uniform(5, 3, causal=True).claims


def test_a_padded_value_is_never_read() -> None:
    v = torch.tensor([[1.0], [float("nan")], [5.0]])
    op = uniform(3, 3, causal=True, key_mask=torch.tensor([True, False, True]))
    assert op(v).flatten().tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counts_beyond_its_integers(dtype: torch.dtype) -> None:
    """float16 ends at 65504 and bfloat16 stops counting at 256; the mean of 70,000 ones is one all the same."""
    v = torch.ones(70_000, 1, dtype=dtype)
    assert uniform(1, 70_000)(v).item() == 1
    assert uniform(70_000, 70_000, causal=True)(v).eq(1).all()
    assert uniform(70_000, 70_000).adjoint(v).eq(1).all()


def test_nothing_as_large_as_p_is_made() -> None:
    n = 200_000  # P would hold 4e10 numbers
    op = uniform(n, n, causal=True)
    assert op(torch.ones(n, 1))[-1].item() == pytest.approx(1)
    assert op.adjoint(torch.ones(n, 1))[-1].item() == pytest.approx(1 / n)


def test_bad_input_is_named() -> None:
    with pytest.raises(ShapeError, match=r"Uniform: m has 0, n has 3"):
        uniform(0, 3)
    with pytest.raises(ShapeError, match=r"Uniform: key_mask has shape \(4,\), but there are n = 3 keys"):
        uniform(3, 3, key_mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(DtypeError, match=r"Uniform: key_mask must be boolean.*torch.float32"):
        uniform(3, 3, key_mask=torch.ones(3))
    with pytest.raises(ShapeError, match=r"Uniform: axis 'n' must agree, but operator has 3, v has 5"):
        uniform(3, 3)(torch.zeros(5, 2))
