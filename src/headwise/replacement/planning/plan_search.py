"""Which operator for which head: least cost for a given drift.

    minimise  1/2 || sum_h t_h(c_h) ||^2 + lambda sum_h cost(c_h)     over choices c_h, for many lambda

t_h(c) is the direction in which the output moves on the sphere with choice c at head h alone; drift is half its square,
because 1 - cos(angle) = angle^2 / 2.  To first order the directions of many replaced heads add: errors of similar
operators point in one direction, so their joint drift exceeds the sum of their drifts.  Where only drifts are known
(losses of language models), drifts add.  Every predicted plan is measured before it counts: layers and kinds are
weighed at random, heads swap cost, and only measured improvements are kept.  The search starts from every single
operator for all heads, so its result is never worse than any of them on the selection texts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from headwise.replacement.kinds import Choice
from headwise.replacement.plans import PlanPoint, Sites

Head = tuple[str, int]

MeasurePlan = Callable[[Sites], tuple[float, float]]
"""A whole plan -> mean drift over the selection texts, and its standard error."""

COHERENT = 0.8
"""Factor on the products t_h . t_g, below 1 because errors that cancel on a few texts may not cancel on others."""

USEFUL = 0.5
"""Predicted drift above which no plan is measured: the output would be unrelated to the original."""


@final
@dataclass(frozen=True, eq=False)
class HeadCandidate:
    """One choice for one head: its cost, the drift with this head alone replaced, and its direction (texts, width)."""

    choice: Choice
    cost: float
    drift: float
    direction: Tensor | None = None


@final
@dataclass(frozen=True, eq=False)
class MeasuredPlan:
    """A measured plan, and the lambda and weights that led to it."""

    point: PlanPoint
    slope: float
    weights: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, eq=False)
class DriftModel:
    """The candidates of all heads in one list, their costs, and a quadratic prediction of the drift of a plan.

    A plan is a list with the index of one candidate for each head.
    """

    heads: list[Head]
    candidates: list[HeadCandidate]
    indices: list[list[int]]  # of the candidates of each head
    costs: Tensor
    gram: Tensor  # predicted drift = x^T gram x, where x is 1 at the chosen candidates and 0 elsewhere

    @staticmethod
    def from_table(table: Mapping[Head, Sequence[HeadCandidate]]) -> DriftModel:
        candidates, indices = [], []
        for of_head in table.values():
            indices.append(list(range(len(candidates), len(candidates) + len(of_head))))
            candidates += of_head
        costs = torch.tensor([c.cost for c in candidates], dtype=torch.float64)
        drifts = torch.tensor([max(0.0, c.drift) for c in candidates], dtype=torch.float64)
        gram = torch.diag(drifts)
        directions = [c.direction.double().flatten() for c in candidates if c.direction is not None]
        if len(directions) == len(candidates):
            stacked, texts = torch.stack(directions), len(candidates[0].direction)  # type: ignore[arg-type]
            gram = COHERENT * (stacked @ stacked.T) / (2 * texts)
            gram.diagonal().copy_(drifts)
        return DriftModel(list(table), candidates, indices, costs, gram)

    def allocate(self, slope: float, weights: Mapping[str, float]) -> list[int]:
        """A plan with small drift + slope * cost, by coordinate descent from the most expensive plan.

        weights   factors on the drift, by site and by kind
        """
        scale = torch.tensor(
            [
                weights.get(site, 1.0) * weights.get(self.candidates[i].choice.kind, 1.0)
                for (site, _), indices in zip(self.heads, self.indices, strict=True)
                for i in indices
            ],
            dtype=torch.float64,
        )
        gram = self.gram * (scale[:, None] * scale).sqrt()
        plan = [self._most_expensive(indices) for indices in self.indices]
        total = gram[:, plan].sum(1)
        for _ in range(20):
            changed = False
            for head, indices in enumerate(self.indices):
                old = plan[head]
                others = total[indices] - gram[indices, old]
                losses = gram.diagonal()[indices] + 2 * others + slope * self.costs[indices]
                best = indices[int(losses.argmin())]
                if best != old:
                    total += gram[:, best] - gram[:, old]
                    plan[head], changed = best, True
            if not changed:
                break
        return plan

    def _most_expensive(self, indices: Sequence[int]) -> int:
        return max(indices, key=lambda i: self.candidates[i].cost)

    def sites(self, plan: Sequence[int]) -> Sites:
        """{site: [choice of head 0, choice of head 1, ...]}"""
        sites: dict[str, list[Choice]] = {}
        for (site, _), index in zip(self.heads, plan, strict=True):
            sites.setdefault(site, []).append(self.candidates[index].choice)
        return sites

    def plan_of(self, sites: Sites) -> list[int]:
        """The inverse of `sites`; a choice that is not a candidate becomes the most expensive one of its head."""
        plan = []
        for (site, head), indices in zip(self.heads, self.indices, strict=True):
            same = [i for i in indices if self.candidates[i].choice == sites[site][head]]
            plan.append(same[0] if same else self._most_expensive(indices))
        return plan

    def cost(self, plan: Sequence[int]) -> float:
        return float(self.costs[list(plan)].sum())

    def predicted(self, plan: Sequence[int]) -> float:
        return float(self.gram[list(plan)][:, list(plan)].sum())

    def slopes(self, count: int) -> list[float]:
        """lambdas whose plans are evenly spread over log cost, where the predicted drift is USEFUL."""
        steps = []
        for indices in self.indices:
            ordered = sorted((self.candidates[i] for i in indices), key=lambda c: c.cost)
            steps += [
                (a.drift - b.drift) / (b.cost - a.cost)
                for a, b in pairwise(ordered)
                if a.drift > b.drift and b.cost > a.cost
            ]
        if not steps:
            return [1.0]
        # heads together drift more than alone, so lambda may be larger by the number of heads
        low, high = math.log(min(steps)), math.log(max(steps) * len(self.heads))
        tried = []
        for i in range(8 * count):
            slope = math.exp(low + (high - low) * i / (8 * count - 1))
            plan = self.allocate(slope, {})
            if self.predicted(plan) <= USEFUL:
                tried.append((math.log(self.cost(plan) + 1e-6), slope))
        if not tried:
            return [math.exp(low)]
        ends = min(tried)[0], max(tried)[0]
        grid = [ends[1] + (ends[0] - ends[1]) * i / max(1, count - 1) for i in range(count)]
        return sorted({min(tried, key=lambda pair: abs(pair[0] - cost))[1] for cost in grid})

    def exchange(self, sites: Sites, rng: random.Random) -> list[int]:
        """A few heads take a more expensive candidate and a few a cheaper one, where that changes the drift best."""
        plan = self.plan_of(sites)
        gram, total = self.gram, self.gram[:, plan].sum(1)
        alone = gram.diagonal()
        moves = []  # (change of drift per change of cost, change of cost, head, candidate)
        for head, indices in enumerate(self.indices):
            old = plan[head]
            for new in indices:
                cost = float(self.costs[new] - self.costs[old])
                drift = float(alone[new] + alone[old] + 2 * (total[new] - total[old] - gram[new, old]))
                if cost:
                    moves.append((drift / abs(cost) * math.exp(rng.gauss(0, 0.3)), cost, head, new))
        moves.sort()
        count, spent = rng.choice((1, 2, 4, 8)), 0.0
        touched: set[int] = set()
        for _, cost, head, new in moves:
            if cost > 0 and len(touched) < count and head not in touched:
                plan[head], spent = new, spent + cost
                touched.add(head)
        for _, cost, head, new in moves:
            if cost < 0 < spent and head not in touched:
                plan[head], spent = new, spent + cost
                touched.add(head)
        return plan


def pareto(plans: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """In order of decreasing cost, each with less drift than every cheaper one."""
    kept: list[MeasuredPlan] = []
    for plan in sorted(plans, key=lambda p: (p.point.cost, p.point.bound)):
        if not kept or plan.point.bound < kept[-1].point.bound:
            kept.append(plan)
    return kept[::-1]


def undominated(candidates: Sequence[HeadCandidate], most: int) -> list[HeadCandidate]:
    """Candidates to which no other is better in cost and drift, at most `most`, spread over both."""
    kept: list[HeadCandidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.drift)):
        if not kept or candidate.drift < kept[-1].drift:
            kept.append(candidate)
    while len(kept) > max(2, most):
        # drop the one whose neighbours are closest; the ends stay
        gaps = [_gap(a, b) for a, b in zip(kept, kept[2:], strict=False)]
        del kept[1 + gaps.index(min(gaps))]
    return kept


def _gap(a: HeadCandidate, b: HeadCandidate) -> float:
    return math.log((b.cost + 1e-6) / (a.cost + 1e-6)) + math.log((a.drift + 1e-6) / (b.drift + 1e-6))


def search(
    table: Mapping[Head, Sequence[HeadCandidate]],
    begin: Sequence[PlanPoint],
    measure: MeasurePlan,
    *,
    evaluations: int,
    slopes: int = 24,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[PlanPoint]:
    """The trade-off curve: the measured points `begin`, allocations for up to `slopes` lambdas, and improvements."""
    rng, model = random.Random(seed), DriftModel.from_table(table)
    archive = pareto([MeasuredPlan(point, 0.0) for point in begin])
    measured = {_key(plan.point.sites) for plan in archive}
    ladder = model.slopes(min(slopes, max(1, evaluations // 2)))
    names = sorted({site for site, _ in model.heads} | {c.choice.kind for c in model.candidates})
    for done in range(max(evaluations, len(ladder))):
        if done < len(ladder):
            slope, weights = ladder[done], {}
            plan = model.allocate(slope, weights)
        else:
            parent = _pick(archive, rng)
            slope = (parent.slope or rng.choice(ladder)) * math.exp(rng.gauss(0, 0.5))
            weights = {name: parent.weights.get(name, 1.0) * math.exp(rng.gauss(0, 0.4)) for name in names}
            if rng.random() < 0.5:
                plan, slope, weights = model.exchange(parent.point.sites, rng), parent.slope, parent.weights
            else:
                plan = model.allocate(slope, weights)
        sites = model.sites(plan)
        if _key(sites) not in measured:
            measured.add(_key(sites))
            mean, error = measure(sites)
            archive = pareto([*archive, MeasuredPlan(PlanPoint(sites, model.cost(plan), model.predicted(plan), {}, mean + error), slope, weights)])
        if progress is not None:
            progress(done + 1)
    return [plan.point for plan in archive]


def _pick(archive: Sequence[MeasuredPlan], rng: random.Random) -> MeasuredPlan:
    """A plan of the archive, uniform over log cost, so that gaps are filled."""
    costs = [math.log(plan.point.cost + 1e-4) for plan in archive]
    at = rng.uniform(min(costs), max(costs))
    return min(zip(archive, costs, strict=True), key=lambda pair: abs(pair[1] - at))[0]


def _key(sites: Sites) -> tuple:
    return tuple((site, tuple(choices)) for site, choices in sites.items())
