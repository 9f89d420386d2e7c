"""Allocation and search on small tables whose best plans are known."""

from __future__ import annotations

import itertools

import torch

from headwise.replacement import Choice, PlanPoint
from headwise.replacement.planning.plan_search import (
    DriftModel,
    HeadCandidate,
    MeasuredPlan,
    pareto,
    search,
    undominated,
)

KINDS = [Choice("softmax"), Choice("window", {"width": 9}), Choice("uniform")]
PRICES = [1.0, 0.3, 0.01]


def table(heads: int = 4, seed: int = 0) -> dict:
    """Heads that move the output in random directions, cheaper choices further."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for head in range(heads):
        way = torch.randn(2, 5, generator=generator) * 0.1 * (1 + head)
        options = []
        for choice, price, size in zip(KINDS, PRICES, (0.0, 0.3, 1.0), strict=True):
            moved = way * size
            options.append(HeadCandidate(choice, price, float(moved.square().sum(-1).mean() / 2), moved))
        found["site", head] = options
    return found


def truth(given: dict, sites: dict) -> float:
    """The drift of a plan if directions add: what the search can only measure."""
    total = sum(
        next(o.direction for o in given["site", head] if o.choice == choice)
        for head, choice in enumerate(sites["site"])
    )
    return float(total.square().sum(-1).mean() / 2)


def test_the_search_finds_the_true_trade_off() -> None:
    given = table()
    begin = [
        PlanPoint({"site": [c] * 4}, 4 * p, truth(given, {"site": [c] * 4}), 0.0)
        for c, p in zip(KINDS, PRICES, strict=True)
    ]
    found = search(given, begin, lambda sites: (truth(given, sites), 0.0), evaluations=80)
    every = []
    for row in itertools.product(range(3), repeat=4):
        sites = {"site": [KINDS[i] for i in row]}
        every.append((sum(PRICES[i] for i in row), truth(given, sites)))
    for point in found:  # at each found cost nothing is better by much
        best = min(drift for cost, drift in every if cost <= point.cost + 1e-9)
        assert point.selection <= 1.3 * best + 1e-12
    for start in begin:
        assert any(p.cost <= start.cost + 1e-9 and p.selection <= start.selection + 1e-12 for p in found)


def test_coherent_errors_are_foreseen() -> None:
    """Two heads that move in the same direction drift four times as much as one; additive drifts would be twice."""
    way = torch.ones(1, 4) * 0.1
    options = [HeadCandidate(KINDS[0], 1.0, 0.0, torch.zeros(1, 4)), HeadCandidate(KINDS[2], 0.0, 0.02, way)]
    both = DriftModel.from_table({("site", 0): options, ("site", 1): options})
    assert both.predicted([1, 3]) > 0.06
    apart = DriftModel.from_table(
        {("site", h): [HeadCandidate(o.choice, o.cost, o.drift) for o in options] for h in (0, 1)}
    )
    assert abs(apart.predicted([1, 3]) - 0.04) < 1e-12


def test_dominated_options_go_and_the_ends_stay() -> None:
    options = [
        HeadCandidate(Choice("window", {"width": w}), p, d)
        for w, p, d in [(9, 0.1, 0.5), (17, 0.2, 0.6), (33, 0.4, 0.1)]
    ]
    assert [o.cost for o in undominated(options, 9)] == [0.1, 0.4]
    many = [HeadCandidate(Choice("window", {"width": i}), i / 10, 1 / i) for i in range(1, 10)]
    kept = undominated(many, 4)
    assert len(kept) == 4
    assert (kept[0].cost, kept[-1].cost) == (0.1, 0.9)


def test_pareto_keeps_what_nothing_undercuts() -> None:
    points = [
        MeasuredPlan(PlanPoint({}, cost, drift, 0.0), 0.0)
        for cost, drift in [(1, 0), (0.5, 0.2), (0.6, 0.3), (0.1, 0.9)]
    ]
    assert [f.point.cost for f in pareto(points)] == [1, 0.5, 0.1]
