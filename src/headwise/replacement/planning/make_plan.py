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
from headwise.models.fingerprint import batch_hash, check_weights, run_key, weights_hash
from headwise.models.inputs import max_positions
from headwise.models.run import as_it_was, check_batch
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.kinds import Choice, candidates
from headwise.replacement.planning.capture import AttentionSite, find_sites, recordings
from headwise.replacement.planning.drift import DriftTrial, Measure, measure_for
from headwise.replacement.planning.fit import Fitted, Report, fit_sites, transfer
from headwise.replacement.planning.plan_search import Head, HeadCandidate, MeasuredPlan, pareto, search, undominated
from headwise.replacement.planning.saved_progress import DriftEstimate, PlanProgress
from headwise.replacement.planning.timing import relative_costs, time_plan
from headwise.replacement.plans import FittedTensors, Plan, PlanPoint, Sites, check_tolerance, each_head
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
    batches, effort = list(batches), effort or Effort()
    for batch in batches:
        check_batch(batch)
    if len(batches) < MIN_BATCHES:
        raise InputError(
            f"a plan needs at least {MIN_BATCHES} batches for calibration, selection and test, but there are "
            f"{len(batches)}; give more text, or shorter texts"
        )
    weights = weights_hash(model)
    parts = Split(*([batches[i] for i in part] for part in split(len(batches), seed)))
    with as_it_was(model):
        sites, skipped = _find_sites(model, parts.calibration[0])
        length, tried = _candidates(model, sites, length, choices, quick=effort.quick)
        causal = all(site.causal for site in sites.values())
        measure, measure_name = measure_for(model, batches[0], causal=causal)
        check_tolerance(tolerance, measure_name)
        settings = {"seed": seed, "length": length, "steps": effort.steps, "texts": effort.texts}
        settings |= {"choices": [str(choice) for choice in tried], "batches": [batch_hash(batch) for batch in batches]}
        run = _Run(
            model,
            parts,
            sites,
            length,
            tried,
            relative_costs(sites, tried, length, objective),
            measure,
            effort,
            seed,
            capture_bytes,
            PlanProgress(partial_results, run_key(weights, settings)),
            progress or (lambda what, done, total: None),
        )
        curve, _ = run.trade_off(tolerance, transfer)
    result = Plan(
        {
            "class": type(model).__name__,
            "name": name or type(model).__name__,
            "fingerprint": weights,
            "sites": {k: {"heads": s.heads, "width": s.width, "causal": s.causal} for k, s in sites.items()},
        },
        length,
        {key: [SOFTMAX] * site.heads for key, site in sites.items()},
        run.fitted_by_head(),
        measure=measure_name,
        curve=curve,
        skipped=skipped,
        provenance={
            **(provenance or {}),
            "run": run_key(weights, {**settings, "objective": objective, "transfer": transfer, **vars(effort)}),
            "seed": seed,
            "objective": objective,
            "transfer": transfer,
            "texts": [len(part) for part in parts],
            "effort": vars(effort),
        },
    ).at(tolerance)
    return replace(result, timing=time_plan(result))


def _find_sites(model: nn.Module, batch: Any) -> tuple[dict[str, AttentionSite], dict[str, str]]:
    """The sites whose heads can be replaced, and why others cannot."""
    sites = find_sites(model, batch)
    skipped = {name: site.skipped for name, site in sites.items() if site.skipped is not None}
    if len(skipped) == len(sites):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:3])
        raise InputError(f"no attention of {type(model).__name__} can be replaced ({reasons})")
    return {name: site for name, site in sites.items() if name not in skipped}, skipped


def _candidates(
    model: nn.Module,
    sites: Mapping[str, AttentionSite],
    length: int | None,
    choices: Sequence[Choice] | None,
    *,
    quick: bool,
) -> tuple[int, list[Choice]]:
    """The length to plan for, and the choices to try; softmax is the first."""
    name, limit = type(model).__name__, max_positions(model)
    longest = max(site.length for site in sites.values())
    length = length or longest
    if limit is not None and limit < length:
        raise InputError(f"{name} has {limit} positions, but the target length is {length}")
    if length < 4:
        raise InputError(f"the target length is {length}; plans are for lengths of at least 4")
    causal = all(site.causal for site in sites.values())
    tried = choices or candidates(length, causal=causal, calibration_length=longest, quick=quick)
    for choice in tried if causal else ():
        choice.check_causal(name)
    return length, list(dict.fromkeys([SOFTMAX, *tried]))


