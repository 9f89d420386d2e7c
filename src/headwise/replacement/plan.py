"""A plan: for every head of a model the operator that replaces it, how far that moves the model, and what it saves.

plan.json is for people: `sites` lists a choice a head and may be edited.  plan.safetensors beside it holds the learned
tensors of every choice that was fitted, so that an edited choice finds its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.fingerprint import fingerprint
from headwise.models.load import one_line
from headwise.replacement.choice import EXACT, Choice
from headwise.replacement.install.mixed_heads import parameter_key

SCHEMA = 1

Sites = dict[str, list[Choice]]


@final
@dataclass(frozen=True, eq=False)
class Point:
    """One way to rewrite the model: what it costs relative to exact attention, and how far it moves the answer.

    selection and its standard error are over the texts that chose it, test over texts that chose nothing.
    """

    sites: Sites
    cost: float
    selection: float
    error: float
    test: float | None = None
    name: str = ""

    def meets(self, tolerance: float) -> bool:
        """With one standard error to spare, for what is chosen by a mean is a little luckier than it should be."""
        return self.selection + self.error <= tolerance


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """What `rewrite` carries out, and the whole trade-off it was chosen from.

    model      class, name, fingerprint, and for each site its heads, width and causality
    fitted     learned tensors by (site, head, choice)
    curve      points from the dearest to the cheapest, none of them worse than a cheaper one
    baselines  the same operator for every head
    """

    model: Mapping[str, Any]
    length: int
    tolerance: float
    measure: str
    sites: Sites
    fitted: Mapping[tuple[str, int, Choice], Mapping[str, Tensor]] = field(default_factory=dict)
    curve: Sequence[Point] = ()
    baselines: Sequence[Point] = ()
    timing: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The learned tensors of the chosen operators, by `parameter_key`."""
        return {
            parameter_key(site, head, name): x
            for site, choices in self.sites.items()
            for head, choice in enumerate(choices)
            for name, x in self.fitted.get((site, head, choice), {}).items()
        }

    @property
    def point(self) -> Point | None:
        """The point of the curve that the plan stands at; None once it was edited."""
        return next((point for point in self.curve if point.sites == self.sites), None)

    def at(self, tolerance: float) -> Plan:
        """The cheapest point of the curve that moves the answer by at most `tolerance`."""
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise InputError(f"a tolerance is a number of at least 0, but is {tolerance}")
        enough = [point for point in self.curve if point.meets(tolerance)]
        if not enough:
            raise InputError(f"no point of the curve is within {tolerance:g}, not even exact attention")
        return replace(self, tolerance=tolerance, sites=min(enough, key=lambda point: point.cost).sites)

    def cost(self, length: int | None = None, sites: Sites | None = None) -> float:
        """Multiply-adds of all heads over those of exact attention, for one sequence of `length`."""
        n, total, exact = length or self.length, 0, 0
        for site, choices in (sites or self.sites).items():
            known = self.model["sites"][site]
            d, causal = int(known["width"]), bool(known["causal"])
            total += sum(c.of.cost(c, n, d, causal).multiply_adds for c in choices)
            exact += len(choices) * EXACT.of.cost(EXACT, n, d, causal).multiply_adds
        return total / exact

    def check(self, model: nn.Module) -> None:
        """The plan is for this very model, or a sentence."""
        found = fingerprint(model, {})
        if found != self.model["fingerprint"]:
            raise InputError(
                f"the plan was made for {self.model['name']} ({self.model['class']}), whose weights are not those of "
                f"this {type(model).__name__}; plan again for this model"
            )

    def save(self, directory: str | Path) -> list[Path]:
        """plan.json and, if anything was fitted, plan.safetensors; written beside and renamed at the end."""
        out = Path(directory)
        files = [out / "plan.json"]
        tensors = {
            f"{site}|{head}|{choice}|{name}": x.contiguous()
            for (site, head, choice), own in self.fitted.items()
            for name, x in own.items()
        }
        try:
            out.mkdir(parents=True, exist_ok=True)
            if tensors:
                from safetensors.torch import save_file

                files.append(out / "plan.safetensors")
                beside = out / f".plan-{os.getpid()}.safetensors"
                save_file(tensors, beside)
                beside.replace(files[-1])
            beside = out / f".plan-{os.getpid()}.json"
            beside.write_text(_pretty(self.to_dict()) + "\n", encoding="utf-8")
            beside.replace(files[0])
        except OSError as error:
            raise InputError(f"cannot write the plan to {out}: {error.strerror or error}") from error
        return files

    def to_dict(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers; the curve names its choices by their place in `choices`."""
        known = list(dict.fromkeys(c for p in (*self.curve, *self.baselines) for cs in p.sites.values() for c in cs))
        place = {choice: index for index, choice in enumerate(known)}

        def point(p: Point) -> dict[str, Any]:
            rows = {site: [place[c] for c in choices] for site, choices in p.sites.items()}
            facts = {"name": p.name, "cost": p.cost, "selection": p.selection, "error": p.error, "test": p.test}
            return {**facts, "sites": rows}

        return {
            "schema": SCHEMA,
            "model": dict(self.model),
            "length": self.length,
            "tolerance": self.tolerance,
            "measure": self.measure,
            "sites": {site: [choice.to_dict() for choice in choices] for site, choices in self.sites.items()},
            "choices": [choice.to_dict() for choice in known],
            "curve": [point(p) for p in self.curve],
            "baselines": [point(p) for p in self.baselines],
            "timing": dict(self.timing),
            "left": dict(self.left),
            "made": dict(self.made),
        }

    @staticmethod
    def load(path: str | Path) -> Plan:
        """From the directory `save` wrote to, or its plan.json; whatever is wrong with it is one sentence."""
        given = Path(path).expanduser()
        file = given / "plan.json" if given.is_dir() else given
        facts = _read(file)
        model, length = facts["model"], _whole(file, "length", facts["length"])
        sites = _sites(file, facts["sites"], model)
        tensors = _tensors(file.with_suffix(".safetensors"))
        known = [Choice.from_dict(d) for d in facts.get("choices", [])]
        plan = Plan(
            model,
            length,
            float(facts["tolerance"]),
            str(facts["measure"]),
            sites,
            _fitted(file, tensors),
            [_point(file, p, known) for p in facts.get("curve", [])],
            [_point(file, p, known) for p in facts.get("baselines", [])],
            facts.get("timing", {}),
            facts.get("left", {}),
            facts.get("made", {}),
        )
        _complete(file, plan)
        return plan


def _read(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}; name a plan.json made by plan") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error})") from error
    needed = ("model", "length", "tolerance", "measure", "sites")
    if not isinstance(facts, dict) or any(name not in facts for name in needed):
        raise InputError(f"{file} is not a plan: it needs {', '.join(needed)}")
    if facts.get("schema") != SCHEMA:
        raise InputError(f"{file} has schema {facts.get('schema')}, this version reads {SCHEMA}; plan again")
    described = facts["model"].get("sites") if isinstance(facts["model"], dict) else None
    if not isinstance(described, dict) or "fingerprint" not in facts["model"]:
        raise InputError(f"{file} does not say which model it is for: model needs class, fingerprint and sites")
    return facts


def _sites(file: Path, given: Any, model: Mapping[str, Any]) -> Sites:
    if not isinstance(given, dict) or not given:
        raise InputError(f"{file}: sites must be an object with a list of choices for each site, but is {given!r}")
    found: Sites = {}
    for site, choices in given.items():
        if site not in model["sites"]:
            raise InputError(f"{file}: the model has no site {site!r}; it has {', '.join(model['sites'])}")
        heads = model["sites"][site]["heads"]
        if not isinstance(choices, list) or len(choices) != heads:
            count = len(choices) if isinstance(choices, list) else choices
            raise InputError(f"{file}: {site} has {heads} heads, but the plan has {count} choices for it")
        found[site] = []
        for head, written in enumerate(choices):
            try:
                found[site].append(Choice.from_dict(written))
            except InputError as error:
                raise InputError(f"{file}: {site}, head {head}: {error}") from error
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        return {}
    try:
        from safetensors.torch import load_file

        return load_file(file)
    except Exception as error:
        raise InputError(f"cannot read the learned tensors in {file} ({one_line(error)})") from error


def _fitted(file: Path, tensors: Mapping[str, Tensor]) -> dict[tuple[str, int, Choice], dict[str, Tensor]]:
    found: dict[tuple[str, int, Choice], dict[str, Tensor]] = {}
    for key, x in tensors.items():
        site, head, words, name = key.rsplit("|", 3)
        found.setdefault((site, int(head), _spoken(words)), {})[name] = x
    return found


def _spoken(words: str) -> Choice:
    """The inverse of str(choice)."""
    kind, *options = words.split()
    return Choice(kind, {name: float(value) for name, value in (option.split("=") for option in options)})


def _complete(file: Path, plan: Plan) -> None:
    """Every chosen operator that learns has its tensors, in its own sizes."""
    for site, head, choice in each(plan.sites):
        shapes = choice.of.parameters(choice, plan.length, int(plan.model["sites"][site]["width"]))
        own = plan.fitted.get((site, head, choice), {})
        for name, shape in shapes.items():
            if name not in own:
                known = sorted({str(c) for s, h, c in plan.fitted if (s, h) == (site, head)})
                raise InputError(
                    f"{file}: {site}, head {head} is {choice}, whose tensor {name!r} was not fitted; "
                    f"choose one that was ({', '.join(known) or 'none'}) or one without learned tensors"
                )
            if tuple(own[name].shape) != shape:
                raise InputError(
                    f"{file}: {site}, head {head} is {choice}: its {name} should be {shape}, but is "
                    f"{tuple(own[name].shape)}"
                )


def each(sites: Sites) -> Iterator[tuple[str, int, Choice]]:
    """(site, head, choice) in order."""
    for site, choices in sites.items():
        for head, choice in enumerate(choices):
            yield site, head, choice


def _point(file: Path, facts: Mapping[str, Any], known: Sequence[Choice]) -> Point:
    try:
        sites = {site: [known[i] for i in row] for site, row in facts["sites"].items()}
        return Point(sites, facts["cost"], facts["selection"], facts["error"], facts["test"], facts["name"])
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(f"{file}: a point of the curve is damaged ({one_line(error)}); plan again") from error


def _whole(file: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{file}: {name} must be a whole number of at least 1, but is {value!r}")
    return value


def _pretty(value: Any, depth: int = 0) -> str:
    """JSON with a line for each head and each point: short enough to read, and to edit."""
    if isinstance(value, dict) and value and depth < 3:
        inside = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(k)}: {_pretty(v, depth + 1)}" for k, v in value.items())
        return "{\n" + inside + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        inside = ",\n".join(" " * (depth + 1) + json.dumps(item, allow_nan=False) for item in value)
        return "[\n" + inside + "\n" + " " * depth + "]"
    return json.dumps(value, allow_nan=False)
