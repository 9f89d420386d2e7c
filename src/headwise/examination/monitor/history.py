"""Measurements of every head over training steps: plain dicts, a DataFrame, numbers for a logger, a file, a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.outputs import atomic, writing
from headwise.reading import fields, list_of, nullable, number, read_json, string, version, whole

SCHEMA = 1


class MonitoredMeasure(NamedTuple):
    """A measure of a head, and how the heads of a layer become one number."""

    name: str
    of_layer: str  # "max", "min" or "mean" over the heads
    unit: str
    meaning: str


MEASURES = (
    MonitoredMeasure("max_logit", "max", "", "max_ij S_ij, the largest score before the softmax; all queries and keys"),
    MonitoredMeasure("entropy", "mean", "nats", "mean_i H_i, H_i = −Σ_j P_ij ln P_ij; sampled queries"),
    MonitoredMeasure("entropy_share", "mean", "share", "mean_i H_i / ln C_i, C_i the keys that query i may attend to"),
    MonitoredMeasure("lowest_entropy_share", "min", "share", "min_i H_i / ln C_i over the sampled queries"),
    MonitoredMeasure("row_maximum", "mean", "share", "mean_i max_j P_ij, the weight of each query's first choice"),
    MonitoredMeasure("sink_mass", "mean", "share", "max_j c_j, the share of attention that goes to one key"),
    MonitoredMeasure(
        "effective_rank", "mean", "", "effective rank of up to 128 rows of P of one sequence; now and then"
    ),
)
NAMES = tuple(measure.name for measure in MEASURES)


class Head(NamedTuple):
    """A head by the name of its layer in the model and its number there."""

    layer: str
    head: int

    def __str__(self) -> str:
        return f"{self.layer} head {self.head}"


@dataclass(frozen=True)
class Alarm:
    """One sentence about one head at one step."""

    step: int
    kind: str  # "not finite", "logit growth", "entropy collapse" or "rank collapse"
    layer: str
    head: int
    message: str


@dataclass(eq=False)
class History:
    """What was measured at some steps.

    Values are kept as (measures, heads) tensors: NaN is no number, and a largest score of infinity is one that was not
    finite.
    """

    model: str = ""
    heads: list[Head] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # one (len(NAMES), heads known by then) a step, float32
    losses: list[tuple[int, float]] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        what = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"
        return f"History({len(self)} measurements of {len(self.heads)} heads, {what}, {len(self.alarms)} alarms)"

    def add(self, step: int, measured: Mapping[Head, Sequence[float]]) -> Tensor:
        """Add one step: for every head its measures in the order of NAMES; the (measures, heads) tensor kept."""
        known = {head: place for place, head in enumerate(self.heads)}
        for head in measured:
            if head not in known:
                known[head] = len(self.heads)
                self.heads.append(head)
        row = torch.full((len(NAMES), len(self.heads)), math.nan)
        for head, numbers in measured.items():
            row[:, known[head]] = torch.tensor(numbers)
        self.steps.append(step)
        self.values.append(row)
        return row

    def series(self, measure: str, last: int | None = None) -> Tensor:
        """(steps, heads) of one measure, of the `last` steps if given; NaN where there is no number."""
        if measure not in NAMES:
            raise InputError(f"history: no measure {measure!r}; there are {', '.join(NAMES)}")
        chosen = self.values if last is None else self.values[-last:]
        series = torch.full((len(chosen), len(self.heads)), math.nan)
        for place, row in enumerate(chosen):
            series[place, : row.shape[1]] = row[NAMES.index(measure)]
        return series

    def at(self, place: int) -> list[dict[str, Any]]:
        """One dict a head for the measurement at `place` of `steps`: step, layer, head and the measures."""
        row = self.values[place].tolist()
        return [
            {"step": self.steps[place], "layer": head.layer, "head": head.head}
            | {name: numbers[i] for name, numbers in zip(NAMES, row, strict=True)}
            for i, head in enumerate(self.heads[: len(row[0])])
        ]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict a step and head."""
        return [entry for place in range(len(self)) for entry in self.at(place)]

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with one row a step and head; pandas must be installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise InputError(
                "to_pandas needs pandas, which is not installed; pip install pandas, or use to_dicts"
            ) from error
        columns = ["step", "layer", "head", *NAMES]
        return pandas.DataFrame.from_records(self.to_dicts(), columns=columns)

    def logs(self, prefix: str = "attention", *, per_head: bool = False) -> dict[str, float]:
        """{"attention/layer.3/max_logit": 7.1, …} of the last measurement; empty before the first.

        Of the heads of a layer, the largest `max_logit`, the lowest `lowest_entropy_share`, and means of the others;
        with `per_head`, every head.  Measures without a number (the rank, most of the time) are left out.
        """
        if not self.steps:
            return {}
        logs: dict[str, float] = {}
        row = self.values[-1]
        layers: dict[str, list[int]] = {}
        for i, head in enumerate(self.heads[: row.shape[1]]):
            layers.setdefault(head.layer, []).append(i)
        names = dict(zip(layers, layer_names(list(layers)), strict=True))
        for layer, places in layers.items():
            for measure, numbers in zip(MEASURES, row[:, places], strict=True):
                of_layer = _reduced(numbers, measure)
                if of_layer is not None:
                    logs[f"{prefix}/{names[layer]}/{measure.name}"] = of_layer
                if per_head:
                    for i, value in zip(places, numbers.tolist(), strict=True):
                        if not math.isnan(value):
                            logs[f"{prefix}/{names[layer]}/head.{self.heads[i].head}/{measure.name}"] = value
        whole_model = _reduced(row[0], MEASURES[0])
        if whole_model is not None:
            logs[f"{prefix}/max_logit"] = whole_model
        logs[f"{prefix}/alarms"] = float(sum(alarm.step == self.steps[-1] for alarm in self.alarms))
        return logs

    def to_dict(self) -> dict[str, Any]:
        """The history as plain lists, numbers to five digits, null where there is none."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "heads": [{"layer": head.layer, "head": head.head} for head in self.heads],
            "steps": list(self.steps),
            "values": {name: [_rounded(row[i]) for row in self.values] for i, name in enumerate(NAMES)},
            "losses": [[step, loss if math.isfinite(loss) else None] for step, loss in self.losses],
            "alarms": [vars(alarm) for alarm in self.alarms],
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> History:
        """The inverse of `to_dict`."""
        heads = [Head(entry["layer"], entry["head"]) for entry in facts["heads"]]
        values = []
        for place in range(len(facts["steps"])):
            rows = [facts["values"][name][place] for name in NAMES]
            values.append(torch.tensor([[math.nan if x is None else x for x in row] for row in rows]))
        losses = [(int(step), math.nan if loss is None else loss) for step, loss in facts["losses"]]
        alarms = [Alarm(**alarm) for alarm in facts["alarms"]]
        return cls(facts["model"], heads, list(facts["steps"]), values, losses, alarms)

    def save(self, path: str | Path) -> Path:
        """Write the history as JSON; an earlier file there is replaced, as training goes on."""
        path = Path(path).expanduser()
        with atomic(path) as temporary, writing(path):
            temporary.write_text(json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":")), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a file that `save` wrote."""
        path = Path(path).expanduser()
        facts = read_json(path, _SCHEMA, "the file that Monitor.save wrote")
        count, steps = len(facts["heads"]), len(facts["steps"])
        for name in NAMES:
            rows = facts["values"][name]
            if len(rows) != steps or any(len(row) > count for row in rows):
                raise InputError(f"{path}: values/{name} must have {steps} lists of at most {count} numbers")
        if any(len(pair) != 2 or None in pair[:1] for pair in facts["losses"]):
            raise InputError(f"{path}: losses must be pairs of a step and a loss")
        if any(len({len(facts["values"][name][i]) for name in NAMES}) > 1 for i in range(steps)):
            raise InputError(f"{path}: every measure must have as many numbers at a step as the others")
        return cls.from_dict(facts)


