"""The recomputed figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.cli.main import main
from headwise.ledger import claim_figures
from headwise.ledger.claim_figures import bound_curves, cumulative_spectra, depth_curves, failure_rates, path_groups
from headwise.theory.concentration import Frequency


def test_the_published_figures_have_their_shape() -> None:
    curves = depth_curves(n=16)
    assert curves["attention"][-1] < 1e-6
    assert curves["+ skip"][-1] > 0.1
    assert curves["+ skip + MLP"][-1] > 1e-2
    assert curves["attention"][-1] <= curves["+ MLP"][-1] * 1e3
    norms, residuals = path_groups(depth=6, heads=4, n=12)
    assert norms[0] > norms[-1]
    assert residuals == sorted(residuals, reverse=True)  # the longer the path, the more equal its tokens
    bounds = bound_curves(depth=3, width=12, n=8)
    assert all(low <= high for low, high in zip(bounds["measured"], bounds["the bound"], strict=True))
    assert bounds["measured"][-1] < -50  # not the rounding of a difference
    rates = failure_rates((8, 64), n=64, draws=20)
    assert rates["of zero mean"][1].rate > rates["nearly constant"][1].rate
    spectra = cumulative_spectra((32, 64), d=4)
    assert spectra["double softmax"][64][3] == pytest.approx(1)
    assert spectra["softmax"][64][3] < 0.9


def test_the_command_draws_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    small = {n: [(i + 1) / n for i in range(n)] for n in (8, 16, 32, 64)}
    monkeypatch.setattr(claim_figures, "cumulative_spectra", lambda: {"softmax": small, "double softmax": small})
    rates = [Frequency(1, 10)] * len(claim_figures.SIZES)
    monkeypatch.setattr(claim_figures, "failure_rates", lambda n: dict.fromkeys("abc", rates))
    assert main(["verify", "--figures", str(tmp_path)]) == 0
    names = {"residual-by-depth", "path-lengths", "spectra", "failures"}
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        f"{name}.{kind}" for name in names for kind in ("svg", "png")
    }
