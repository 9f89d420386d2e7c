"""`plan(model, batches, tolerance=…)`: record attention, fit candidates, measure every head alone, search, test.

Batches are split into three disjoint parts: calibration (replacements are fitted to it), selection (drifts are measured
on it and plans chosen by them) and test (only used to report on the finished curve).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.fingerprint import check_weights, fingerprint
from headwise.models.inputs import max_positions
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.kinds import Choice, candidates
from headwise.replacement.plan import Plan, PlanPoint, Sites, check_tolerance, each_head
from headwise.replacement.planning.capture import AttentionSite, find_sites, recordings
from headwise.replacement.planning.drift import DriftTrial, Measure, measure_for
from headwise.replacement.planning.fit import Fitted, Report, fit_sites, transfer
from headwise.replacement.planning.plan_search import Head, HeadCandidate, MeasuredPlan, pareto, search, undominated
from headwise.replacement.planning.saved_progress import DriftEstimate, PlanProgress
from headwise.replacement.planning.timing import relative_costs, time_plan
from headwise.replacement.standard_kinds import SOFTMAX

MIN_BATCHES = 6


@final
@dataclass(frozen=True)
class Effort:
    """How long to search.

    steps        of Adam for each fit
    texts        on which each head is measured alone
    options      choices for each head that are measured
    evaluations  whole plans that are measured
    quick        fewer candidates
    """

    steps: int = 120
    texts: int = 4
    options: int = 7
    evaluations: int = 120
    quick: bool = False


QUICK = Effort(steps=60, texts=2, options=4, evaluations=30, quick=True)


class Split(NamedTuple):
    """Batches, or their indices, by what they are used for."""

    calibration: list[Any]
    selection: list[Any]
    test: list[Any]


def split(count: int, seed: int) -> Split:
    """Indices at random: two fifths for calibration, three tenths for selection, the rest for test."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    a, b = max(2, round(0.4 * count)), max(2, round(0.3 * count))
    return Split(order[:a], order[a : a + b], order[a + b :])


def plan(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tolerance: float,
    length: int | None = None,
    choices: Sequence[Choice] | None = None,
    objective: str = "multiply_adds",
    effort: Effort | None = None,
    transfer: int = 0,
    seed: int = 0,
    name: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    partial_results: Path | None = None,
    capture_bytes: int = 1 << 30,
    progress: Report | None = None,
) -> Plan:
    """The cheapest operators, head by head, with which the output of the model drifts by at most `tolerance`.

    length           sequence length at which costs are counted (default: that of the batches)
    choices          candidates besides softmax (default: every registered kind at a few settings)
    objective        quantity to minimise: "multiply_adds", or "seconds" measured on this machine
    transfer         steps by which the chosen operators are trained further at the end
    partial_results  a directory for fits and measurements, from which an interrupted run resumes
    capture_bytes    memory for recorded queries, keys and values
    """
    check_tolerance(tolerance)
    if objective not in ("multiply_adds", "seconds"):
        raise InputError(f"objective must be 'multiply_adds' or 'seconds', but is {objective!r}")
    check_weights(model)
    batches = list(batches)
    if len(batches) < MIN_BATCHES:
        raise InputError(
            f"a plan needs at least {MIN_BATCHES} batches for calibration, selection and test, but there are "
            f"{len(batches)}; give more text, or shorter texts"
        )
    was_training = model.training
    model.eval()
    try:
        task = _prepare(model, batches, length, choices, effort or Effort(), seed)
        key = [seed, task.length, task.effort.steps, task.effort.texts, *map(str, task.choices)]
        store = PlanProgress(partial_results, fingerprint(model, {"settings": key}, batches))
        run = _Run(task, store, progress or (lambda what, done, total: None), capture_bytes, objective)
        curve, baselines = run.trade_off(tolerance, transfer)
    finally:
        model.train(was_training)
    return run.plan(curve, baselines, tolerance, transfer, name or type(model).__name__, provenance or {})


@final
@dataclass(frozen=True, eq=False)
class _Task:
    """What is to be planned."""

    model: nn.Module
    batches: Split
    sites: dict[str, AttentionSite]
    skipped: dict[str, str]
    length: int
    choices: list[Choice]
    measure: Measure
    measure_name: str
    effort: Effort
    seed: int


