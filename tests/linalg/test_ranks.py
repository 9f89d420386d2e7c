"""Ranks and energies of a spectrum, against the formulas in plain Python, and bounds from truncated spectra."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import InputError, UnsupportedError
from headwise.linalg.ranks import (
    effective_rank,
    effective_rank_bounds,
    energy,
    low_rank_error,
    numeric_rank,
    stable_rank,
)
from headwise.linalg.spectrum import Spectrum, dense_spectrum
from tests.linalg.matrices import attention, rotation

sigmas = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12).map(lambda x: sorted(x, reverse=True))


def whole(values: list[float]) -> Spectrum:
    x = torch.tensor(values, dtype=torch.float64)
    return Spectrum(x, 0 * x, 0 * x, exact=True, count=len(values))


def cut(values: list[float], r: int, *, norm: bool) -> Spectrum:
    x = torch.tensor(values[:r], dtype=torch.float64)
    total = torch.tensor(math.hypot(*values), dtype=torch.float64) if norm else None
    return Spectrum(x, 0 * x, 0 * x, exact=False, count=len(values), frobenius=total)


@given(values=sigmas, scale=st.floats(1e-3, 1e3))
def test_formulas(values: list[float], scale: float) -> None:
    s = whole(values)
    shares = [x / sum(values) for x in values]
    squares = [x * x for x in values]
    close = pytest.approx
    assert effective_rank(s).item() == close(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-9)
    assert stable_rank(s).item() == close(sum(squares) / squares[0], rel=1e-9)
    assert numeric_rank(s, 0.1).item() == sum(x > 0.1 * values[0] for x in values)
    for i in range(len(values)):
        assert energy(s)[i].item() == close(sum(squares[: i + 1]) / sum(squares), rel=1e-9)
        assert low_rank_error(s)[i].item() == close(math.sqrt(sum(squares[i + 1 :]) / sum(squares)), rel=1e-6, abs=1e-8)
    assert 1 - 1e-9 <= stable_rank(s).item() <= len(values) * (1 + 1e-9)
    assert effective_rank(whole([scale * x for x in values])).item() == close(effective_rank(s).item(), rel=1e-9)


@given(values=sigmas, data=st.data(), norm=st.booleans())
def test_bounds_hold_for_every_truncation(values: list[float], data: st.DataObject, norm: bool) -> None:
    r = data.draw(st.integers(1, len(values)))
    low, high = effective_rank_bounds(cut(values, r, norm=norm))
    true = effective_rank(whole(values)).item()
    assert low.item() <= true * (1 + 1e-7)
    assert true <= high.item() * (1 + 1e-7)
    if r == len(values):
        assert low.item() == high.item() == true


def test_bounds_are_reached() -> None:
    low, high = effective_rank_bounds(cut([1.0, 1.0, 1.0, 1.0], 2, norm=False))
    assert (low.item(), high.item()) == (pytest.approx(2), pytest.approx(4))
    assert effective_rank_bounds(cut([1.0, 1.0, 0.0, 0.0], 2, norm=True))[1].item() == pytest.approx(2)


def test_low_rank_error_is_eckart_young_and_does_not_cancel() -> None:
    p = attention("plain", 2.0, 9, 7, seed=0)
    u, s, vt = torch.linalg.svd(p, full_matrices=False)
    for i in range(1, 8):
        error = torch.linalg.matrix_norm(p - u[:, :i] * s[:i] @ vt[:i]) / torch.linalg.matrix_norm(p)
        torch.testing.assert_close(low_rank_error(dense_spectrum(p))[i - 1], error, rtol=1e-6, atol=1e-14)
    assert low_rank_error(whole([1.0, 1e-12]))[0].item() == pytest.approx(1e-12, rel=1e-9)


def test_truncated_spectra_with_a_norm_agree_with_whole_ones() -> None:
    p = torch.stack([attention(kind, 2.0, 20, 15, seed=0) for kind in ("plain", "sink")])
    every = dense_spectrum(p)
    some = Spectrum(
        every.values[:, :6], every.errors[:, :6], every.residuals[:, :6], exact=False, count=15, frobenius=None
    )
    some = replace(some, frobenius=torch.linalg.matrix_norm(p))
    torch.testing.assert_close(stable_rank(some), stable_rank(every))
    torch.testing.assert_close(energy(some), energy(every)[:, :6])
    torch.testing.assert_close(low_rank_error(some), low_rank_error(every)[:, :6])
    assert numeric_rank(every, 0.0).shape == (2,)


@pytest.mark.parametrize("p, rank", [(torch.zeros(3, 4), 0.0), (torch.ones(3, 4), 1.0), (rotation(5), 5.0)])
def test_known_matrices(p: Tensor, rank: float) -> None:
    s = dense_spectrum(p)
    assert effective_rank(s).item() == pytest.approx(rank, abs=1e-5)
    assert stable_rank(s).item() == pytest.approx(rank, abs=1e-5)
    assert numeric_rank(s, 1e-6).item() == rank
    assert torch.isfinite(energy(s)).all()
    assert torch.isfinite(low_rank_error(s)).all()


def test_errors_name_what_is_missing() -> None:
    s = cut([3.0, 2.0, 1.0], 2, norm=False)
    with pytest.raises(UnsupportedError, match="needs all 3 singular values, but 2 are given"):
        effective_rank(s)
    for measure in (stable_rank, energy, low_rank_error):
        with pytest.raises(UnsupportedError, match=rf"{measure.__name__}: needs \|\|P\|\|_F, but 2 of 3"):
            measure(s)
    with pytest.raises(UnsupportedError, match=r"all 2 of 3 values given are above 0\.1 sigma_1"):
        numeric_rank(s, 0.1)
    assert numeric_rank(s, 0.8).item() == 1
    with pytest.raises(InputError, match=r"must lie in \[0, 1\), but is 1\.5"):
        numeric_rank(s, 1.5)
