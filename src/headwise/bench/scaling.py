"""Time, memory and counted operations of every operator over a geometric range of n, with fitted exponents."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from headwise.bench.cases import CASES, RECURRENT
from headwise.bench.kept import Kept, conditions, stored
from headwise.errors import HeadwiseError, InputError, shown
from headwise.progress import Progress, reported
from headwise.reading import anything, fields, map_of, nullable, parse_json, string, validate, whole
from headwise.theory.complexity import Exponent, exponent

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK = (256, 512, 1024)
RANKS = (64, 128, 256, 512)
FITTED = ("forward", "forward_backward", "multiply_adds")
PROJECTIONS = ("factored pooling", "factored CountSketch", "factored dense")


@final
@dataclass(frozen=True)
class ScalingJob:
    """One operator at one length; `rank` slots instead of the default for a projection."""

    name: str
    n: int
    rank: int | None = None
    heads: int = 8
    width: int = 64


@final
@dataclass(frozen=True)
class Scaling:
    """All measurements, by job: seconds, megabytes, multiply-adds and depth."""

    results: dict[ScalingJob, dict[str, float]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(dict.fromkeys(job.name for job in self.results if job.rank is None))

    def curve(self, name: str, what: str) -> tuple[list[int], list[float]]:
        rows = sorted((job.n, x[what]) for job, x in self.results.items() if job.name == name and job.rank is None)
        return [n for n, _ in rows], [x for _, x in rows]

    def exponent(self, name: str, what: str) -> Exponent:
        """Fitted over the four longest lengths: below them constant costs dominate."""
        n, values = self.curve(name, what)
        return exponent(n[-4:], values[-4:])

    def by_rank(self, name: str, what: str) -> list[tuple[int, float]]:
        return sorted((job.rank, x[what]) for job, x in self.results.items() if job.name == name and job.rank)

    def to_dict(self) -> dict[str, object]:
        fits = {name: {what: asdict(self.exponent(name, what)) for what in FITTED} for name in self.names()}
        rows = [{**asdict(job), **x} for job, x in self.results.items()]
        return {"schema": 2, "rows": rows, "exponents": fits, "claims": {n: claim(n) for n in self.names()}}


def claim(name: str) -> str:
    """The complexity that the paper of an operator claims."""
    return "O(n), n steps" if name == RECURRENT else CASES[name].claim


def scaling_jobs(names: Sequence[str] | None, lengths: Sequence[int], *, ranks: bool) -> list[ScalingJob]:
    """Every operator at every length that takes minutes; with `ranks`, projections over their number of slots."""
    names = [RECURRENT, *CASES] if names is None else list(names)
    for name in names:
        if name not in CASES and name != RECURRENT:
            raise InputError(f"bench: there is no operator {name!r}; there are {', '.join([RECURRENT, *CASES])}")
    longest = {name: 16384 if name == RECURRENT else CASES[name].longest for name in names}
    jobs = [ScalingJob(name, n) for name in names for n in sorted(lengths) if n <= longest[name]]
    if ranks:
        n = max(n for n in lengths if n <= 16384)
        jobs += [ScalingJob(name, n, r) for name in PROJECTIONS for r in RANKS if r <= n]
    return jobs


def measure_scaling(
    jobs: Sequence[ScalingJob],
    store: Path | Kept | None = None,
    progress: Progress | bool | None = None,
    *,
    rounds: int = 5,
    seconds: float = 60.0,
    together: bool = False,
    fresh: bool = False,
) -> Scaling:
    """Measure all jobs except those whose results are in `store`, and add the new ones to it.

    A result in `store` counts if it was measured under the same `conditions`; with `fresh` none does.
    All lengths of an operator are timed in turns in one process, and the memory of each in a process of its own.  With
    `together`, everything is timed in turns in one process, which is quicker and does not measure the memory.
    """
    under = conditions(rounds=rounds, seconds=seconds, together=together)
    kept = store if isinstance(store, Kept) else Kept(store, under, fresh=fresh)
    groups: dict[object, list[ScalingJob]] = {}
    for job in jobs:
        groups.setdefault(None if together else (job.name, job.rank is None), []).append(job)
    done = 0
    with reported(progress) as report:
        for group in groups.values():
            if any(kept.get(asdict(job)) is None for job in group):
                for job, result in zip(group, _times(group, rounds, seconds), strict=True):
                    unknown = {"forward_mb": math.nan, "forward_backward_mb": math.nan}
                    kept.add(asdict(job), result | (unknown if together else _memory(job)))
            done += len(group)
            report("measuring", done, len(jobs))
    return measured_scaling(jobs, kept)


def measured_scaling(jobs: Sequence[ScalingJob], kept: Kept) -> Scaling:
    """The jobs that have been measured so far."""
    results = {job: kept.get(asdict(job)) for job in jobs}
    return Scaling({job: _result(x, kept.file) for job, x in results.items() if x is not None})


def load_scaling(store: Path) -> Scaling:
    """The measurements that earlier runs left in a JSON-lines file, under the conditions of the last of them."""
    by_conditions = stored(store)
    last = by_conditions[list(by_conditions)[-1]] if by_conditions else {}
    return Scaling({ScalingJob(**parse_json(job, _JOB, shown(store))): _result(x, store) for job, x in last.items()})


_JOB = fields({"name": string(), "n": whole(1), "rank": nullable(whole(1)), "heads": whole(1), "width": whole(1)})


def _result(value: Any, store: Path | None) -> dict[str, float]:
    """A result as a file gives it, checked."""
    validate(value, map_of(anything), shown(store or "measurements"))
    return value


def _times(group: Sequence[ScalingJob], rounds: int, seconds: float) -> list[dict[str, float]]:
    arguments = {"jobs": [asdict(job) for job in group], "rounds": rounds, "seconds": seconds}
    return _in_a_process("times", arguments, f"{group[0].name} at n = {', '.join(str(job.n) for job in group)}")


def _memory(job: ScalingJob) -> dict[str, float]:
    return _in_a_process("memory", asdict(job), f"{job.name} at n = {job.n}")[0]


def _in_a_process(what: str, arguments: dict[str, Any], who: str) -> list[dict[str, float]]:
    # -P: modules in the current directory must not take the place of the standard library's
    command = [sys.executable, "-P", "-m", "headwise.bench.worker", what, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise HeadwiseError(f"bench: {who} failed: {lines[-1] if lines else 'killed, probably out of memory'}")
    return [json.loads(line) for line in done.stdout.splitlines()]