@final
@dataclass(eq=False)
class _Run:
    """The search for one plan, and what it has fitted."""

    model: nn.Module
    batches: Split
    sites: Mapping[str, AttentionSite]
    length: int
    choices: Sequence[Choice]
    costs: Mapping[tuple[str, Choice], float]
    measure: Measure
    effort: Effort
    seed: int
    capture_bytes: int
    store: PlanProgress
    report: Report
    fitted: Fitted = field(default_factory=dict)
    stage: str = ""  # part of the key of measured plans, because `transfer` changes their tensors

    def trade_off(self, tolerance: float, transfer_steps: int) -> tuple[list[PlanPoint], list[PlanPoint]]:
        """The curve and the baselines, measured on the test texts."""
        self.fitted, errors = fit_sites(
            recordings(self.model, self.sites, self.batches[:2], self.capture_bytes),
            self.choices,
            sites=len(self.sites),
            length=self.length,
            steps=self.effort.steps,
            seed=self.seed,
            progress=self.store,
            report=self.report,
        )
        trial = self._trial(self.batches.selection)
        with trial.open():
            baselines = self._baselines(trial)
            curve = search(
                self._heads_alone(trial, errors),
                baselines,
                lambda sites: self._drift(trial, sites)[:2],
                evaluations=self.effort.evaluations,
                seed=self.seed,
                progress=lambda done: self.report("measuring whole plans", done, self.effort.evaluations),
            )
        if transfer_steps:
            self._transfer(curve, tolerance, transfer_steps)
            with trial.open():
                points = self._measure_again(trial, [*curve, *baselines])
            baselines = points[len(curve) :]
            curve = [plan.point for plan in pareto([MeasuredPlan(point, 0.0) for point in points])]
        with self._trial(self.batches.test).open() as trial:
            points = self._measure_again(trial, [*curve, *baselines], "test")
        return points[: len(curve)], points[len(curve) :]

    def _trial(self, batches: Sequence[Any]) -> DriftTrial:
        return DriftTrial(self.model, batches, self.measure, list(self.sites))

    def _baselines(self, trial: DriftTrial) -> list[PlanPoint]:
        """Every choice for all heads."""
        points = []
        for choice in self.choices:
            sites = {name: [choice] * site.heads for name, site in self.sites.items()}
            cost = sum(site.heads * self.costs[name, choice] for name, site in self.sites.items())
            points.append(PlanPoint(sites, cost, 0.0, {}, sum(self._drift(trial, sites)[:2])))
            self.report("measuring one operator for all heads", len(points), len(self.choices))
        return points

    def _heads_alone(
        self, trial: DriftTrial, errors: Mapping[tuple[str, Choice], Tensor]
    ) -> dict[Head, list[HeadCandidate]]:
        """The drift of each head's choices, one head at a time; only choices not dominated by their fitting errors."""
        tried: dict[Head, list[HeadCandidate]] = {}
        for name, site in self.sites.items():
            for head in range(site.heads):
                of_head = [
                    HeadCandidate(c, self.costs[name, c], 0.0 if c == SOFTMAX else float(errors[name, c][head]))
                    for c in self.choices
                ]
                tried[name, head] = undominated(of_head, self.effort.options + 1)
        total, done = sum(map(len, tried.values())), 0
        table: dict[Head, list[HeadCandidate]] = {}
        for (site, head), of_head in tried.items():
            measured: list[HeadCandidate] = []
            for candidate in of_head:
                choices = [candidate.choice if i == head else SOFTMAX for i in range(self.sites[site].heads)]
                estimate = self._drift(trial, {site: choices}, batches=self.effort.texts)
                measured.append(replace(candidate, drift=estimate.mean, direction=estimate.direction))
                done += 1
                self.report("measuring heads one by one", done, total)
            moved = next((c.direction for c in measured if c.direction is not None), None)
            still = None if moved is None else torch.zeros_like(moved)
            measured = [replace(c, direction=still) if c.choice == SOFTMAX else c for c in measured]
            table[site, head] = undominated(measured, len(measured))
        return table

    def _drift(self, trial: DriftTrial, sites: Sites, part: str = "", batches: int | None = None) -> DriftEstimate:
        """Mean drift on the texts of the trial, or on the first `batches`, where its direction is measured too."""
        changed = {site: choices for site, choices in sites.items() if any(c != SOFTMAX for c in choices)}
        if not changed:
            return DriftEstimate(0.0, 0.0)

        def measure() -> DriftEstimate:
            heads = {site: self._mixed_heads(site, choices) for site, choices in changed.items()}
            estimate = trial.estimate(heads, batches=batches)
            return estimate if batches else estimate._replace(direction=None)

        choices = "|".join(f"{site} {choice}" for site, _, choice in each_head(sites))
        return self.store.drift(f"{self.stage}|{part}|{batches}|{choices}", measure)

    def _mixed_heads(self, site: str, choices: Sequence[Choice]) -> MixedHeads:
        fitted = {
            head: {name: x[head] for name, x in self.fitted[site, choice].items()}
            for head, choice in enumerate(choices)
        }
        return MixedHeads(choices, self.sites[site].width, self.length, fitted)

    def _transfer(self, curve: Sequence[PlanPoint], tolerance: float, steps: int) -> None:
        """Train the operators of the cheapest plan within the tolerance further."""
        chosen = min((p for p in curve if p.meets(tolerance)), key=lambda p: p.cost)
        pairs = {(site, choice) for site, _, choice in each_head(chosen.sites) if self.fitted[site, choice]}
        sites = {name: site for name, site in self.sites.items() if any(name == at for at, _ in pairs)}
        learned = transfer(
            recordings(self.model, sites, self.batches[:1], self.capture_bytes),
            self.fitted,
            pairs,
            length=self.length,
            steps=steps,
            seed=self.seed + 1,
            progress=self.store,
            report=self.report,
        )
        self.fitted.update(learned)
        self.stage = f"{steps} more for {sorted(f'{site} {choice}' for site, choice in learned)}|"

    def _measure_again(self, trial: DriftTrial, points: Sequence[PlanPoint], part: str = "") -> list[PlanPoint]:
        result: list[PlanPoint] = []
        for point in points:
            mean, error, _ = self._drift(trial, point.sites, part)
            result.append(replace(point, drift={"text": {self.length: mean}}, bound=max(point.bound, mean) if part else mean + error))
            self.report(f"measuring plans {'on test texts' if part else 'again'}", len(result), len(points))
        return result

    def fitted_by_head(self) -> FittedTensors:
        return {
            (site, head, choice): {name: x[head].clone() for name, x in tensors.items()}
            for (site, choice), tensors in self.fitted.items()
            if tensors
            for head in range(self.sites[site].heads)
        }
