"""`plan(model, batches, tolerance=…)`: capture, fit, measure every head alone, search, and report on fresh texts.

Batches are dealt into three parts that never meet: calibration (replacements are fitted to it), selection (drifts are
measured on it and plans chosen by them) and test (only ever looked at by the finished curve).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.fingerprint import check_weights, fingerprint
from headwise.replacement.choice import EXACT, Choice
from headwise.replacement.install.mixed_heads import Heads
from headwise.replacement.plan import Plan, Point, Sites, each
from headwise.replacement.planning.candidates import candidates, relative_of
from headwise.replacement.planning.capture import Site, capture, in_portions, sites
from headwise.replacement.planning.drift import Replace, Trial, measure_for
from headwise.replacement.planning.effort import Effort
from headwise.replacement.planning.fit import errors, fit
from headwise.replacement.planning.plan_search import Found, Head, Option, pareto, search, undominated
from headwise.replacement.planning.saved_progress import Memory
from headwise.replacement.planning.timing import seconds, timed
from headwise.replacement.planning.transfer import transfer

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)"""

LEAST = 6
"""Batches below which there is nothing to fit to, choose by and report on."""


def plan(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tolerance: float,
    length: int | None = None,
    choices: Sequence[Choice] | None = None,
    price: str = "multiply_adds",
    effort: Effort | None = None,
    transfer: int = 0,
    seed: int = 0,
    name: str | None = None,
    made: Mapping[str, Any] | None = None,
    work: Path | None = None,
    memory: int = 1 << 30,
    progress: Progress | None = None,
) -> Plan:
    """The cheapest operators, head by head, with which the model's answer moves by at most `tolerance`.

    length    what the model will be used at, where costs are counted (default: that of the batches)
    choices   what to choose from besides exact (default: every kind at a few settings)
    price     "multiply_adds", or "seconds" as measured on this machine
    transfer  further steps of fitting the chosen operators, at the end
    work      a directory that remembers what was fitted and measured; what it holds is not repeated
    memory    bytes that captured queries, keys and values may take
    """
    _check(tolerance, price)
    check_weights(model)
    effort = effort or Effort()
    given = list(batches)
    if len(given) < LEAST:
        raise InputError(
            f"a plan needs at least {LEAST} batches to fit to, choose by and report on, but there are {len(given)}; "
            "give more text, or shorter texts"
        )
    was_training = model.training
    model.eval()
    try:
        return _Making(model, given, length, price, effort, seed, work, memory, progress, choices).run(
            tolerance, transfer, name or type(model).__name__, made or {}
        )
    finally:
        model.train(was_training)


