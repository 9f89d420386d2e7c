"""What attention over one sequence takes on P ranks: a model from measured compute, and its check on this machine.

    seconds(P, N) = fixed + rate W(N) / P + sum over collectives (calls latency + bytes / bandwidth) + bytes / copy

W are the multiply-adds of a forward pass; rate is fitted to forward and backward of one process at the lengths of
slices, with a `fixed` of its own.  That of several processes is what a step of 256 tokens takes beyond its work
and its collectives: they do more besides than one, which calls the builder itself.  Calls and bytes of a step are
counted, on 2 and 4 processes; calls grow linearly with P, bytes as the formulas of `traffic`.  Nothing is computed
while a message travels.

Measured seconds are processor time, which does not depend on how many ranks share a core.  A collective of a cluster
takes its stated latency once (all_to_all), log2 P (all_gather) or 2 log2 P times (all_reduce).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from headwise.bench.sharded_cases import ShardedCase


@final
@dataclass(frozen=True)
class Link:
    """By kind of collective, seconds of one and bytes a second into one rank; bytes a second of packing rows."""

    latency: Mapping[str, float]
    bandwidth: Mapping[str, float]
    copy: float

    @classmethod
    def stated(cls, bandwidth: float, latency: float, copy: float, ranks: int) -> Link:
        """Of a cluster: bytes a second into one rank, and seconds for one message."""
        doubling = math.ceil(math.log2(ranks))
        messages = {"all_to_all": 1, "all_gather": doubling, "all_reduce": 2 * doubling}
        return cls(
            {kind: count * latency for kind, count in messages.items()}, dict.fromkeys(messages, bandwidth), copy
        )

    def seconds(self, calls: Mapping[str, float], received: Mapping[str, float]) -> float:
        """Of so many calls, by which a rank receives so many bytes."""
        travelling = sum(count * self.latency[kind] for kind, count in calls.items())
        return travelling + sum(x / self.bandwidth[kind] + x / self.copy for kind, x in received.items())


@final
@dataclass(frozen=True)
class ComputeCost:
    """Seconds of forward and backward of one process: `fixed` and `rate` for each multiply-add of the forward pass."""

    fixed: float
    rate: float

    @classmethod
    def fitted(cls, work: Sequence[float], seconds: Sequence[float]) -> ComputeCost:
        """Least squares of the relative errors; neither number is negative."""
        # minimise sum (fixed x + rate y - 1)^2 with x = 1 / t, y = W / t
        x, y = [1 / t for t in seconds], [w / t for w, t in zip(work, seconds, strict=True)]
        xx, yy, xy = (sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((x, x), (y, y), (x, y)))
        determinant = xx * yy - xy * xy
        if determinant > 1e-12 * xx * yy:
            fixed, rate = (sum(x) * yy - sum(y) * xy) / determinant, (sum(y) * xx - sum(x) * xy) / determinant
            if fixed >= 0 and rate >= 0:
                return cls(fixed, rate)
            if rate < 0:
                return cls(sum(x) / xx, 0.0)
        return cls(0.0, sum(y) / yy)

    def on_several(self, case: ShardedCase, short: Mapping[str, Any], ranks: int, link: Link) -> ComputeCost:
        """With the `fixed` of several processes, from a step of theirs on a short sequence."""
        known = self.rate * case.work(short["n"]) / ranks + link.seconds(short["calls"], short["bytes"])
        return ComputeCost(max(0.0, short["busy"] - known), self.rate)

    def seconds(self, case: ShardedCase, n: int, ranks: int) -> float:
        """Of a step, but for its collectives."""
        return self.fixed + self.rate * case.work(n) / ranks


@final
@dataclass(frozen=True)
class ShardedTime:
    """One case on one number of processes of this machine: processor time of the busiest, and what the model says."""

    name: str
    n: int
    ranks: int
    seconds: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.seconds


@final
@dataclass(frozen=True)
class ProjectedTime:
    """What the model says of a cluster; nan where a case has too few heads for so many ranks."""

    name: str
    n: int
    ranks: int
    seconds: float
    communication: float


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fitted_costs(cases: Mapping[str, ShardedCase], alone: Mapping[str, Any]) -> dict[str, ComputeCost]:
    """From what `run_sharded` says of one process."""
    link, found = Link(**alone["link"]), {}
    for name in (name for name in alone if name != "link"):
        lengths, seconds = zip(*alone[name]["alone"], strict=True)
        own = [t - min(t / 2, link.seconds(alone[name]["calls"], {})) for t in seconds]
        found[name] = ComputeCost.fitted([cases[name].work(n) for n in lengths], own)
    return found


def compared(
    cases: Mapping[str, ShardedCase], costs: Mapping[str, ComputeCost], runs: Mapping[int, Mapping[str, Any]]
) -> list[ShardedTime]:
    """Measured beside predicted, by case and number of processes; only runs of several are predictions."""
    rows = []
    for name, cost in costs.items():
        for ranks, found in runs.items():
            x, link = found[name], Link(**found["link"])
            own = cost if ranks == 1 else cost.on_several(cases[name], x["short"], ranks, link)
            predicted = own.seconds(cases[name], x["n"], ranks) + link.seconds(x["calls"], x["bytes"])
            rows.append(ShardedTime(name, x["n"], ranks, x["busy"], predicted))
    return rows


def projected_times(
    cases: Mapping[str, ShardedCase],
    costs: Mapping[str, ComputeCost],
    runs: Mapping[int, Mapping[str, Any]],
    lengths: Sequence[int],
    ranks: Sequence[int],
    bandwidth: float,
    latency: float,
) -> list[ProjectedTime]:
    """Every case at every length on every number of ranks: `fixed` of 2 processes, calls and bytes of 2 and 4."""
    found = []
    for name, alone in costs.items():
        case, two, four = cases[name], runs[2][name], runs[4][name]
        cost = alone.on_several(case, two["short"], 2, Link(**runs[2]["link"]))
        for n in lengths:
            for size in ranks:
                seconds = travelling = float("nan")
                if size <= n and (case.most_ranks is None or size <= case.most_ranks):
                    calls = {x: b + (b - two["calls"][x]) * (size - 4) / 2 for x, b in four["calls"].items()}
                    growth = case.received(n, size) / max(1.0, four["received"])
                    received = {x: growth * b for x, b in four["bytes"].items()}
                    link = Link.stated(bandwidth, latency, runs[1]["link"]["copy"], size)
                    travelling = link.seconds(calls, received)
                    seconds = cost.seconds(case, n, size) + travelling
                found.append(ProjectedTime(name, n, size, seconds, travelling))
    return found


def as_rows(values: Sequence[ShardedTime | ProjectedTime]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(x), "ratio": x.ratio} if isinstance(x, ShardedTime) else asdict(x) for x in values]