def layer_names(layers: list[str]) -> list[str]:
    """Names without what all of them begin and end with, except the part before the first difference.

    >>> layer_names(["model.layers.0.self_attn", "model.layers.1.self_attn"])
    ['layers.0', 'layers.1']
    """
    if len(layers) < 2:
        return layers
    parts = [name.split(".") for name in layers]
    shortest = min(map(len, parts))
    first = next((i for i in range(shortest) if len({x[i] for x in parts}) > 1), shortest - 1)
    last = next((i for i in range(shortest - first) if len({x[-1 - i] for x in parts}) > 1), 0)
    return [".".join(x[max(0, first - 1) : len(x) - last]) for x in parts]


def _reduced(numbers: Tensor, measure: MonitoredMeasure) -> float | None:
    """One number for the heads of a layer; None if there is none."""
    numbers = numbers[~numbers.isnan()]
    return None if len(numbers) == 0 else getattr(numbers, f"a{measure.of_layer}", numbers.mean)().item()


def _rounded(numbers: Tensor) -> list[float | None]:
    return [float(f"{x:.5g}") if math.isfinite(x) else None for x in numbers.tolist()]


_NUMBERS = list_of(list_of(nullable(number())))
_SCHEMA = fields(
    {
        "schema": version(SCHEMA, "write it again with this version"),
        "model": string(),
        "heads": list_of(fields({"layer": string(), "head": whole(0)})),
        "steps": list_of(whole(0)),
        "values": fields(dict.fromkeys(NAMES, _NUMBERS), more=True),
        "losses": list_of(list_of(nullable(number()))),
        "alarms": list_of(
            fields({"step": whole(0), "kind": string(), "layer": string(), "head": whole(0), "message": string()})
        ),
    },
    more=True,
)
