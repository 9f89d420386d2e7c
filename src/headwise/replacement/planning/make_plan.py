"""`plan(model, texts, tolerance=…)`: sensitivities, a ladder of plans, and the few of them that are run.

    texts by kind  ->  sensitivities of all heads and candidates       one forward and backward pass a text
                   ->  plans by decreasing cost                        no pass
                   ->  drift of some of them, by kind and length       one forward pass a text and plan

A quarter of the texts of each kind choose, the others measure.  The tolerance is compared with a bound for one text of
a kind that was not tried, at every length (`prediction_bound`): from the drifts of the texts of each kind with the plan
of the same cost that was chosen without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.distributed.dealing import dealt, from_first, same_on_all, several
from headwise.errors import InputError
from headwise.models.fingerprint import batch_hash, check_weights, run_key, weights_hash
from headwise.models.run import as_it_was
from headwise.models.unseen import check_own_attention
from headwise.progress import Progress, reported
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.kinds import Choice, Tensors, candidates, has_rotary_positions
from headwise.replacement.planning.allocation import Allocation, DriftModel, gram_of
from headwise.replacement.planning.batches_by_kind import Batches, by_kind, length_of, measured_lengths
from headwise.replacement.planning.capture import AttentionSite, capture, find_sites
from headwise.replacement.planning.drift import Answer, answer_for, run_with
from headwise.replacement.planning.fit import beats_ablation, fit
from headwise.replacement.planning.prediction_bound import CONFIDENCE, LEAST_CONFIDENCE, bound_over_lengths
from headwise.replacement.planning.saved_progress import PlanProgress
from headwise.replacement.planning.sensitivity import sensitivities
from headwise.replacement.planning.timing import OBJECTIVES, relative_costs, time_plan
from headwise.replacement.plans import (
    LARGEST_TOLERANCE,
    FittedTensors,
    Plan,
    PlanPoint,
    Sites,
    check_tolerance,
)
from headwise.replacement.standard_kinds import SOFTMAX

STEPS = 60
"""Steps of Adam for a fit."""

CHOOSING = 4
"""The first of every so many texts of a kind chooses, the others measure."""


def plan(
    model: nn.Module,
    batches: Batches | Iterable[Any],
    *,
    tolerance: float,
    lengths: Sequence[int] | None = None,
    choices: Sequence[Choice] | None = None,
    objective: str = "seconds",
    beyond: str = "exact",
    evaluations: int = 6,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    name: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    partial_results: Path | None = None,
    progress: Progress | bool | None = None,
) -> Plan:
    """The cheapest operators, head by head, with which the output of the model drifts by at most `tolerance`.

    batches          {kind of text: two or more batches}; batches without kinds are dealt into a few parts
    lengths          lengths at which drift is measured (default: those of the batches; for language models also a half
                     and a quarter of the longest)
    choices          candidates besides softmax (default: those of every registered kind)
    objective        quantity to minimise: "seconds", "prefill", "decode", "memory" or "multiply-adds"
    beyond           what the rewritten model does with longer sequences: "exact" attention, or "refuse"
    evaluations      plans that are run
    confidence       of the bound: the share of texts, each of another new kind, that shall stay within the tolerance
    partial_results  a directory for what was computed, from which an interrupted run resumes
    progress         True for bars on standard error, or a function of (what, done, total)

    If torch.distributed is initialised, the processes share the kinds of text, and each returns the same plan.
    """
    check_tolerance(tolerance)
    if objective not in OBJECTIVES:
        raise InputError(f"objective must be one of {', '.join(OBJECTIVES)}, but is {objective!r}")
    if not LEAST_CONFIDENCE <= confidence <= 0.999:
        raise InputError(f"confidence must be between {LEAST_CONFIDENCE} and 0.999, but is {confidence}")
    check_own_attention(model)
    check_weights(model)
    kinds = by_kind(batches)
    first = next(iter(kinds.values()))[0]
    weights = weights_hash(model)
    with reported(progress) as report, as_it_was(model):
        sites, skipped = _find_sites(model, kinds)
        causal = all(site.causal for site in sites.values())
        answer = answer_for(model, first, causal=causal, texts=sum(len(given[::CHOOSING]) for given in kinds.values()))
        check_tolerance(tolerance, answer.measure)
        lengths = measured_lengths(model, kinds, sites, answer, lengths)
        tried = choices or candidates(lengths[-1], causal=causal, rotary=has_rotary_positions(model))
        for choice in tried:
            if causal:
                choice.check_causal(type(model).__name__)
            if has_rotary_positions(model):
                choice.check_rotary(type(model).__name__)
        simpler = [c.definition.ablation(c.options) for c in tried if c.definition.ablation is not None]
        tried = list(dict.fromkeys([SOFTMAX, *tried, *simpler]))
        settings = {"seed": seed, "lengths": lengths, "choices": [str(choice) for choice in tried]}
        settings |= {"batches": {kind: [batch_hash(x) for x in given] for kind, given in kinds.items()}}
        key = run_key(weights, settings)
        same_on_all({"weights": weights, "texts and settings": key})
        run = _Run(
            model,
            kinds,
            sites,
            lengths,
            tried,
            from_first(lambda: relative_costs(sites, tried, lengths[-1], objective)),
            answer,
            seed,
            PlanProgress(partial_results, key),
            evaluations,
            confidence,
            report,
        )
        curve = run.trade_off(tolerance)
    search = {"objective": objective, "evaluations": evaluations, "confidence": confidence}
    result = Plan(
        {
            "class": type(model).__name__,
            "name": name or type(model).__name__,
            "fingerprint": weights,
            "sites": {
                key: {
                    "heads": site.heads,
                    "key_value_heads": site.key_value_heads,
                    "width": site.width,
                    "causal": site.causal,
                }
                for key, site in sites.items()
            },
        },
        lengths[-1],
        {key: [SOFTMAX] * site.heads for key, site in sites.items()},
        run.fitted_by_head(),
        measure=answer.measure,
        curve=curve,
        skipped=skipped,
        lengths=lengths,
        beyond=beyond,
        provenance={
            **(provenance or {}),
            "run": run_key(weights, {**settings, **search}),
            "seed": seed,
            **search,
            "kinds": {kind: len(given) for kind, given in kinds.items()},
            "ratio": run.ratio,
        },
    ).at(tolerance)
    timing = from_first(lambda: time_plan(result, objective))
    return replace(result, exact_below=timing.pop("exact_below"), timing=timing)


def _find_sites(
    model: nn.Module, kinds: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, AttentionSite], dict[str, str]]:
    """The sites whose heads can be replaced, and why others cannot."""
    longest = max((batch for given in kinds.values() for batch in given), key=lambda x: length_of(x, 0))
    sites = find_sites(model, longest)
    skipped = {name: site.skipped for name, site in sites.items() if site.skipped is not None}
    if len(skipped) == len(sites):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:3])
        raise InputError(f"no attention of {type(model).__name__} can be replaced ({reasons})")
    return {name: site for name, site in sites.items() if name not in skipped}, skipped


@final
@dataclass(eq=False)
class _Run:
    """The search for one plan, and what it has computed."""

    model: nn.Module
    kinds: Mapping[str, Sequence[Any]]
    sites: Mapping[str, AttentionSite]
    lengths: tuple[int, ...]
    choices: Sequence[Choice]
    costs: Mapping[tuple[str, Choice], float]
    answer: Answer
    seed: int
    store: PlanProgress
    evaluations: int
    confidence: float
    report: Progress
    fitted: dict[tuple[str, Choice], Tensors] = field(default_factory=dict)
    learned: dict[tuple[str, Choice], Tensor] = field(default_factory=dict)  # (h,): what was learned helps elsewhere
    ratio: float = 5.0  # bound over predicted drift; where the search begins
    done: int = 0

    def trade_off(self, tolerance: float) -> list[PlanPoint]:
        """Measured points by decreasing cost: exact attention, the plan for the tolerance, and some around it."""
        self._advance(0)
        self._fit()
        model = DriftModel(self._costs(), dealt(self.kinds, self._gram))
        ladder, without = model.ladder(), {kind: model.ladder(without=kind) for kind in self.kinds}
        predicted = [statistics.fmean(model.predicted(plan).values()) for plan in ladder]
        measured = {
            0: PlanPoint(self._sites(ladder[0]), 1.0, drift={kind: {self.lengths[-1]: 0.0} for kind in self.kinds})
        }
        before: dict[str, list[Tensor]] = {}  # of the kinds that this process measures
        for _ in range(self.evaluations):
            index = _next(measured, [self.ratio * drift for drift in predicted], tolerance)
            if index is None:
                break
            plan = ladder[index]

            def drifts_of(kind: str, cost: float = plan.cost) -> dict[int, list[float]]:
                return self._drifts(kind, _at_cost(without[kind], cost), before)

            drifts = dealt(self.kinds, drifts_of)
            largest = {kind: {n: max(row) for n, row in rows.items()} for kind, rows in drifts.items()}
            bound = min(bound_over_lengths(drifts, self.confidence), LARGEST_TOLERANCE[self.answer.measure])
            measured[index] = PlanPoint(self._sites(plan), plan.cost, predicted[index], largest, bound)
            ratios = [each.bound / each.predicted for each in measured.values() if each.predicted > 0]
            self.ratio = statistics.median(ratios)
        self._advance(self._total() - self.done)
        return _pareto(list(measured.values()))

    # ---- sensitivities ----

    def _choosing(self, kind: str) -> Sequence[Any]:
        return self.kinds[kind][::CHOOSING]

    def _measuring(self, kind: str) -> Sequence[Any]:
        return [batch for i, batch in enumerate(self.kinds[kind]) if i % CHOOSING]

    def _fit(self) -> None:
        """Learned tensors of every choice that has some, from texts of all kinds but the last, which judges them."""
        learned = [
            c for c in self.choices if any(c.shapes(self.lengths[-1], site.width) for site in self.sites.values())
        ]

        def fitted(site: str) -> dict[str, Tensors]:
            def compute() -> dict[str, Tensors]:
                samples = [capture(self.model, self._choosing(kind)[-1:], [site])[site][0] for kind in self.kinds]
                fits: dict[str, Tensors] = {}
                for choice in learned:
                    options = {"length": self.lengths[-1], "generator": torch.Generator().manual_seed(self.seed)}
                    tensors = fit(choice, samples[:-1], steps=STEPS, **options)
                    options = {**options, "generator": torch.Generator().manual_seed(self.seed)}
                    frozen = fit(choice, samples[:-1], steps=0, **options)
                    fits[str(choice)] = tensors
                    fits[f"{choice} learned"] = {"": beats_ablation(choice, samples[-1:], tensors, frozen)}
                return fits

            return self.store.stored(f"fit and judge {site}", compute)

        for site, fits in dealt(self.sites if learned else (), fitted).items():
            self.fitted |= {(site, choice): fits[str(choice)] for choice in learned}
            self.learned |= {(site, choice): fits[f"{choice} learned"][""] for choice in learned}

    def _gram(self, kind: str) -> Tensor:
        """Mean over the texts of a kind of x x^T / 2, (units * choices) on both sides."""
        grams = []
        for index, batch in enumerate(self._choosing(kind)):

            def compute(batch: Any = batch) -> Tensor:
                if len(self.choices) == 1:
                    return torch.zeros(sum(site.key_value_heads for site in self.sites.values()), 1, 1)
                generator = torch.Generator().manual_seed(self.seed)
                candidates = {
                    site: [self._heads(site, [c] * s.heads) for c in self.choices[1:]] for site, s in self.sites.items()
                }
                x = sensitivities(self.model, batch, self.sites, candidates, self.answer, generator)
                # the first choice is exact attention, which moves nothing
                return F.pad(torch.cat([x[site] for site in self.sites]), (0, 0, 1, 0))

            x = self.store.stored(f"sensitivities {kind} {index}", compute)
            grams.append(gram_of(x))
            self._advance(self._pass() * length_of(batch, 1))
        return torch.stack(grams).mean(0)

    def _costs(self) -> Tensor:
        """(units, choices); infinite for a learned choice that is no better than its ablation at some head of a unit"""
        rows = []
        for name, site in self.sites.items():
            costs = torch.tensor([self.costs[name, c] for c in self.choices], dtype=torch.float64)
            better = [self.learned.get((name, c), torch.ones(site.heads, dtype=torch.bool)) for c in self.choices]
            kept = torch.stack(better).unflatten(1, (site.key_value_heads, -1)).all(-1)  # (choices, units)
            rows.append(costs.where(kept.mT, torch.inf))
        return torch.cat(rows)

    # ---- plans ----

    def _sites(self, plan: Allocation) -> Sites:
        """The choice of each query head."""
        chosen, sites = iter(plan.chosen), {}
        for name, site in self.sites.items():
            shared = site.heads // site.key_value_heads
            sites[name] = [c for _ in range(site.key_value_heads) for c in [self.choices[next(chosen)]] * shared]
        return sites

    def _drifts(self, kind: str, plan: Allocation, before: dict[str, list[Tensor]]) -> dict[int, list[float]]:
        """Measured drift of every text of one kind, by length; `before` keeps the answers of the exact model."""

        def compute() -> dict[int, list[float]]:
            if kind not in before:
                before[kind] = [run_with(self.model, batch, self.answer, {}) for batch in self._measuring(kind)]
            sites = self._sites(plan).items()
            heads = {site: self._heads(site, choices) for site, choices in sites if set(choices) != {SOFTMAX}}
            by_length: dict[int, list[float]] = {}
            for batch, states in zip(self._measuring(kind), before[kind], strict=True):
                drift = self.answer.drift(self.model, batch, states, run_with(self.model, batch, self.answer, heads))
                length = length_of(batch, self.lengths[-1])
                shorter = [n for n in self.lengths if n <= length and self.answer.by_position]
                for n in shorter or [length]:
                    by_length.setdefault(n, []).extend(drift[..., :n].mean(2).amax(0).clamp(min=0).tolist())
            return dict(sorted(by_length.items()))

        drifts = self.store.stored(f"drifts {kind} {plan.chosen}", compute)
        self._advance(sum(length_of(batch, 1) for batch in self._measuring(kind)))
        return drifts

    def _heads(self, site: str, choices: Sequence[Choice]) -> MixedHeads:
        fitted = {
            head: {name: x[head] for name, x in self.fitted.get((site, choice), {}).items()}
            for head, choice in enumerate(choices)
        }
        return MixedHeads(choices, self.sites[site].width, self.lengths[-1], fitted)

    def fitted_by_head(self) -> FittedTensors:
        return {
            (site, head, choice): {name: x[head].clone() for name, x in tensors.items()}
            for (site, choice), tensors in self.fitted.items()
            if tensors
            for head in range(self.sites[site].heads)
        }

    # ---- progress: one count for the whole, in tokens of a forward pass ----

    def _total(self) -> int:
        choosing = sum(length_of(batch, 1) for kind in self.kinds for batch in self._choosing(kind))
        measuring = sum(length_of(batch, 1) for kind in self.kinds for batch in self._measuring(kind))
        return self._pass() * choosing + self.evaluations * measuring

    def _pass(self) -> int:
        """Work of a forward and backward pass with all candidates, in forward passes: measured, roughly."""
        return 2 + 2 * self.answer.probes + len(self.choices) // 4

    def _advance(self, work: int) -> None:
        ranks = several()
        self.done = min(self._total(), self.done + work * (1 if ranks is None else ranks.size))
        self.report("planning", self.done, self._total())


def _at_cost(ladder: Sequence[Allocation], cost: float) -> Allocation:
    """The plan whose cost is nearest."""
    return min(ladder, key=lambda plan: abs(plan.cost - cost))


def _next(measured: Mapping[int, PlanPoint], bounds: Sequence[float], tolerance: float) -> int | None:
    """The plan of the ladder to run next: where the predicted bound reaches the tolerance, between those that are known
    to meet it and those that do not; then around it.  None if there is nothing left to run."""
    meets = max(i for i, point in measured.items() if point.meets(tolerance))
    fails = min((i for i, point in measured.items() if not point.meets(tolerance)), default=len(bounds))
    between = range(meets + 1, fails)
    near = [i for i in between if bounds[i] <= tolerance]
    if len(between) > len(bounds) // 30 and len(measured) <= 5:
        # at least a quarter of the interval from its ends, if both are known
        low, high = (
            (between[len(between) // 4], between[-1 - len(between) // 4])
            if fails < len(bounds)
            else (between[0], between[-1])
        )
        return min(max(max(near, default=low), low), high)
    for factor in (0.5, 2.0, 0.25, 4.0):
        index = min(range(1, len(bounds)), key=lambda i: abs(bounds[i] - factor * tolerance), default=0)
        if index not in measured:
            return index
    return None


def _pareto(points: Sequence[PlanPoint]) -> list[PlanPoint]:
    """In order of decreasing cost, each with a smaller bound than every cheaper one."""
    kept: list[PlanPoint] = []
    for point in sorted(points, key=lambda p: (p.cost, p.bound)):
        if not kept or point.bound < kept[-1].bound:
            kept.append(point)
    return kept[::-1]
