"""Singular values from apply and adjoint alone, against the dense decomposition in float64."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import DtypeError, InputError, NonFiniteError, ShapeError
from headwise.linalg.krylov import singular_values, singular_vectors
from headwise.linalg.spectrum import Spectrum, dense_spectrum
from headwise.operators.softmax import softmax
from tests.linalg.matrices import attention, awkward, maps, rotation

KINDS = ("plain", "causal", "sink", "smooth")


def truth(p: Tensor, r: int) -> Tensor:
    return torch.linalg.svdvals(p.double())[..., :r]


def spectrum(p: Tensor, r: int, block: int = 64, steps: int | None = None) -> Spectrum:
    return singular_values(*maps(p), p.shape, r, like=p, block=block, steps=steps)


def assert_honest(found: Spectrum, p: Tensor) -> None:
    """Every true error is within its estimate, values are below the truth, some singular value is near each."""
    every = torch.linalg.svdvals(p.double())
    true = every[..., : found.values.shape[-1]]
    rounding = found.errors.amin(-1, keepdim=True)
    assert ((true - found.values).abs() <= found.errors).all(), ((true - found.values).abs() / found.errors).max()
    assert (found.values <= true + rounding).all()
    nearest = (every.unsqueeze(-2) - found.values.unsqueeze(-1)).abs().amin(-1)
    assert (nearest <= found.residuals).all()
    assert (found.values.diff(dim=-1) <= 0).all()


@given(m=st.integers(1, 20), n=st.integers(1, 20), batch=st.sampled_from([(), (1,), (2, 3)]), data=st.data())
def test_small_matrices_are_exact(m: int, n: int, batch: tuple[int, ...], data: st.DataObject) -> None:
    r = data.draw(st.integers(1, min(m, n)))
    p = torch.randn(*batch, m, n)
    found = spectrum(p, r)
    assert found.exact
    assert found.count == min(m, n)
    assert found.complete == (r == min(m, n))
    expected = scipy.linalg.svdvals(p.reshape(-1, m, n)[-1].double().numpy())
    torch.testing.assert_close(found.values.reshape(-1, r)[-1], torch.from_numpy(expected)[:r], rtol=1e-5, atol=1e-6)
    assert found.frobenius is not None
    torch.testing.assert_close(found.frobenius, torch.linalg.matrix_norm(p.double()), rtol=1e-5, atol=1e-6)
    assert_honest(found, p)


@given(
    kind=st.sampled_from(KINDS),
    sharpness=st.floats(0.1, 12),
    m=st.integers(110, 200),
    n=st.integers(110, 200),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_estimates_bound_the_errors(kind: str, sharpness: float, m: int, n: int, seed: int, dtype: torch.dtype) -> None:
    p = attention(kind, sharpness, m, n, seed).to(dtype)
    found = spectrum(p, 24, block=8, steps=6)
    assert not found.exact
    assert_honest(found, p)


@pytest.mark.parametrize("sharpness", [1.0, 4.0, 8.0])
def test_leading_values_converge_with_small_error_estimates(sharpness: float) -> None:
    p = attention("plain", sharpness, 900, 900, seed=1).float()
    found, true = spectrum(p, 128), truth(p, 128)
    relative = (true - found.values).abs() / true
    assert not found.exact
    assert relative[:32].amax() < 1e-3
    assert_honest(found, p)
    # an estimate that is always large would be honest too
    assert (found.errors[:16] / true[:16]).amax() < 1e-3
    assert (found.errors / true).amax() < 0.3


@pytest.mark.parametrize("name", awkward(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_awkward_matrices(name: str, dtype: torch.dtype) -> None:
    p = awkward(130)[name].to(dtype)
    found = spectrum(p, 24, block=8, steps=6)
    assert not found.exact
    assert_honest(found, p)
    torch.testing.assert_close(
        found.values, truth(p, 24), rtol=1e-4, atol=float(torch.finfo(dtype).eps * 30 * truth(p, 1)[0])
    )


def test_batch_equals_loop_and_repeats() -> None:
    p = torch.stack([attention(kind, 2.0, 150, 130, seed=3) for kind in KINDS]).unflatten(0, (2, 2)).float()
    before = torch.get_rng_state()
    found = spectrum(p, 10, block=8, steps=6)
    assert torch.equal(before, torch.get_rng_state())
    for i in range(2):
        for j in range(2):
            alone = spectrum(p[i, j], 10, block=8, steps=6)
            torch.testing.assert_close(found.values[i, j], alone.values, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.errors[i, j], alone.errors, rtol=1e-2, atol=1e-5)
    assert torch.equal(found.values, spectrum(p, 10, block=8, steps=6).values)
    other = singular_values(*maps(p), p.shape, 10, like=p, block=8, steps=6, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(found.values, other.values)


def test_the_operator_is_applied_to_blocks_only() -> None:
    p = attention("plain", 2.0, 140, 120, seed=0)
    widths: list[tuple[str, int]] = []

    def apply(v: Tensor) -> Tensor:
        widths.append(("apply", v.shape[-1]))
        return p @ v

    def adjoint(u: Tensor) -> Tensor:
        widths.append(("adjoint", u.shape[-1]))
        return p.mT @ u

    singular_values(apply, adjoint, p.shape, 5, like=p, block=8, steps=6)
    step = [("apply", 8), ("adjoint", 8)]
    assert widths == 6 * step + [("apply", 8)] + 3 * step
    widths.clear()
    free = singular_values(apply, adjoint, p.shape, 5, like=p, block=8, steps=6, certificate=0)
    assert widths == 6 * step
    assert free.errors.isinf().all()
    assert free.residuals.isfinite().all()


@pytest.mark.parametrize("kind, sharpness", [("plain", 2.0), ("plain", 8.0), ("causal", 4.0)])
def test_bounds_are_close_to_the_errors(kind: str, sharpness: float) -> None:
    p = attention(kind, sharpness, 420, 400, seed=2)
    apply, adjoint = maps(p)
    found = singular_values(apply, adjoint, p.shape, 40, like=p, block=32, steps=4)
    off = torch.linalg.svdvals(p)[:40] - found.values
    ratio = (found.errors / off)[off > 1e-6]
    assert len(ratio) > 10
    assert (ratio >= 1).all()
    assert ratio.median() < 4
    assert (ratio < 10).double().mean() > 0.9


@pytest.mark.parametrize("kind", ["smooth", "plain"])
@pytest.mark.parametrize("accuracy", [1e-2, 1e-4])
def test_stops_once_the_wanted_accuracy_is_certain(kind: str, accuracy: float) -> None:
    p, products = attention(kind, 1.0, 420, 400, seed=5), [0]

    def apply(v: Tensor) -> Tensor:
        products[0] += 1
        return p @ v

    found = singular_values(apply, lambda u: p.mT @ u, p.shape, 10, like=p, block=16, steps=12, accuracy=accuracy)
    assert not found.exact
    assert (found.errors <= accuracy * found.values[0]).all()
    assert_honest(found, p)
    assert products[0] < 12
    tight = singular_values(*maps(p), p.shape, 10, like=p, block=16, steps=12, accuracy=1e-15)
    assert_honest(tight, p)  # out of reach: all steps are taken
    assert (tight.values >= found.values - 1e-12).all()


@pytest.mark.parametrize("m, n", [(12, 9), (9, 12), (150, 130), (130, 150)])
def test_vectors(m: int, n: int) -> None:
    p = attention("smooth", 2.0, m, n, seed=2)
    r = 6
    t = singular_vectors(*maps(p), p.shape, r, like=p, block=8, steps=6)
    assert t.left.shape == (m, r)
    assert t.right.shape == (n, r)
    eye = torch.eye(r, dtype=torch.float64)
    torch.testing.assert_close(t.left.mT @ t.left, eye, rtol=0, atol=1e-10)
    torch.testing.assert_close(t.right.mT @ t.right, eye, rtol=0, atol=1e-10)
    torch.testing.assert_close(t.spectrum.values, spectrum(p, r, block=8, steps=6).values)
    best = torch.linalg.vector_norm(torch.linalg.svdvals(p)[r:])
    reached = torch.linalg.matrix_norm(p - t.left * t.spectrum.values @ t.right.mT)
    assert reached <= best * (1 + 1e-6) + 1e-12
    torch.testing.assert_close(p @ t.right, t.left * t.spectrum.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_within_its_stated_rounding(dtype: torch.dtype, kind: str) -> None:
    p = attention(kind, 2.0, 150, 130, seed=4)
    half = p.to(dtype)
    found = singular_values(*maps(half), half.shape, 12, like=half, block=8, steps=6)
    true = truth(p, 12)
    assert ((true - found.values).abs() <= found.errors).all()
    assert (found.errors[:4] <= 5 * torch.finfo(dtype).eps * true[0]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_operator(causal: bool) -> None:
    q, k = (2 * torch.randn(2, 150, 16, requires_grad=True) for _ in range(2))
    op = softmax(q, k, causal=causal)
    found = op.spectrum(20)
    assert not found.values.requires_grad
    assert_honest(found, op.dense().detach())
    blocks = singular_values(op.apply, op.adjoint, op.shape, 20, like=op.like, block=8, steps=6)
    assert not blocks.exact
    assert_honest(blocks, op.dense().detach())


def test_dense_spectrum_has_every_value() -> None:
    p = attention("plain", 1.0, 7, 5, seed=0)
    found = dense_spectrum(p)
    assert found.exact
    assert found.complete
    torch.testing.assert_close(found.values, torch.linalg.svdvals(p))
    with pytest.raises(NonFiniteError, match="p has 1 non-finite of 4"):
        dense_spectrum(torch.tensor([[0.0, torch.nan], [1.0, 1.0]]))


def test_refusals() -> None:
    p = rotation(6).float()
    with pytest.raises(ShapeError, match=r"r must lie in 1\.\.6 for P of 6 x 6, but r is 7"):
        spectrum(p, 7)
    with pytest.raises(ShapeError, match="r is 0"):
        spectrum(p, 0)
    with pytest.raises(ShapeError, match="empty axis"):
        singular_values(*maps(p), (0, 6), 1, like=p)
    with pytest.raises(ShapeError, match="span 4 directions, fewer than r = 5; take at least 3 steps"):
        spectrum(p, 5, block=2, steps=2)
    with pytest.raises(ShapeError, match="block and steps must be positive, but block is 0"):
        spectrum(p, 1, block=0)
    with pytest.raises(ShapeError, match=r"\(6, 6\) was mapped to \(5, 6\), but \(6, 6\) was expected"):
        singular_values(lambda v: v[1:], lambda u: u, p.shape, 1, like=p)
    with pytest.raises(NonFiniteError, match="returned 36 non-finite of 36"):
        spectrum(p * torch.nan, 1)
    with pytest.raises(InputError, match=r"relative to sigma_1 and must lie in \[0, 1\), but is 2"):
        singular_values(*maps(p), p.shape, 1, like=p, accuracy=2)
    with pytest.raises(InputError, match=r"accuracy of 0\.1 needs error bounds, but certificate is 0"):
        singular_values(*maps(p), p.shape, 1, like=p, accuracy=0.1, certificate=0)
    with pytest.raises(DtypeError, match=r"floating point, but is torch\.int64"):
        singular_values(*maps(p), p.shape, 1, like=torch.tensor([1]))
