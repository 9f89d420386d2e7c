"""What the checks measure with: the search for violations, sketches, fitted exponents, traced memory."""

from __future__ import annotations

import math

import pytest
import torch
from headwise.theory.exponent import exponent
from headwise.theory.peak_memory import peak_bytes
from torch import nn

from headwise.errors import HeadwiseError
from headwise.ledger.claim_figures import bound_curves, cumulative_spectra, depth_curves, failure_rates, path_groups
from headwise.ledger.rank_collapse import bound_gap
from headwise.ledger.rank_collapse_questions import corrected_gap, entrywise_gap, triangle_gap
from headwise.theory.complexity import (
    ARCHITECTURES,
    LENGTHS,
    RECURRENT,
    claimed_growth,
    formed_memory_growth,
    growth,
    memory_growth,
    time_growth,
)
from headwise.theory.concentration import (
    Frequency,
    best_rank_error,
    expected_square,
    measured_square,
    sketch_error,
    sketch_size,
)
from headwise.theory.counterexamples import search


def test_search_finds_a_violation_where_there_is_one() -> None:
    """x <= x^2 fails between 0 and 1; x^2 <= 1 + x^2 nowhere."""
    draw = lambda g: (torch.rand(1, dtype=torch.float64, generator=g) + 0.9,)  # noqa: E731
    found = search(lambda x: x.log().sum(), lambda x: 2 * x.log().sum(), draw, starts=2, steps=50)
    assert found.gap > 0
    assert 0 < found.at[0].item() < 1
    again = search(lambda x: x.log().sum(), lambda x: 2 * x.log().sum(), draw, starts=2, steps=50)
    assert again.gap == found.gap
    assert torch.equal(again.at[0], found.at[0])
    none = search(lambda x: 2 * x.log().sum(), lambda x: (1 + x**2).log().sum(), draw, starts=2, steps=50)
    assert none.gap < 0
    with pytest.raises(HeadwiseError, match="none of 2 starts"):
        search(lambda x: (-x).log().sum(), lambda x: x.sum(), draw, starts=2, steps=2)


def test_a_start_that_leaves_the_numbers_does_not_stop_the_others() -> None:
    draws = iter((-1.0, 0.5))
    found = search(
        lambda x: x.log().sum(),
        lambda x: 2 * x.log().sum(),
        lambda g: (torch.tensor([next(draws)], dtype=torch.float64),),
        starts=2,
        steps=20,
    )
    assert found.start == 1
    assert found.gap > math.log(2)


@pytest.mark.parametrize("gap", [triangle_gap, lambda: entrywise_gap(2, 1)], ids=["triangle", "step 9"])
def test_the_refutations_are_found_by_climbing(gap) -> None:
    """The worst case is one of a seed, is a violation, and was not there before the search climbed."""
    found = gap()
    assert found.gap > 0
    assert gap().gap == found.gap
    assert all(torch.equal(a, b) for a, b in zip(gap().at, found.at, strict=True))


def test_searches_that_find_nothing_would_have_found_something() -> None:
    assert corrected_gap(2, 1).gap == pytest.approx(math.log(1 / 4), abs=0.01)  # with 2D / 4 it is attained
    tight = bound_gap(1, 2, 1, 1, starts=4, steps=150)
    assert tight.gap == pytest.approx(math.log(1 / 8), abs=0.02)  # two tokens of one number each
    assert bound_gap(1, 2, 1, 1, constant=0.4, starts=4, steps=150).gap > 0


def test_the_second_moment_law() -> None:
    p = torch.softmax(torch.randn(30, 40, dtype=torch.float64), -1)
    w = torch.randn(40, 1, dtype=torch.float64)
    mean, error = measured_square(p, w, 12, 400, generator=torch.Generator().manual_seed(0))
    assert abs(mean - expected_square(p, w, 12)) < 4 * error
    assert abs(mean - 2 * expected_square(p, w, 12)) > 4 * error  # it could tell
    assert sketch_size(512, 0.5) == math.ceil(5 * math.log(512) / 0.125)
    low, high = Frequency(5, 100).interval
    assert low < 0.05 < high


