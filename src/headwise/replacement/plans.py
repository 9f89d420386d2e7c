"""A plan: for every head of a model the operator that replaces it, how far that moves the output, and what it saves.

plan.json may be edited by hand: `sites` lists one choice per head.  plan.safetensors beside it holds the learned
tensors of every choice that was fitted, so an edited choice finds its tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.fingerprint import weights_hash
from headwise.models.inputs import max_positions
from headwise.models.load import one_line
from headwise.output_directory import OutputDirectory, directory_for
from headwise.outputs import json_text
from headwise.reading import (
    anything,
    boolean,
    fields,
    list_of,
    map_of,
    number,
    read_json,
    string,
    validate,
    version,
    whole,
)
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.kinds import Choice, has_rotary_positions
from headwise.replacement.plan_point import PlanPoint, Sites
from headwise.replacement.standard_kinds import SOFTMAX

SCHEMA = 3
FILES = ("plan.json", "plan.safetensors")
INSTALLED_VERSION = 3

BEYOND = ("exact", "refuse")
"""What replaced layers do with more keys than they were planned for: exact attention, or UnsupportedError."""


FittedTensors = Mapping[tuple[str, int, Choice], Mapping[str, Tensor]]
"""Learned tensors by (site, head, choice)."""

LARGEST_TOLERANCE = {"cosine": 2.0, "loss": math.inf}
"""By measure: 1 - cos is at most 2, a difference of losses may be any number."""

LONGEST = 1 << 24  # tokens
_POSITIVE = whole(1, 1 << 16)
_CHOICE = fields({"kind": string()}, more=True)  # its options are checked by the kind
_POINT = fields(
    {
        "sites": map_of(list_of(whole(0))),
        "cost": number(0),
        "predicted": number(0),
        "drift": map_of(map_of(number(0))),
        "bound": number(0),
    }
)
PLAN_FILE = fields(
    {
        "schema": version(SCHEMA, "plan again"),
        "model": fields(
            {
                "fingerprint": string(),
                "sites": map_of(
                    fields({"heads": _POSITIVE, "width": _POSITIVE, "causal": boolean}, {"key_value_heads": _POSITIVE})
                ),
            },
            {"class": string(), "name": string()},
        ),
        "length": whole(1, LONGEST),
        "lengths": list_of(whole(1, LONGEST)),
        "beyond": string(BEYOND),
        "exact_below": map_of(whole(0, LONGEST)),
        "tolerance": number(0),
        "measure": string(LARGEST_TOLERANCE),
        "sites": map_of(list_of(_CHOICE)),
        "choices": list_of(_CHOICE),
        "curve": list_of(_POINT),
    },
    {
        "timing": map_of(anything),
        "skipped": map_of(string()),
        "provenance": map_of(anything),
        "tensors": string(),  # SHA-256 of plan.safetensors
    },
)
"""plan.json, as docs/reference/plan-json.md describes it."""

INSTALLED = fields(
    {
        "version": version(INSTALLED_VERSION, "rewrite the original model again"),
        "length": whole(1, LONGEST),
        "beyond": string(BEYOND),
        "sites": map_of(fields({"width": _POSITIVE, "heads": list_of(_CHOICE), "exact_below": whole(0, LONGEST)})),
    }
)
"""`headwise` in the config.json of a rewritten model."""


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """What `rewrite` installs, and the trade-off it was chosen from.

    model       {"class", "name", "fingerprint", "sites": {site: {"heads", "width", "causal"}}}; a plan without a
                fingerprint is not checked against the weights
    length      longest sequence the plan was made for
    sites       the choice for every head
    fitted      learned tensors by (site, head, choice); choices not in it keep their initial values
    tolerance   largest drift allowed, as measured by `measure`: "cosine" or "loss"
    curve       Pareto-optimal points in order of decreasing cost
    timing      measured seconds of attention on this machine
    skipped     {site: why its heads were left unchanged}
    provenance  how the plan was made: command, data, seed
    lengths     lengths at which drift was measured, ascending; the last one is `length`
    beyond      what replaced layers do with more than `length` keys: "exact" attention, or "refuse"
    exact_below {site: number of keys below which it runs exact attention}; 0, or no entry: never
    """

    model: Mapping[str, Any]
    length: int
    sites: Sites
    fitted: FittedTensors = field(default_factory=dict)
    tolerance: float = 0.0
    measure: str = "cosine"
    curve: Sequence[PlanPoint] = ()
    timing: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    beyond: str = "exact"
    exact_below: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths) or (self.length,))
        if not self.sites:
            raise InputError("the plan lists no attention sites, so there is nothing to rewrite")
        if self.beyond not in BEYOND:
            raise InputError(f"beyond must be {' or '.join(map(repr, BEYOND))}, but is {self.beyond!r}")
        if list(self.lengths) != sorted(set(self.lengths)) or self.lengths[-1] != self.length:
            raise InputError(f"lengths must ascend to the length {self.length} of the plan, but are {self.lengths}")
        for site in self.exact_below:
            if site not in self.model["sites"]:
                raise InputError(f"exact_below: the model has no site {site!r}")
        for site, choices in self.sites.items():
            _check_site(self.model["sites"], site, len(choices), f"sites/{site}")

    def __repr__(self) -> str:
        counts = Counter(choice for choices in self.sites.values() for choice in choices)
        heads, mix = counts.total(), ", ".join(f"{count} {choice}" for choice, count in counts.most_common())
        lengths = ", ".join(map(str, self.lengths))
        return f"Plan({self.model['name']}: {heads} heads, {mix}; tolerance {self.tolerance:g} at lengths {lengths})"

    def __str__(self) -> str:
        rows = [f"{'*' if point is self.point else ' '} {point!r}" for point in self.curve]
        return "\n".join([repr(self), *rows])

    @property
    def point(self) -> PlanPoint | None:
        """The point of the curve with the choices of this plan; None if the plan was edited."""
        return next((point for point in self.curve if point.sites == self.sites), None)

    def at(self, tolerance: float) -> Plan:
        """The plan at the cheapest point of the curve with a drift of at most `tolerance`."""
        check_tolerance(tolerance, self.measure)
        allowed = [point for point in self.curve if point.meets(tolerance)]
        if not allowed:
            raise InputError(f"no point of the curve is within a tolerance of {tolerance:g}")
        return replace(self, tolerance=tolerance, sites=min(allowed, key=lambda point: point.cost).sites)

    def cost(self, length: int | None = None, sites: Sites | None = None) -> float:
        """Multiply-adds of all heads for one sequence of `length`, relative to softmax attention."""
        n, planned, unchanged = length or self.length, 0, 0
        for site, choices in (sites or self.sites).items():
            facts = self.model["sites"][site]
            size = n, int(facts["width"]), bool(facts["causal"])
            planned += sum(choice.cost(*size).multiply_adds for choice in choices)
            unchanged += len(choices) * SOFTMAX.cost(*size).multiply_adds
        return planned / unchanged

    def check(self, model: nn.Module) -> None:
        """Raise InputError or UnsupportedError unless the plan can be installed in `model`."""
        name = type(model).__name__.removeprefix("Headwise")
        planned = str(self.model.get("class", name)).removeprefix("Headwise")
        if planned != name:
            raise InputError(f"the plan was made for a {planned}, but the model is a {name}; plan again for this model")
        modules, rotary = dict(model.named_modules()), has_rotary_positions(model)
        for site, head, choice in each_head(self.sites):
            module = site.partition("@")[0]
            if module not in modules:
                raise InputError(f"the plan was made for another model: {name} has no module {module!r}")
            if self.model["sites"][site].get("causal", getattr(modules[module], "is_causal", False)):
                choice.check_causal(f"{site}: head {head}")
            if rotary:
                choice.check_rotary(name)
        positions = max_positions(model)
        if positions is not None and self.length > positions:
            raise InputError(f"the plan is for a length of {self.length}, but {name} has {positions} positions")
        expected = self.model.get("fingerprint")
        if expected is not None and weights_hash(model) != expected:
            raise InputError(
                f"the plan was made for {self.model.get('name', planned)} ({planned}), whose weights differ from "
                f"those of this {name}; plan again for this model"
            )

    def mixed_heads(self, site: str) -> MixedHeads:
        """The module that computes attention at `site`, with its fitted tensors."""
        choices, width = self.sites[site], int(self.model["sites"][site]["width"])
        fitted = {head: dict(self.fitted.get((site, head, choice), {})) for head, choice in enumerate(choices)}
        for head, tensors in fitted.items():
            missing = choices[head].shapes(self.length, width).keys() - tensors.keys()
            if tensors and missing:
                names = ", ".join(sorted(missing))
                raise InputError(f"{site}: head {head} is {choices[head]}, but the plan lacks its fitted {names}")
        return MixedHeads(choices, width, self.length, fitted)

    def renamed(self, name: Callable[[str], str]) -> Plan:
        """The same plan for a model whose sites have other names, as those of its body have."""
        points = [replace(point, sites={name(site): x for site, x in point.sites.items()}) for point in self.curve]
        return replace(
            self,
            model={**self.model, "sites": {name(site): facts for site, facts in self.model["sites"].items()}},
            sites={name(site): choices for site, choices in self.sites.items()},
            exact_below={name(site): keys for site, keys in self.exact_below.items()},
            fitted={(name(site), head, choice): x for (site, head, choice), x in self.fitted.items()},
            curve=points,
            skipped={name(site): why for site, why in self.skipped.items()},
        )

    def save(self, directory: str | Path | OutputDirectory, *, force: bool = False) -> list[Path]:
        """Write plan.json and, if anything was fitted, plan.safetensors; returns their paths.

        An earlier plan there is replaced with `force`; files that headwise did not write are never replaced.
        """
        tensors = {
            f"{site}|{head}|{choice}|{name}": x.contiguous()
            for (site, head, choice), named in self.fitted.items()
            for name, x in named.items()
        }
        with directory_for(directory, command="plan", names=FILES, force=force) as out:
            out.key = str(self.provenance.get("run", ""))
            facts = self.to_dict()
            if tensors:
                from safetensors.torch import save_file

                with out.atomic("plan.safetensors") as path:
                    save_file(tensors, path)
                    facts["tensors"] = _sha256(path)
            out.write_text("plan.json", _one_line_per_head(facts) + "\n")
            return [out.path / name for name in (FILES if tensors else FILES[:1])]

    def to_dict(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers; points refer to choices by their index in `choices`."""
        choices = dict.fromkeys(choice for point in self.curve for _, _, choice in each_head(point.sites))
        index = {choice: i for i, choice in enumerate(choices)}

        def point(p: PlanPoint) -> dict[str, Any]:
            drift = {kind: {str(n): value for n, value in row.items()} for kind, row in p.drift.items()}
            sites = {site: [index[c] for c in choices] for site, choices in p.sites.items()}
            return {**vars(p), "sites": sites, "drift": drift}

        return {
            "schema": SCHEMA,
            "model": dict(self.model),
            "length": self.length,
            "lengths": list(self.lengths),
            "beyond": self.beyond,
            "exact_below": dict(self.exact_below),
            "tolerance": self.tolerance,
            "measure": self.measure,
            "sites": {site: [choice.to_dict() for choice in choices] for site, choices in self.sites.items()},
            "choices": [choice.to_dict() for choice in index],
            "curve": [point(p) for p in self.curve],
            "timing": dict(self.timing),
            "skipped": dict(self.skipped),
            "provenance": dict(self.provenance),
        }

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan.json, or the directory that `save` wrote; raises InputError that names what is wrong with it."""
        path = Path(path).expanduser()
        file = path / "plan.json" if path.is_dir() else path
        facts = read_json(file, PLAN_FILE, "a plan.json that `headwise plan` wrote, or its directory")
        try:
            return _from_facts(facts, _read_tensors(file.with_suffix(".safetensors"), facts.get("tensors")))
        except InputError as error:
            raise InputError(f"{file}: {error}") from error


def _from_facts(facts: Mapping[str, Any], fitted: FittedTensors) -> Plan:
    """The inverse of `Plan.to_dict`."""
    check_tolerance(facts["tolerance"], facts["measure"])
    known = facts["model"]["sites"]
    choices = _choices(facts["choices"], "choices")

    def point(p: Mapping[str, Any], at: str) -> PlanPoint:
        try:
            drift = {kind: {int(n): value for n, value in row.items()} for kind, row in p["drift"].items()}
        except ValueError as error:
            raise InputError(f"{at}/drift must be by kind and length, but holds {one_line(error)}") from error
        return PlanPoint(**{**p, "sites": sites_of(p, at), "drift": drift})

    def sites_of(point: Mapping[str, Any], at: str) -> Sites:
        for site, row in point["sites"].items():
            _check_site(known, site, len(row), f"{at}/sites/{site}")
            for head, index in enumerate(row):
                if index >= len(choices):
                    raise InputError(f"{at}/sites/{site}/{head} is {index}, but there are {len(choices)} choices")
        return {site: [choices[index] for index in row] for site, row in point["sites"].items()}

    plan = Plan(
        facts["model"],
        facts["length"],
        {site: _choices(row, f"sites/{site}") for site, row in facts["sites"].items()},
        fitted,
        float(facts["tolerance"]),
        facts["measure"],
        [point(p, f"curve/{i}") for i, p in enumerate(facts["curve"])],
        *(facts.get(name, {}) for name in ("timing", "skipped", "provenance")),
        *(facts[name] for name in ("lengths", "beyond", "exact_below")),
    )
    for site, head, choice in each_head(plan.sites):
        _check_fitted(plan, site, head, choice)
    return plan


def _choices(written: Sequence[Mapping[str, Any]], at: str) -> list[Choice]:
    choices = []
    for index, each in enumerate(written):
        try:
            choices.append(Choice.from_dict(each))
        except InputError as error:
            raise InputError(f"{at}/{index}: {error}") from error
    return choices


def _check_site(known: Mapping[str, Any], site: str, heads: int, at: str) -> None:
    if site not in known:
        raise InputError(f"{at}: the model has no site {site!r}; it has {', '.join(known) or 'none'}")
    if known[site]["heads"] != heads:
        raise InputError(f"{at}: {site} has {known[site]['heads']} heads, but the plan has {heads} choices")


def installed_choices(facts: Any, where: str) -> dict[str, list[Choice]]:
    """The choices at each site of a rewritten model, from `headwise` in its config.json; InputError if damaged."""
    validate(facts, INSTALLED, where)
    sites = {site: _choices(each["heads"], f"{where}: sites/{site}/heads") for site, each in facts["sites"].items()}
    for site, head, choice in each_head(sites):
        try:
            choice.shapes(facts["length"], facts["sites"][site]["width"])
        except InputError as error:
            raise InputError(f"{where}: sites/{site}/heads/{head}: {error}") from error
    return sites


def each_head(sites: Sites) -> Iterator[tuple[str, int, Choice]]:
    """(site, head, choice) in order."""
    for site, choices in sites.items():
        for head, choice in enumerate(choices):
            yield site, head, choice


def check_tolerance(tolerance: float, measure: str | None = None) -> None:
    """Raise InputError for a drift that cannot be meant; the largest one depends on how drift is measured."""
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance must be a finite number of at least 0, but is {tolerance}")
    if measure is not None and tolerance > LARGEST_TOLERANCE.get(measure, math.inf):
        raise InputError(f"tolerance is {tolerance:g}, but a drift of cosines, 1 - cos, is at most 2")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_tensors(file: Path, sha256: str | None) -> FittedTensors:
    """The learned tensors of a plan; `sha256` is that of the file when the plan was written, None if there was none."""
    if sha256 is not None and not file.is_file():
        raise InputError(f"its learned tensors, {file}, are missing; copy both files, or plan again")
    if not file.exists():
        return {}
    fitted: dict[tuple[str, int, Choice], dict[str, Tensor]] = {}
    try:
        from safetensors.torch import load_file

        if sha256 is not None and _sha256(file) != sha256:
            raise InputError("it is not the file that was written with this plan; copy both files, or plan again")
        for key, x in load_file(file).items():
            site, head, choice, name = key.rsplit("|", 3)
            fitted.setdefault((site, int(head), Choice.from_str(choice)), {})[name] = x
    except Exception as error:
        raise InputError(f"cannot read the learned tensors in {file} ({one_line(error)})") from error
    return fitted


def _check_fitted(plan: Plan, site: str, head: int, choice: Choice) -> None:
    """Raise InputError unless every learned tensor of the choice was fitted, in the right size."""
    fitted, at = plan.fitted.get((site, head, choice), {}), f"sites/{site}/{head}"
    for name, shape in choice.shapes(plan.length, plan.model["sites"][site]["width"]).items():
        if name not in fitted:
            others = sorted({str(c) for s, h, c in plan.fitted if (s, h) == (site, head)})
            raise InputError(
                f"{at} is {choice}, whose tensor {name!r} was not fitted; "
                f"choose one that was ({', '.join(others) or 'none'}) or one without learned tensors"
            )
        if fitted[name].shape != shape:
            shapes = tuple(shape), tuple(fitted[name].shape)
            raise InputError(f"{at} is {choice}: its {name} should be {shapes[0]}, but is {shapes[1]}")


def _one_line_per_head(value: Any, depth: int = 0) -> str:
    """JSON with a line for each head and each point, short enough to read and edit."""
    indent = "\n" + " " * (depth + 1)
    if isinstance(value, dict) and value and depth < 3:
        items = (f"{json_text(key)}: {_one_line_per_head(x, depth + 1)}" for key, x in value.items())
        return "{" + indent + f",{indent}".join(items) + indent[:-1] + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + indent + f",{indent}".join(map(json_text, value)) + indent[:-1] + "]"
    return json_text(value)