def _prepare(
    model: nn.Module,
    batches: list[Any],
    length: int | None,
    choices: Sequence[Choice] | None,
    effort: Effort,
    seed: int,
) -> _Task:
    """Find the sites that can be planned, and the candidates for them."""
    name = type(model).__name__
    parts = Split(*([batches[i] for i in part] for part in split(len(batches), seed)))
    found = find_sites(model, parts.calibration[0])
    skipped = {site.name: site.skipped for site in found.values() if site.skipped is not None}
    sites = {site.name: site for site in found.values() if site.skipped is None}
    if not sites:
        reasons = "; ".join(f"{site}: {why}" for site, why in list(skipped.items())[:3])
        raise InputError(f"no attention of {name} can be replaced ({reasons})")
    longest = max(site.length for site in sites.values())
    length = length or longest
    limit = max_positions(model)
    if limit is not None and limit < length:
        raise InputError(f"{name} has {limit} positions, but the target length is {length}")
    if length < 4:
        raise InputError(f"the target length is {length}; plans are for lengths of at least 4")
    causal = all(site.causal for site in sites.values())
    tried = choices or candidates(length, causal=causal, calibration_length=longest, quick=effort.quick)
    for choice in tried if causal else ():
        choice.check_causal(name)
    measure, measure_name = measure_for(model, batches[0], causal=causal)
    tried = list(dict.fromkeys([SOFTMAX, *tried]))
    return _Task(model, parts, sites, skipped, length, tried, measure, measure_name, effort, seed)