def test_no_matrix_of_that_rank_is_closer_than_the_spectrum_says() -> None:
    p = torch.softmax(3 * torch.randn(20, 20, dtype=torch.float64), -1)
    u, s, v = torch.linalg.svd(p)
    assert best_rank_error(p, 5) == pytest.approx((p - (u[:, :5] * s[:5]) @ v[:5]).norm().item())
    assert best_rank_error(p, 20) == pytest.approx(0, abs=1e-12)
    assert sketch_error(p, 5, generator=torch.Generator().manual_seed(0)) > best_rank_error(p, 5)


def test_counted_exponents() -> None:
    assert exponent((2, 4, 8, 16), (3, 12, 48, 192)).value == pytest.approx(2)
    assert str(exponent((2, 4, 8, 16), (3, 12, 48, 192))) == "n^2.00 ± 0.00"
    assert str(exponent((2, 4), (3, 12))) == "n^2.00"
    assert growth("softmax", "multiply_adds").value == pytest.approx(2)
    assert 1.2 < growth("strided", "multiply_adds").value < 1.6  # lower-order terms count at these lengths
    assert growth(RECURRENT, "depth").value == pytest.approx(1)
    assert claimed_growth("hashed") == pytest.approx(exponent(LENGTHS, [n * math.log2(n) for n in LENGTHS]).value)


def test_peak_memory_is_what_is_alive_at_once() -> None:
    x = torch.zeros(100, 100)  # 40 kB
    assert peak_bytes(lambda: x + 1) == 40_000
    assert peak_bytes(lambda: (x + 1) + 1) == 80_000  # the first dies after the second is made
    assert peak_bytes(lambda: [x + 1 for _ in range(3)]) == 120_000
    assert peak_bytes(lambda: [(x + 1).sum() for _ in range(3)]) == 40_000 + 3 * 4  # never two large ones
    assert peak_bytes(lambda: x.mT.reshape(10, 1000)[:5]) == 40_000  # a copy and its view
    assert peak_bytes(lambda: x.clone().add_(1).mul_(2)) == 40_000
    assert peak_bytes(lambda: x.view(-1)) == 0
    assert peak_bytes(lambda: torch.softmax(x @ x.mT, -1) @ x) == 80_000 + 40_000 - 40_000


def test_memory_of_exact_attention_depends_on_whether_p_is_formed() -> None:
    assert memory_growth("softmax", (128, 256, 512)).value == pytest.approx(1, abs=0.02)
    assert formed_memory_growth((128, 256, 512)).value == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("name", [*ARCHITECTURES, RECURRENT])
def test_time_can_be_fitted(name: str) -> None:
    found = time_growth(name, (64, 128, 256), rounds=1)
    assert math.isfinite(found.value)
    assert found.points == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_traced_memory_agrees_with_the_allocator(name: str) -> None:
    """The profiler counts every allocation; only scratch within a kernel, which does not grow with n, is missed."""
    from torch.profiler import ProfilerActivity, profile

    def allocated(call) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            call()
        now = peak = 0
        for event in trace.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        return peak

    missed = []
    for n in (2048, 8192):
        operator, v = ARCHITECTURES[name].build(torch.randn(n, 16), torch.randn(n, 16)), torch.randn(n, 16)
        operator(v)
        missed.append(allocated(lambda op=operator, v=v: op(v)) - peak_bytes(lambda op=operator, v=v: op(v)))
    assert 0 <= missed[0] < 2**20
    assert missed[1] <= missed[0] + 2**16


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


def test_the_figures_are_drawn_by_one_command(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from headwise.cli.main import main
    from headwise.ledger import claim_figures as figures

    small = {n: [(i + 1) / n for i in range(n)] for n in (8, 16, 32, 64)}
    monkeypatch.setattr(figures, "cumulative_spectra", lambda: {"softmax": small, "double softmax": small})
    monkeypatch.setattr(figures, "failure_rates", lambda n: {x: [Frequency(1, 10)] * len(figures.SIZES) for x in "abc"})
    assert main(["verify", "--figures", str(tmp_path)]) == 0
    names = {"residual-by-depth", "path-lengths", "spectra", "failures"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}


def test_a_module_may_be_measured_too() -> None:
    layer = nn.Linear(16, 16)
    assert peak_bytes(lambda: layer(torch.zeros(8, 16))) == 2 * 8 * 16 * 4