def split(count: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Calibration, selection and test: two fifths, three tenths and the rest, at random."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    a, b = max(2, round(0.4 * count)), max(2, round(0.3 * count))
    return order[:a], order[a : a + b], order[a + b :]


class _Making:
    """One run: what it was given, and what it found so far."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Any],
        length: int | None,
        price: str,
        effort: Effort,
        seed: int,
        work: Path | None,
        memory: int,
        progress: Progress | None,
        choices: Sequence[Choice] | None,
    ) -> None:
        self.model, self.effort, self.seed, self.budget = model, effort, seed, memory
        self.say = progress or (lambda what, done, total: None)
        self.parts = [[batches[i] for i in part] for part in split(len(batches), seed)]
        found = sites(model, self.parts[0][0])
        self.left = {site.name: site.why_not for site in found.values() if site.why_not is not None}
        self.sites: dict[str, Site] = {name: site for name, site in found.items() if site.why_not is None}
        if not self.sites:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.left.items())[:3])
            raise InputError(f"no attention of {type(model).__name__} can be replaced ({reasons})")
        longest = max(site.length for site in self.sites.values())
        self.length = _within(model, length or longest)
        self.causal = all(site.causal for site in self.sites.values())
        wanted = choices or candidates(self.length, causal=self.causal, fitted_length=longest, quick=effort.quick)
        self.choices = list(dict.fromkeys([EXACT, *wanted]))
        for choice in self.choices if self.causal else ():
            if reason := choice.of.why_not_causal(choice):
                raise InputError(f"{type(model).__name__} is causal, but {reason}")
        self.measure, self.measured_by = measure_for(model, batches[0], causal=self.causal)
        self.fitted: dict[tuple[str, Choice], dict[str, Tensor]] = {}
        self.own_error: dict[tuple[str, Choice], Tensor] = {}
        self.price = price
        self.prices = self._prices()
        settings = [seed, self.length, effort.steps, effort.texts, *map(str, self.choices)]
        self.memory = Memory(work, fingerprint(model, {"settings": settings}, batches))
        self.stage = ""  # goes before what is remembered of whole plans: their tensors change once, by transfer

    def run(self, tolerance: float, more: int, name: str, made: Mapping[str, Any]) -> Plan:
        self._fit()
        trial = Trial(self.model, self.parts[1], self.measure, list(self.sites))
        with trial.open():
            uniform = self._uniform(trial)
            table = self._alone(trial)
            curve = search(
                table,
                uniform,
                lambda plan: self._whole(trial, plan),
                evaluations=self.effort.evaluations,
                seed=self.seed,
                progress=lambda done: self.say("measuring whole plans", done, self.effort.evaluations),
            )
        if more:
            curve, uniform = self._transfer(trial, curve, uniform, tolerance, more)
        curve, uniform = self._test(curve, uniform)
        found = Plan(
            self._described(name),
            self.length,
            tolerance,
            self.measured_by,
            {site: [EXACT] * known.heads for site, known in self.sites.items()},
            self._tensors(),
            curve,
            uniform,
            left=self.left,
            made={
                **made,
                "seed": self.seed,
                "price": self.price,
                "transfer": more,
                "texts": [len(part) for part in self.parts],
                "effort": vars(self.effort),
            },
        ).at(tolerance)
        return replace(found, timing=timed(found))

    def _prices(self) -> dict[tuple[str, Choice], float]:
        """What a choice costs at a site, in units of all heads exact."""
        raw: dict[tuple[str, Choice], float] = {}
        sizes = {(s.width, s.causal): s for s in self.sites.values()}
        clock = {}
        for (width, causal), site in sizes.items() if self.price == "seconds" else ():
            for choice in self.choices:
                # in a mixed layer an operator has some of the heads, and few together cost more a head than all
                together = site.heads if choice == EXACT else max(1, site.heads // 4)
                clock[width, causal, choice] = seconds(choice, together, self.length, width, causal)
        for name, site in self.sites.items():
            for choice in self.choices:
                if self.price == "seconds":
                    raw[name, choice] = clock[site.width, site.causal, choice]
                else:
                    raw[name, choice] = choice.of.cost(choice, self.length, site.width, site.causal).multiply_adds
        whole = sum(site.heads * raw[name, EXACT] for name, site in self.sites.items())
        return {key: value / whole for key, value in raw.items()}

    def _fit(self) -> None:
        """Every choice to every site on calibration texts; errors on selection texts."""
        portions = in_portions(self.sites, len(self.parts[0]) + len(self.parts[1]), self.budget)
        total, done = len(self.sites) * len(self.choices), 0
        for names in portions:
            known = {site: self.memory.fitted(site) for site in names}
            if any(known[site] is None for site in names):
                samples = capture(self.model, self.parts[0], names)
                fresh = capture(self.model, self.parts[1], names)
            else:
                samples, fresh = {}, {}
            for site in names:
                before = known[site]
                if before is None:
                    before = {}
                    for choice in self.choices:
                        start = relative_of(choice, before)
                        own = fit(
                            choice,
                            samples[site],
                            length=self.length,
                            steps=self.effort.steps if start is None else self.effort.steps // 3,
                            generator=torch.Generator().manual_seed(self.seed),
                            start=None if start is None else before[start][0],
                        )
                        before[choice] = (own, errors(choice, fresh[site], own))
                        done += 1
                        self.say("fitting operators to heads", done, total)
                    self.memory.keep_fitted(site, before)
                else:
                    done += len(self.choices)
                for choice, (own, error) in before.items():
                    self.fitted[site, choice] = own
                    self.own_error[site, choice] = error
                samples.pop(site, None)
                fresh.pop(site, None)

    def _uniform(self, trial: Trial) -> list[Point]:
        """Every choice for all heads."""
        found = []
        for index, choice in enumerate(self.choices):
            plan = {site: [choice] * known.heads for site, known in self.sites.items()}
            mean, error = self._whole(trial, plan)
            cost = sum(known.heads * self.prices[site, choice] for site, known in self.sites.items())
            found.append(Point(plan, cost, mean, error, name=str(choice)))
            self.say("measuring one operator for all heads", index + 1, len(self.choices))
        return found

    def _alone(self, trial: Trial) -> dict[Head, list[Option]]:
        """The drift of each head's undominated choices, one head at a time."""
        wanted = {}
        for site, known in self.sites.items():
            for head in range(known.heads):
                options = [
                    Option(c, self.prices[site, c], float(self.own_error[site, c][head]) if c != EXACT else 0.0)
                    for c in self.choices
                ]
                wanted[site, head] = undominated(options, self.effort.options + 1)
        total, done = sum(map(len, wanted.values())), 0
        table: dict[Head, list[Option]] = {}
        for (site, head), options in wanted.items():
            measured = []
            for option in options:
                drift, way = self._alone_at(trial, site, head, option.choice)
                measured.append(replace(option, drift=drift, way=way))
                done += 1
                self.say("measuring heads one by one", done, total)
            still = torch.zeros_like(measured[0].way) if measured[0].way is not None else None
            measured = [replace(option, way=still) if option.choice == EXACT else option for option in measured]
            table[site, head] = undominated(measured, len(measured))
        return table

    def _alone_at(self, trial: Trial, site: str, head: int, choice: Choice) -> tuple[float, Tensor | None]:
        if choice == EXACT:
            return 0.0, None
        key = f"{site}|{head}|{choice}"
        known = self.memory.drift(key)
        if known is None:
            drifts, way = trial.moved({site: self._one(site, head, choice)}, first=self.effort.texts)
            known = float(drifts.mean()), way
            self.memory.keep_drift(key, *known)
        return known

    def _whole(self, trial: Trial, plan: Sites, part: str = "") -> tuple[float, float]:
        """Mean drift on the trial's texts, and its standard error."""
        key = self.stage + part + "|".join(str(c) for _, _, c in each(plan))
        known = self.memory.whole(key)
        if known is None:
            drifts = torch.zeros(2) if self._is_exact(plan) else trial.drift(self._replaced(plan))
            known = float(drifts.mean()), float(drifts.std() / math.sqrt(len(drifts)))
            if not all(map(math.isfinite, known)):
                known = 1e9, 0.0
            self.memory.keep_whole(key, known)
        return known

    def _transfer(
        self, trial: Trial, curve: list[Point], uniform: list[Point], tolerance: float, steps: int
    ) -> tuple[list[Point], list[Point]]:
        """Train the operators of the cheapest plan within the tolerance further; measure again what shares them."""
        chosen = min((p for p in curve if p.meets(tolerance)), key=lambda p: p.cost)
        learned = transfer(
            self.model,
            self.parts[0],
            self.sites,
            self.fitted,
            [(site, choice) for site, _, choice in each(chosen.sites) if self.fitted[site, choice]],
            length=self.length,
            steps=steps,
            seed=self.seed + 1,
            memory=self.memory,
            budget=self.budget,
            say=self.say,
        )
        self.fitted.update(learned)
        self.stage = f"{steps} more for {sorted(map(str, learned))}|"
        again: list[Point] = []
        with trial.open():
            for point in (every := [*curve, *uniform]):
                again.append(self._again(trial, point))
                self.say("measuring plans again", len(again), len(every))
        return [found.point for found in pareto([Found(p, 0.0) for p in again])], again[len(curve) :]

    def _again(self, trial: Trial, point: Point) -> Point:
        mean, error = self._whole(trial, point.sites)
        return replace(point, selection=mean, error=error)

    def _is_exact(self, plan: Sites) -> bool:
        return all(choice == EXACT for _, _, choice in each(plan))

    def _test(self, curve: list[Point], uniform: list[Point]) -> tuple[list[Point], list[Point]]:
        trial = Trial(self.model, self.parts[2], self.measure, list(self.sites))
        tested: dict[int, float] = {}
        every = [*curve, *(point for point in uniform if not any(point is other for other in curve))]
        with trial.open():
            for index, point in enumerate(every):
                tested[id(point)] = self._whole(trial, point.sites, "test|")[0]
                self.say("measuring on test texts", index + 1, len(every))
        return [[replace(p, test=tested[id(p)]) for p in points] for points in (curve, uniform)]  # type: ignore[return-value]

    def _replaced(self, plan: Sites) -> dict[str, Replace]:
        changed = {site: cs for site, cs in plan.items() if any(c != EXACT for c in cs)}
        return {site: _answering(self._heads(site, dict(enumerate(cs)))) for site, cs in changed.items()}

    def _heads(self, site: str, choices: Mapping[int, Choice]) -> Heads:
        heads = Heads(list(choices.values()), self.sites[site].width, self.length)
        for place, (head, choice) in enumerate(choices.items()):
            heads.load_head(place, {name: x[head] for name, x in self.fitted[site, choice].items()})
        return heads

    def _one(self, site: str, head: int, choice: Choice) -> Replace:
        heads = self._heads(site, {head: choice})

        def answer(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, scale: float, exact: Callable):
            out = exact().clone()
            own = head * k.shape[1] // q.shape[1]
            part = heads(
                q[:, head : head + 1],
                k[:, own : own + 1],
                v[:, own : own + 1],
                keep=keep,
                causal=causal,
                scale=scale,
            )
            out.view(*q.shape[:-1], -1)[:, head] = part[:, 0]
            return out

        return answer

    def _tensors(self) -> dict[tuple[str, int, Choice], dict[str, Tensor]]:
        """What was fitted, head by head."""
        return {
            (site, head, choice): {name: x[head].clone() for name, x in own.items()}
            for (site, choice), own in self.fitted.items()
            if own
            for head in range(self.sites[site].heads)
        }

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "class": type(self.model).__name__,
            "name": name,
            "fingerprint": fingerprint(self.model, {}),
            "sites": {
                site: {"heads": known.heads, "width": known.width, "causal": known.causal}
                for site, known in self.sites.items()
            },
        }


def _answering(heads: Heads) -> Replace:
    return lambda q, k, v, keep, causal, scale, exact: heads(q, k, v, keep=keep, causal=causal, scale=scale)


def _check(tolerance: float, price: str) -> None:
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"a tolerance is a number of at least 0, but is {tolerance}")
    if price not in ("multiply_adds", "seconds"):
        raise InputError(f"price is 'multiply_adds' or 'seconds', but is {price!r}")


def _within(model: nn.Module, length: int) -> int:
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        most = getattr(config, name, None)
        if isinstance(most, int) and 0 < most < length:
            raise InputError(f"{type(model).__name__} has {most} positions, but the target length is {length}")
    if length < 4:
        raise InputError(f"the target length is {length}; there is nothing to save below 4")
    return length