@final
@dataclass(eq=False)
class _Run:
    """The search for one plan, and what it has fitted."""

    task: _Task
    store: PlanProgress
    report: Report
    capture_bytes: int
    objective: str
    costs: dict[tuple[str, Choice], float] = field(default_factory=dict)
    fitted: Fitted = field(default_factory=dict)
    stage: str = ""  # part of the key of measured plans, because `transfer` changes their tensors

    def trade_off(self, tolerance: float, transfer_steps: int) -> tuple[list[PlanPoint], list[PlanPoint]]:
        """The curve and the baselines, measured on the test texts."""
        task = self.task
        self.costs = relative_costs(task.sites, task.choices, task.length, self.objective)
        self.fitted, errors = fit_sites(
            recordings(task.model, task.sites, task.batches[:2], self.capture_bytes),
            task.choices,
            sites=len(task.sites),
            length=task.length,
            steps=task.effort.steps,
            seed=task.seed,
            progress=self.store,
            report=self.report,
        )
        trial = self._trial(task.batches.selection)
        with trial.open():
            baselines = self._baselines(trial)
            curve = search(
                self._heads_alone(trial, errors),
                baselines,
                lambda sites: self._plan_drift(trial, sites)[:2],
                evaluations=task.effort.evaluations,
                seed=task.seed,
                progress=lambda done: self.report("measuring whole plans", done, task.effort.evaluations),
            )
        if transfer_steps:
            self._transfer(curve, tolerance, transfer_steps)
            with trial.open():
                curve, baselines = self._measure_again(trial, curve, baselines)
        return self._test(curve, baselines)

    def _trial(self, batches: Sequence[Any]) -> DriftTrial:
        return DriftTrial(self.task.model, batches, self.task.measure, list(self.task.sites))

    def _baselines(self, trial: DriftTrial) -> list[PlanPoint]:
        """Every choice for all heads."""
        points = []
        for choice in self.task.choices:
            sites = {name: [choice] * site.heads for name, site in self.task.sites.items()}
            cost = sum(site.heads * self.costs[name, choice] for name, site in self.task.sites.items())
            points.append(PlanPoint(sites, cost, *self._plan_drift(trial, sites)[:2], name=str(choice)))
            self.report("measuring one operator for all heads", len(points), len(self.task.choices))
        return points

    def _heads_alone(
        self, trial: DriftTrial, errors: Mapping[tuple[str, Choice], Tensor]
    ) -> dict[Head, list[HeadCandidate]]:
        """The drift of each head's choices, one head at a time; only choices not dominated by their fitting errors."""
        tried: dict[Head, list[HeadCandidate]] = {}
        for name, site in self.task.sites.items():
            for head in range(site.heads):
                of_head = [
                    HeadCandidate(c, self.costs[name, c], 0.0 if c == SOFTMAX else float(errors[name, c][head]))
                    for c in self.task.choices
                ]
                tried[name, head] = undominated(of_head, self.task.effort.options + 1)
        total, done = sum(map(len, tried.values())), 0
        table: dict[Head, list[HeadCandidate]] = {}
        for (site, head), of_head in tried.items():
            measured: list[HeadCandidate] = []
            for candidate in of_head:
                estimate = self._head_drift(trial, site, head, candidate.choice)
                measured.append(replace(candidate, drift=estimate.mean, direction=estimate.direction))
                done += 1
                self.report("measuring heads one by one", done, total)
            moved = next((c.direction for c in measured if c.direction is not None), None)
            still = None if moved is None else torch.zeros_like(moved)
            measured = [replace(c, direction=still) if c.choice == SOFTMAX else c for c in measured]
            table[site, head] = undominated(measured, len(measured))
        return table

    def _head_drift(self, trial: DriftTrial, site: str, head: int, choice: Choice) -> DriftEstimate:
        if choice == SOFTMAX:
            return DriftEstimate(0.0, 0.0)
        choices = [choice if i == head else SOFTMAX for i in range(self.task.sites[site].heads)]
        return self.store.drift(
            f"{site}|{head}|{choice}",
            lambda: trial.estimate({site: self._mixed_heads(site, choices)}, batches=self.task.effort.texts),
        )

    def _plan_drift(self, trial: DriftTrial, sites: Sites, part: str = "") -> DriftEstimate:
        """Mean drift on the texts of the trial, and its standard error."""
        changed = {site: choices for site, choices in sites.items() if any(c != SOFTMAX for c in choices)}
        if not changed:
            return DriftEstimate(0.0, 0.0)
        return self.store.drift(
            self.stage + part + "|".join(str(c) for _, _, c in each_head(sites)),
            lambda: trial.estimate({site: self._mixed_heads(site, c) for site, c in changed.items()})._replace(
                direction=None
            ),
        )

    def _mixed_heads(self, site: str, choices: Sequence[Choice]) -> MixedHeads:
        fitted = {
            head: {name: x[head] for name, x in self.fitted[site, choice].items()}
            for head, choice in enumerate(choices)
        }
        return MixedHeads(choices, self.task.sites[site].width, self.task.length, fitted)

    def _transfer(self, curve: Sequence[PlanPoint], tolerance: float, steps: int) -> None:
        """Train the operators of the cheapest plan within the tolerance further."""
        task = self.task
        chosen = min((p for p in curve if p.meets(tolerance)), key=lambda p: p.cost)
        pairs = {(site, choice) for site, _, choice in each_head(chosen.sites) if self.fitted[site, choice]}
        sites = {name: site for name, site in task.sites.items() if any(name == at for at, _ in pairs)}
        learned = transfer(
            recordings(task.model, sites, task.batches[:1], self.capture_bytes),
            self.fitted,
            pairs,
            length=task.length,
            steps=steps,
            seed=task.seed + 1,
            progress=self.store,
            report=self.report,
        )
        self.fitted.update(learned)
        self.stage = f"{steps} more for {sorted(f'{site} {choice}' for site, choice in learned)}|"

    def _measure_again(
        self, trial: DriftTrial, curve: Sequence[PlanPoint], baselines: Sequence[PlanPoint]
    ) -> tuple[list[PlanPoint], list[PlanPoint]]:
        points: list[PlanPoint] = []
        for point in (*curve, *baselines):
            mean, error, _ = self._plan_drift(trial, point.sites)
            points.append(replace(point, selection=mean, standard_error=error))
            self.report("measuring plans again", len(points), len(curve) + len(baselines))
        return [p.point for p in pareto([MeasuredPlan(point, 0.0) for point in points])], points[len(curve) :]

    def _test(
        self, curve: Sequence[PlanPoint], baselines: Sequence[PlanPoint]
    ) -> tuple[list[PlanPoint], list[PlanPoint]]:
        tested: dict[int, PlanPoint] = {}
        points = {id(point): point for point in (*curve, *baselines)}
        with self._trial(self.task.batches.test).open() as trial:
            for key, point in points.items():
                tested[key] = replace(point, test=self._plan_drift(trial, point.sites, "test|").mean)
                self.report("measuring on test texts", len(tested), len(points))
        return [tested[id(point)] for point in curve], [tested[id(point)] for point in baselines]

    def plan(
        self,
        curve: Sequence[PlanPoint],
        baselines: Sequence[PlanPoint],
        tolerance: float,
        transfer_steps: int,
        name: str,
        provenance: Mapping[str, Any],
    ) -> Plan:
        task = self.task
        facts = ("heads", "width", "causal")
        result = Plan(
            {
                "class": type(task.model).__name__,
                "name": name,
                "fingerprint": fingerprint(task.model, {}),
                "sites": {key: {fact: getattr(site, fact) for fact in facts} for key, site in task.sites.items()},
            },
            task.length,
            {key: [SOFTMAX] * site.heads for key, site in task.sites.items()},
            {
                (site, head, choice): {key: x[head].clone() for key, x in tensors.items()}
                for (site, choice), tensors in self.fitted.items()
                if tensors
                for head in range(task.sites[site].heads)
            },
            measure=task.measure_name,
            curve=curve,
            baselines=baselines,
            skipped=task.skipped,
            provenance={
                **provenance,
                "seed": task.seed,
                "objective": self.objective,
                "transfer": transfer_steps,
                "texts": [len(part) for part in task.batches],
                "effort": vars(task.effort),
            },
        ).at(tolerance)
        return replace(result, timing=time_plan(result))
