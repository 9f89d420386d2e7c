"""Which operator for which head: least cost for a given drift, by measured drifts.

    minimise  1/2 || sum_h t_h(c_h) ||^2 + lambda sum_h cost(c_h)     over choices c_h, for many lambda

t_h(c) is the way the model's answer moves, over the sphere of directions, with choice c at head h alone; drift is half
its square, for 1 - cos(angle) = angle^2 / 2.  Answers of many replaced heads add as vectors do, to first order: errors
of alike operators pull in one direction and drift together more than the sum of their drifts.  Where only drifts are
known (losses of language models), they add.  What this predicts is measured before it counts: layers and kinds are
weighed at random, heads exchange prices, and only what was measured to be better is kept.  The search begins with
every single operator for all heads, so what it returns is never worse than any of them on the texts it is chosen by.
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

from headwise.replacement.choice import Choice
from headwise.replacement.plan import Point, Sites

Head = tuple[str, int]

Measured = Callable[[Sites], tuple[float, float]]
"""A whole plan -> mean drift over the selection texts, and its standard error."""

COHERENT = 0.8
"""How much of the products t_h . t_g counts: taken whole, errors seen to cancel on a few texts would be trusted."""

USEFUL = 0.5
"""Predicted drift beyond which no plan is measured: the answer has nothing left of what it was."""


@final
@dataclass(frozen=True, eq=False)
class Option:
    """One choice for one head: its price, what it alone does to the model, and which way (texts, width)."""

    choice: Choice
    price: float
    drift: float
    way: Tensor | None = None


@final
@dataclass(frozen=True, eq=False)
class Found:
    """A measured plan, and the weights that led to it."""

    point: Point
    slope: float
    weights: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, eq=False)
class Table:
    """All options of all heads in one row, and the drift that any two of them have together."""

    heads: list[Head]
    options: list[Option]
    of: list[list[int]]  # places of each head's options
    prices: Tensor
    gram: Tensor  # predicted drift = x^T gram x for x that holds a 1 for each head's option

    @staticmethod
    def of_heads(given: Mapping[Head, Sequence[Option]]) -> Table:
        heads, options, of = list(given), [], []
        for head in heads:
            of.append(list(range(len(options), len(options) + len(given[head]))))
            options += given[head]
        prices = torch.tensor([option.price for option in options], dtype=torch.float64)
        drifts = torch.tensor([max(0.0, option.drift) for option in options], dtype=torch.float64)
        gram = torch.diag(drifts)
        if all(option.way is not None for option in options):
            ways = torch.stack([option.way.double().flatten() for option in options])  # type: ignore[union-attr]
            texts = options[0].way.shape[0]  # type: ignore[union-attr]
            gram = COHERENT * (ways @ ways.T) / (2 * texts)
            gram.diagonal().copy_(drifts)
        return Table(heads, options, of, prices, gram)

    def allocate(self, slope: float, weights: Mapping[str, float]) -> list[int]:
        """An option for every head where a drift of `slope` is worth one unit of cost: one head after the other."""
        scale = torch.tensor([self._weight(place, weights) for place in range(len(self.options))], dtype=torch.float64)
        gram = self.gram * (scale[:, None] * scale).sqrt()
        chosen = [max(places, key=lambda i: self.options[i].price) for places in self.of]
        pull = gram[:, chosen].sum(1)
        for _ in range(20):
            changed = False
            for head, places in enumerate(self.of):
                old = chosen[head]
                apart = pull[places] - gram[places, old]
                losses = gram.diagonal()[places] + 2 * apart + slope * self.prices[places]
                best = places[int(losses.argmin())]
                if best != old:
                    pull += gram[:, best] - gram[:, old]
                    chosen[head], changed = best, True
            if not changed:
                break
        return chosen

    def _weight(self, place: int, weights: Mapping[str, float]) -> float:
        site = self.heads[self._head(place)][0]
        return weights.get(site, 1.0) * weights.get(self.options[place].choice.kind, 1.0)

    def _head(self, place: int) -> int:
        return next(i for i, places in enumerate(self.of) if place in places)

    def sites(self, chosen: Sequence[int]) -> Sites:
        """{site: [choice of head 0, choice of head 1, ...]}"""
        found: Sites = {}
        for (site, _), place in zip(self.heads, chosen, strict=True):
            found.setdefault(site, []).append(self.options[place].choice)
        return found

    def places(self, sites: Sites) -> list[int]:
        """The options that a plan chose; where one is not in the table, the dearest of that head."""
        found = []
        for (site, head), places in zip(self.heads, self.of, strict=True):
            same = [i for i in places if self.options[i].choice == sites[site][head]]
            found.append(same[0] if same else max(places, key=lambda i: self.options[i].price))
        return found

    def price(self, chosen: Sequence[int]) -> float:
        return float(self.prices[list(chosen)].sum())

    def slopes(self, count: int) -> list[float]:
        """lambdas whose allocations are spread over the logarithm of cost, where the predicted drift is of any use."""
        steps = []
        for places in self.of:
            ordered = sorted((self.options[i] for i in places), key=lambda o: o.price)
            steps += [
                (a.drift - b.drift) / (b.price - a.price)
                for a, b in pairwise(ordered)
                if a.drift > b.drift and b.price > a.price
            ]
        if not steps:
            return [1.0]
        # together heads drift more than alone, so lambda may be larger by as much as there are heads
        low, high = math.log(min(steps)), math.log(max(steps) * len(self.heads))
        tried = []
        for i in range(8 * count):
            slope = math.exp(low + (high - low) * i / (8 * count - 1))
            chosen = self.allocate(slope, {})
            if self.predicted(chosen) <= USEFUL:
                tried.append((math.log(self.price(chosen) + 1e-6), slope))
        if not tried:
            return [math.exp(low)]
        ends = min(tried)[0], max(tried)[0]
        wanted = [ends[1] + (ends[0] - ends[1]) * i / max(1, count - 1) for i in range(count)]
        return sorted({min(tried, key=lambda pair: abs(pair[0] - cost))[1] for cost in wanted})

    def predicted(self, chosen: Sequence[int]) -> float:
        places = list(chosen)
        return float(self.gram[places][:, places].sum())

    def exchange(self, sites: Sites, chance: random.Random) -> list[int]:
        """A few heads take a dearer option and a few a cheaper one, those first that gain most or lose least by it."""
        now = self.places(sites)
        gram, pull = self.gram, self.gram[:, now].sum(1)
        own = gram.diagonal()
        moves = []  # (drift gained for a unit of price, price, head, option)
        for head, places in enumerate(self.of):
            old = now[head]
            for new in places:
                price = float(self.prices[new] - self.prices[old])
                worse = float(own[new] + own[old] + 2 * (pull[new] - pull[old] - gram[new, old]))
                if price:
                    moves.append((worse / abs(price) * math.exp(chance.gauss(0, 0.3)), price, head, new))
        moves.sort()
        count, spent = chance.choice((1, 2, 4, 8)), 0.0
        touched: set[int] = set()
        for _, price, head, new in moves:
            if price > 0 and len(touched) < count and head not in touched:
                now[head], spent = new, spent + price
                touched.add(head)
        for _, price, head, new in moves:
            if price < 0 < spent and head not in touched:
                now[head], spent = new, spent + price
                touched.add(head)
        return now


def pareto(points: Sequence[Found]) -> list[Found]:
    """From the dearest to the cheapest, each with less drift than every cheaper one."""
    kept: list[Found] = []
    for found in sorted(points, key=lambda f: (f.point.cost, f.point.selection)):
        if not kept or found.point.selection < kept[-1].point.selection:
            kept.append(found)
    return kept[::-1]


def undominated(options: Sequence[Option], most: int) -> list[Option]:
    """Choices that no other undercuts in price and drift alike, at most so many, spread over both."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.price, o.drift)):
        if not kept or option.drift < kept[-1].drift:
            kept.append(option)
    while len(kept) > max(2, most):
        # the one whose neighbours are nearest says least; the ends stay
        gaps = [_gap(a, b) for a, b in zip(kept, kept[2:], strict=False)]
        del kept[1 + gaps.index(min(gaps))]
    return kept


