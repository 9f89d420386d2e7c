"""The ladder of plans on tables whose best plans are known."""

from __future__ import annotations

import itertools

import pytest
import torch

from headwise.replacement.planning.allocation import COHERENT, Allocation, DriftModel, gram_of

COSTS = torch.tensor([[1.0, 0.3, 0.01]] * 4, dtype=torch.float64) / 4


def samples(seed: int, kinds: int = 2) -> dict[str, torch.Tensor]:
    """Units that move the answer in random directions, cheaper candidates further."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([0.0, 0.3, 1.0])[None, :, None]
    return {
        str(i): torch.randn(4, 1, 50, generator=generator) * size * torch.arange(1, 5)[:, None, None] * 0.1
        for i in range(kinds)
    }


@pytest.mark.parametrize("seed", range(4))
def test_the_ladder_is_near_the_best_plan_of_every_cost(seed: int) -> None:
    model = DriftModel(COSTS, {kind: gram_of(x) for kind, x in samples(seed).items()})

    def drift(plan: Allocation) -> float:
        return sum(model.predicted(plan).values()) / 2

    ladder = model.ladder()
    assert ladder[0].chosen == (0, 0, 0, 0)
    assert drift(ladder[0]) == 0
    assert ladder[-1].cost == pytest.approx(0.01)
    every = [Allocation(row, float(COSTS[range(4), list(row)].sum())) for row in itertools.product(range(3), repeat=4)]
    for above, plan in itertools.pairwise(ladder):
        assert plan.cost < above.cost
        best = min(drift(other) for other in every if other.cost <= plan.cost + 1e-9)
        assert drift(plan) <= 1.5 * best + 1e-12


def test_predicted_drift_is_half_the_square_of_the_sum() -> None:
    """Up to COHERENT, the factor on products of different units."""
    x = samples(0, kinds=1)["0"]
    model = DriftModel(COSTS, {"0": gram_of(x)})
    moved = x[0, 2] + x[2, 1]
    expected = float(moved.square().mean() / 2) - (1 - COHERENT) * float((x[0, 2] * x[2, 1]).mean())
    assert model.predicted(Allocation((2, 0, 1, 0), 0.0))["0"] == pytest.approx(expected, rel=1e-5)


def test_a_plan_without_a_kind_does_not_see_it() -> None:
    """Unit 0 moves the answer of kind b only, unit 1 that of kind a only."""
    x = {kind: torch.zeros(2, 2, 3) for kind in "ab"}
    x["b"][0, 1], x["a"][1, 1] = 1.0, 1.0
    model = DriftModel(torch.tensor([[0.5, 0.1]] * 2), {kind: gram_of(each) for kind, each in x.items()})
    assert model.ladder(without="b")[1].chosen == (1, 0)
    assert model.ladder(without="a")[1].chosen == (0, 1)
