"""Estimates of sums over all singular values against the full decomposition, within the error that they state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.linalg.krylov import singular_vectors
from headwise.linalg.quadrature import SpectralSums
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax


def estimated(scores: Scores, *, seed: int = 1) -> SpectralSums:
    """Seed 0 would give the start vectors that the test gives its queries."""
    operator = Softmax(scores)
    return SpectralSums.of(
        singular_vectors(
            operator.apply,
            operator.adjoint_map(),
            operator.shape,
            128,
            like=operator.like,
            block=32,
            steps=8,
            certificate=0,
            generator=torch.Generator().manual_seed(seed),
        )
    )


def effective_rank(values: Tensor) -> float:
    return torch.special.entr(values / values.sum()).sum().exp().item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sharpness", [0.1, 0.5, 2.0, 16.0])
def test_effective_rank_is_within_its_error(sharpness: float, causal: bool) -> None:
    """From almost uniform to almost one-hot heads, with the few steps of which the quadrature is least accurate."""
    n = 600
    q, k = sharpness * torch.randn(n, 32), torch.randn(n, 32)
    scores = Scores(q, k, 32**-0.5, Mask(n, n, causal=causal))
    values = torch.linalg.svdvals(Softmax(scores.to(torch.float64)).dense())
    sums = estimated(scores)
    found, expected = sums.effective_rank(), effective_rank(values)
    assert abs(math.log(found.value / expected)) < (3 * found.standard_error + found.bias) / expected
    assert abs(math.log(found.value / expected)) < 0.03
    assert found.error < 0.1 * expected
    for threshold in (1e-3, 0.1):
        count = int((values > threshold * values[0]).sum())
        above = sums.count_above(threshold * values[0].item())
        assert abs(above.value - count) < 3 * above.standard_error + above.bias + 1


def test_more_queries_than_keys_and_fewer() -> None:
    q, k = 2 * torch.randn(800, 16), torch.randn(550, 16)
    for one, other in ((q, k), (k, q)):
        scores = Scores(one, other, 0.25, Mask(len(one), len(other)))
        expected = effective_rank(torch.linalg.svdvals(Softmax(scores.to(torch.float64)).dense()))
        found = estimated(scores).effective_rank()
        assert abs(math.log(found.value / expected)) < (3 * found.standard_error + found.bias) / expected


@pytest.mark.slow
def test_the_standard_error_is_the_spread_over_starts() -> None:
    n = 600
    scores = Scores(2 * torch.randn(n, 16), torch.randn(n, 16), 0.25, Mask(n, n))
    runs = [estimated(scores, seed=seed).effective_rank() for seed in range(1, 13)]
    spread = torch.tensor([run.value for run in runs]).std().item()
    stated = sum(run.standard_error for run in runs) / len(runs)
    assert 0.5 < stated / spread < 2
