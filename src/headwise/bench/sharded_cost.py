"""What attention over one sequence takes on P ranks: a model from measured compute, and its check on this machine.

    seconds(P, N) = fixed + rate W(N) / P + 3 bytes(P, N) / bandwidth + 3 messages(P) latency

W are the multiply-adds of a forward pass; fixed and rate are fitted to forward and backward of one process at the
lengths of slices.  Bytes are those of the formulas of `traffic`; backward sends them again, a ring twice.  Nothing is
computed while a message travels.  A rank is a core like one of this machine, `cores` of them in a machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from headwise.bench.sharded_cases import ShardedCase

BANDWIDTH, LATENCY = 25e9, 20e-6
"""Of a stated cluster: bytes a second into one rank (a link of 200 Gbit/s), and seconds for one message."""


@final
@dataclass(frozen=True)
class Link:
    """bandwidth: bytes a second into one rank; latency: seconds for one message."""

    bandwidth: float = BANDWIDTH
    latency: float = LATENCY


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

    def seconds(self, case: ShardedCase, n: int, ranks: int, link: Link, cores: int | None = None) -> float:
        """Of a step; with fewer `cores` than ranks these take turns."""
        turns = 1.0 if cores is None else max(1.0, ranks / cores)
        return turns * (self.fixed + self.rate * case.work(n) / ranks) + communication(case, n, ranks, link)


def communication(case: ShardedCase, n: int, ranks: int, link: Link) -> float:
    """Seconds of a step in which messages travel."""
    if ranks == 1:
        return 0.0
    return 3 * case.received(n, ranks) / link.bandwidth + 3 * case.messages(ranks) * link.latency


@final
@dataclass(frozen=True)
class ShardedTime:
    """One case on one number of processes of this machine: measured, and what the model says."""

    name: str
    n: int
    ranks: int
    seconds: float
    spread: float
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
    return {
        name: ComputeCost.fitted([cases[name].work(n) for n, _ in x["alone"]], [t for _, t in x["alone"]])
        for name, x in alone.items()
        if name != "link"
    }


def compared(
    cases: Mapping[str, ShardedCase], costs: Mapping[str, ComputeCost], runs: Mapping[int, Mapping[str, Any]]
) -> list[ShardedTime]:
    """Measured beside predicted, by case and number of processes; only runs of several are predictions."""
    return [
        ShardedTime(
            name,
            found[name]["n"],
            ranks,
            found[name]["seconds"],
            found[name]["spread"],
            cost.seconds(cases[name], found[name]["n"], ranks, Link(**found["link"]), cores()),
        )
        for name, cost in costs.items()
        for ranks, found in runs.items()
    ]


def projected_times(
    cases: Mapping[str, ShardedCase],
    costs: Mapping[str, ComputeCost],
    lengths: Sequence[int],
    ranks: Sequence[int],
    link: Link,
) -> list[ProjectedTime]:
    """Every case at every length on every number of ranks."""
    found = []
    for name, cost in costs.items():
        case = cases[name]
        for n in lengths:
            for size in ranks:
                fits = size <= n and (case.most_ranks is None or size <= case.most_ranks)
                seconds = cost.seconds(case, n, size, link) if fits else float("nan")
                travelling = communication(case, n, size, link) if fits else float("nan")
                found.append(ProjectedTime(name, n, size, seconds, travelling))
    return found


def as_rows(values: Sequence[ShardedTime | ProjectedTime]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(x), "ratio": x.ratio} if isinstance(x, ShardedTime) else asdict(x) for x in values]
