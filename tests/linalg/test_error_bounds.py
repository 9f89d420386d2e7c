"""Upper bounds of singular values from what a Krylov run has explored: they hold, and no smaller ones would."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.linalg.basis import gaussian_blocks
from headwise.linalg.bidiagonal import Bidiagonalisation, Explored
from headwise.linalg.error_bounds import FAILURE, _least_overlap, ceilings, remainder_norm
from tests.linalg.matrices import attention, maps


def upper(top: Tensor, delta: Tensor, gram: Tensor | None = None) -> Tensor:
    """Bounds of sigma_i([[B, C], [0, D]]) for [B C] = top, ||D|| <= delta, and the Gram matrix of D's first columns."""
    x, values, _ = torch.linalg.svd(top, full_matrices=False)
    f = x.mT @ top[..., top.shape[-2] :]
    gram = delta.square() * torch.eye(f.shape[-1], dtype=f.dtype) if gram is None else gram
    return ceilings(values, f, delta, gram).sqrt()


def with_remainder(top: Tensor, d: Tensor) -> Tensor:
    """[[B, C, 0], [0, D]]: C meets the first columns of D."""
    b = top.shape[1] - top.shape[0]
    above = torch.cat([top, top.new_zeros(len(top), d.shape[1] - b)], 1)
    return torch.cat([above, torch.cat([top.new_zeros(len(d), len(top)), d], 1)])


@given(seed=st.integers(0, 10_000), s=st.integers(2, 12), b=st.integers(1, 4), ratio=st.floats(0.01, 1.5))
def test_bounds_hold_for_every_remainder_of_known_norm(seed: int, s: int, b: int, ratio: float) -> None:
    g = torch.Generator().manual_seed(seed)
    top = torch.randn(s, s + b, generator=g, dtype=torch.float64)
    delta = ratio * torch.linalg.matrix_norm(top, 2)
    d = torch.randn(b + 3, b + 2, generator=g, dtype=torch.float64)
    d[:, :b] *= 2 * torch.rand((), generator=g)
    d *= delta / torch.linalg.matrix_norm(d, 2)
    true, gram = torch.linalg.svdvals(with_remainder(top, d))[:s], d[:, :b].mT @ d[:, :b]
    assert (true <= upper(top, delta)).all()
    assert (true <= upper(top, delta, gram)).all()
    assert (upper(top, delta, gram) <= upper(top, delta) * (1 + 1e-12)).all()


@given(seed=st.integers(0, 10_000), s=st.integers(3, 12), b=st.integers(1, 4), ratio=st.floats(0.2, 0.9))
def test_bounds_are_attained_by_a_multiple_of_a_partial_isometry(seed: int, s: int, b: int, ratio: float) -> None:
    """So that nothing but further products with P can give smaller ones.  The slack is the grid of levels."""
    g = torch.Generator().manual_seed(seed)
    top = torch.randn(s, s + b, generator=g, dtype=torch.float64)
    values = torch.linalg.svdvals(top)
    delta = ratio * values[0]
    # D = delta [W, sqrt(1 - W^2)]: rows are orthogonal and as long as can be, the first b columns have any Gram matrix
    share = torch.rand(b, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(b, b, generator=g, dtype=torch.float64)).Q
    d = delta * turn @ torch.cat([torch.diag(share.sqrt()) @ turn.mT, torch.diag((1 - share).sqrt())], 1)
    gram = d[:, :b].mT @ d[:, :b]
    true = torch.linalg.svdvals(with_remainder(top, d))
    excess, stated = true[0].square() - values[0].square(), upper(top, delta, gram)[0].square() - values[0].square()
    assert excess <= stated
    # between two levels the bound is at most that of the next one, which is less than twice as far from delta^2
    assert stated <= 2.1 * excess + 1e-9 * values[0].square()


@pytest.mark.parametrize("kind, sharpness", [("plain", 2.0), ("plain", 8.0), ("causal", 4.0), ("smooth", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_of_the_remainder(kind: str, sharpness: float, dtype: torch.dtype) -> None:
    p = attention(kind, sharpness, 520, 500, seed=1).to(dtype)
    fresh, (forward, backward) = gaussian_blocks(16, p, None), maps(p)
    run = Bidiagonalisation(forward, backward, 520, torch.linalg.qr(fresh(500)).Q, fresh, 6)
    for _ in range(6):
        run.step()
    explored = run.explored()
    u, v = explored.left.double(), explored.right[:, : explored.s].double()
    d = p.double() - u @ (u.mT @ p.double())
    true = torch.linalg.matrix_norm(d - d @ v @ v.mT, 2)
    floor = torch.tensor(1e-5 if dtype == torch.float32 else 1e-14, dtype=torch.float64)
    found = [remainder_norm(explored, forward, backward, fresh, steps) for steps in (1, 2, 4, 6)]
    assert (torch.stack(found) >= true - floor).all()
    assert found[-1] <= 1.1 * true + floor
    assert true < 10 * floor or found[0] > found[2] > found[3]


def test_a_hidden_direction_is_not_missed() -> None:
    """The run never meets the largest singular vector; the newest block says nothing of it, the certificate does."""
    g = torch.Generator().manual_seed(0)
    p = 0.01 * torch.randn(400, 400, generator=g, dtype=torch.float64)
    p[0], p[:, 0] = 0, 0
    p[0, 0] = 5
    start = torch.randn(400, 8, generator=g, dtype=torch.float64)
    start[0] = 0
    fresh, (forward, backward) = gaussian_blocks(8, p, g), maps(p)
    run = Bidiagonalisation(forward, backward, 400, torch.linalg.qr(start).Q, fresh, 4)
    for _ in range(4):
        run.step()
    explored: Explored = run.explored()
    assert torch.linalg.matrix_norm(explored.known, 2) < 1
    found = remainder_norm(explored, forward, backward, fresh, 3)
    assert 5 <= found <= 5.5


@pytest.mark.parametrize("c", [1, 2, 8, 64])
def test_least_overlap_is_a_quantile_of_chi(c: int) -> None:
    x = torch.tensor(_least_overlap(c) ** 2 / 2, dtype=torch.float64)
    probability = torch.special.gammainc(torch.tensor(c / 2, dtype=torch.float64), x).item()
    assert 0 < probability <= FAILURE
    assert probability > FAILURE / (20 * math.sqrt(c))
