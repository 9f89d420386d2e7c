"""What softmax attention says of itself without forming P: each against the same measure of the twin's P."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise.operators._kernels.scores import attend_with_lse, attend_with_lse_in_chunks
from headwise.operators.softmax import Softmax, softmax
from headwise.testing import Case, references
from tests.operators.cases import SIMILARITY, SOFTMAX
from tests.operators.properties import Largest

CASES = [*SIMILARITY, *SOFTMAX]
MEASURES: dict[str, tuple[Callable[[Softmax], Tensor], Callable[[Tensor], Tensor]]] = {
    "entropy": (Softmax.entropy, references.entropy),
    "frobenius": (Softmax.frobenius, references.frobenius_norm),
    "row_maxima": (Softmax.row_maxima, references.row_maxima),
}


def build(case: Case, **tensors: Tensor) -> Softmax:
    op = case.build(**(tensors or case.tensors()))
    assert isinstance(op, Softmax)
    return op


def label(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "name", "")


@pytest.fixture(params=["whole", "in blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs once as it is and once with blocks so small that seven keys take several."""
    if request.param == "in blocks":
        monkeypatch.setattr("headwise.operators._kernels.limits.SCORE_ENTRIES", 14)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_measure(case: Case, measure: str) -> None:
    fast, slow = MEASURES[measure]
    op = build(case)
    expected = slow(case.matrix(case.tensors()))
    torch.testing.assert_close(fast(op), expected.expand(fast(op).shape), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_gradient_of_measure(case: Case, measure: str) -> None:
    fast, slow = MEASURES[measure]
    tensors = case.tensors()
    leaves = [x.requires_grad_() for x in tensors.values() if x.dtype.is_floating_point]
    found, expected = fast(build(case, **tensors)), slow(case.matrix(tensors))
    pull = torch.linspace(0.5, 1.5, found.numel(), dtype=torch.float64).reshape(found.shape)
    if measure == "frobenius":  # a square root has no slope at zero, where a whole matrix is masked
        pull = pull * (expected.detach() > 0)
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(found, leaves, pull, **options)
    twins = torch.autograd.grad(expected, leaves, pull, **options)
    for a, b in zip(gradients, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_and_largest_score(causal: bool) -> None:
    q, k = (Case("", softmax, {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4)}).tensors()[x] for x in "qk")
    pair_mask = torch.rand(5, 7) < 0.6
    pair_mask[3] = False
    op = softmax(q, k, pair_mask=pair_mask, causal=causal)
    scores = references.scores(q, k, 0.5)
    seen = references.visible(5, 7, causal=causal, pair_mask=pair_mask)
    torch.testing.assert_close(op.log_sum_exp(), references.log_sum_exp(scores, seen))
    assert (op.log_sum_exp()[..., 3] == -math.inf).all()
    torch.testing.assert_close(op.largest_score(), scores.masked_fill(~seen, -math.inf).amax((-2, -1)))


def test_the_fused_log_sum_exp_equals_the_chunked_one() -> None:
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        scores = softmax(q, k, causal=causal).scores
        for fast, slow in zip(attend_with_lse(scores, v), attend_with_lse_in_chunks(scores, v), strict=True):
            torch.testing.assert_close(fast, slow)


def test_large_scores_stay_finite() -> None:
    q = 1e3 * torch.randn(2, 3, 6, 4, dtype=torch.float64)
    op, p = softmax(q, q), references.softmax(q, q)
    torch.testing.assert_close(op.entropy(), references.entropy(p), rtol=1e-9, atol=1e-7)
    u = torch.randn(2, 3, 6, 2, dtype=torch.float64)
    torch.testing.assert_close(op.adjoint(u), p.mT @ u, rtol=1e-9, atol=1e-9)


def test_no_m_by_n_tensor_is_made() -> None:
    """apply, adjoint and the measures at 2048 tokens never hold the 4 million entries of P."""
    n = 2048
    op = softmax(torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 8))
    with torch.no_grad(), Largest() as seen:
        op(torch.randn(1, 1, n, 32))
        op.adjoint(torch.randn(1, 1, n, 32))
        op.entropy()
        op.frobenius()
    assert seen.elements < n * n // 16


def test_values_whose_rows_are_not_in_one_piece_take_the_fused_kernel() -> None:
    """A transposed v has last stride n; the kernel would quietly form P, so it is laid out anew first."""
    q, k, v = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8), torch.randn(1, 1, 8, 64).mT
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = softmax(q, k)(v)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    torch.testing.assert_close(out, softmax(q, k)(v.contiguous()))
