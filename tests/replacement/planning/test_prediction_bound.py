"""The bound for one more text: its formula, its coverage where its premises hold, and its edges."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from headwise.replacement.planning.prediction_bound import CONFIDENCE, FLOOR, prediction_bound, quantile


def test_the_formula_written_out() -> None:
    """Three kinds of 2, 2 and 4 texts."""
    logs = [[0.0, 1.0], [0.5, 0.7], [0.2, 0.4, 0.6, 0.4]]
    means = torch.tensor([sum(row) / len(row) for row in logs], dtype=torch.float64)
    within = sum((y - m) ** 2 for row, m in zip(logs, means.tolist(), strict=True) for y in row) / 5
    parts = (1 + 1 / 3) * means.var().item(), (1 - (1 / 2 + 1 / 2 + 1 / 4) / 3) * within
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 5)
    expected = math.exp(means.mean().item() + quantile(freedom) * math.sqrt(sum(parts)))
    found = prediction_bound({str(i): [math.exp(y) for y in row] for i, row in enumerate(logs)})
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kinds", "texts", "between", "within"),
    [(5, 6, 0.0, 0.4), (5, 6, 0.1, 0.4), (5, 6, 0.5, 0.4), (6, 2, 0.5, 0.3), (6, 1, 0.4, 0.4), (4, 2, 0.8, 0.1)],
)
def test_coverage(kinds: int, texts: int, between: float, within: float) -> None:
    """Of 3000 new texts of new kinds, 98.3 to 99.6 % stay below the bound if log drift is normal."""
    generator = torch.Generator().manual_seed(0)
    draws = 3000
    level = between * torch.randn(draws, kinds + 1, 1, generator=generator, dtype=torch.float64)
    logs = level + within * torch.randn(draws, kinds + 1, texts, generator=generator, dtype=torch.float64)
    drifts = (0.02 * logs.exp()).tolist()
    kept = sum(row[-1][0] <= prediction_bound({str(i): one for i, one in enumerate(row[:-1])}) for row in drifts)
    assert 0.983 <= kept / draws <= 0.996


def test_the_bound_grows_with_both_spreads_and_is_never_below_the_largest() -> None:
    alike = {"a": [0.01, 0.011], "b": [0.0105, 0.01], "c": [0.011, 0.0095]}
    apart = {**alike, "c": [0.022, 0.019]}
    uneven = {**alike, "c": [0.0055, 0.019]}
    assert 0.011 < prediction_bound(alike) < min(prediction_bound(apart), prediction_bound(uneven))
    assert prediction_bound({"a": [0.01] * 3, "b": [0.01] * 3}) == 0.01
    assert prediction_bound({"a": [0.01] * 50, "b": [0.01] * 49 + [0.5]}) >= 0.5


def test_how_small_the_smallest_are_does_not_matter() -> None:
    drifts = {kind: [0.02, 0.03] for kind in "abcd"}
    small = [prediction_bound({**drifts, "e": [tiny, tiny]}) for tiny in (0.0, 1e-12, 1e-5, FLOOR * 0.019)]
    assert small[0] == pytest.approx(small[1])
    assert small == pytest.approx([small[0]] * 4, rel=0.2)
    assert 0.03 < small[0] < 0.4
    assert prediction_bound({"a": [0.0], "b": [0.0, 0.0]}) == 0.0


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, CONFIDENCE, 0.999])
def test_quantiles_of_students_t(confidence: float) -> None:
    for freedom in (1.0, 2.5, 4.0, 7.3, 12.0, 40.0, 900.0, 1e9):
        expected = scipy.stats.t.ppf(confidence, freedom)
        assert quantile(freedom, confidence) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert quantile(0.3) == quantile(1)


def test_more_confidence_is_a_larger_bound() -> None:
    drifts = {"a": [0.01, 0.011], "b": [0.0205, 0.01], "c": [0.011, 0.0095]}
    bounds = [prediction_bound(drifts, confidence) for confidence in (0.9, 0.95, 0.99)]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == prediction_bound(drifts)