def _gap(a: Option, b: Option) -> float:
    price = math.log((b.price + 1e-6) / (a.price + 1e-6))
    return price + math.log((a.drift + 1e-6) / (b.drift + 1e-6))


def search(
    given: Mapping[Head, Sequence[Option]],
    begin: Sequence[Point],
    measured: Measured,
    *,
    evaluations: int,
    slopes: int = 24,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[Point]:
    """The trade-off curve: `begin` (measured already), allocations over `slopes` lambdas, and measured improvements."""
    chance, table = random.Random(seed), Table.of_heads(given)
    archive = pareto([Found(point, 0.0) for point in begin])
    seen = {_key(found.point.sites) for found in archive}
    ladder = table.slopes(min(slopes, max(1, evaluations // 2)))
    named = sorted({site for site, _ in table.heads} | {option.choice.kind for option in table.options})
    for done in range(max(evaluations, len(ladder))):
        parent = archive[0]
        if done < len(ladder):
            slope, weights = ladder[done], {}
            chosen = table.allocate(slope, weights)
        else:
            parent = _picked(archive, chance)
            slope = (parent.slope or chance.choice(ladder)) * math.exp(chance.gauss(0, 0.5))
            weights = {name: parent.weights.get(name, 1.0) * math.exp(chance.gauss(0, 0.4)) for name in named}
            exchange = chance.random() < 0.5
            chosen = table.exchange(parent.point.sites, chance) if exchange else table.allocate(slope, weights)
            slope, weights = (parent.slope, parent.weights) if exchange else (slope, weights)
        sites = table.sites(chosen)
        if _key(sites) not in seen:
            seen.add(_key(sites))
            mean, error = measured(sites)
            archive = pareto([*archive, Found(Point(sites, table.price(chosen), mean, error), slope, weights)])
        if progress is not None:
            progress(done + 1)
    return [found.point for found in archive]


def _picked(archive: Sequence[Found], chance: random.Random) -> Found:
    """A point of the curve, evenly over the logarithm of its cost, for that is where gaps are to be filled."""
    costs = [math.log(found.point.cost + 1e-4) for found in archive]
    at = chance.uniform(min(costs), max(costs))
    return min(zip(archive, costs, strict=True), key=lambda pair: abs(pair[1] - at))[0]


def _key(sites: Sites) -> tuple:
    return tuple((site, tuple(choices)) for site, choices in sites.items())
