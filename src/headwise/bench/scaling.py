"""Time, memory and counted operations of every operator over a geometric range of n, with fitted exponents."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from headwise import __version__
from headwise.bench.cases import CASES, RECURRENT
from headwise.errors import HeadwiseError, InputError, shown
from headwise.outputs import append_line, read_lines
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
    store: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
    *,
    rounds: int = 5,
    seconds: float = 60.0,
    together: bool = False,
    fresh: bool = False,
) -> Scaling:
    """Measure all jobs except those whose results are in `store`, a JSON-lines file, and add the new ones to it.

    A result in `store` counts if it was measured under the same `conditions`; with `fresh` none does.
    All lengths of an operator are timed in turns in one process, and the memory of each in a process of its own.  With
    `together`, everything is timed in turns in one process, which is quicker and does not measure the memory.
    """
    under = conditions(rounds, seconds, together)
    known = {} if store is None or fresh else _stored(store).get(_key(under), {})
    groups: dict[object, list[ScalingJob]] = {}
    for job in jobs:
        groups.setdefault(None if together else (job.name, job.rank is None), []).append(job)
    done = 0
    for group in groups.values():
        if any(job not in known for job in group):
            for job, result in zip(group, _times(group, rounds, seconds), strict=True):
                unknown = {"forward_mb": math.nan, "forward_backward_mb": math.nan}
                known[job] = result | (unknown if together else _memory(job))
                if store is not None:
                    append_line(store, _key({"job": asdict(job), "conditions": under}), known[job])
        for _ in group:
            progress(done := done + 1)
    return Scaling({job: known[job] for job in jobs})


def load_scaling(store: Path) -> Scaling:
    """The measurements that earlier runs left in a JSON-lines file, under the conditions of the last of them."""
    stored = _stored(store)
    return Scaling(stored[list(stored)[-1]] if stored else {})


def conditions(rounds: int, seconds: float, together: bool) -> dict[str, Any]:
    """What a measurement depends on besides its job: times under other conditions are not compared."""
    return {
        "rounds": rounds,
        "seconds": seconds,
        "together": together,
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "headwise": __version__,
        "torch": torch.__version__,
        "machine": _processor(),
    }


def _processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _key(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)


_STORED_KEY = fields(
    {
        "job": fields(
            {"name": string(), "n": whole(1), "rank": nullable(whole(1)), "heads": whole(1), "width": whole(1)}
        ),
        "conditions": map_of(anything),
    }
)


def _stored(store: Path) -> dict[str, dict[ScalingJob, dict[str, float]]]:
    """Results by conditions and job; conditions in the order in which they were last measured."""
    results: dict[str, dict[ScalingJob, dict[str, float]]] = {}
    lines = read_lines(store)
    if not lines and store.exists() and store.stat().st_size:
        raise InputError(f"{shown(store)} is not a file of measurements by `headwise bench`; move it away")
    for key, result in lines.items():
        facts = parse_json(key, _STORED_KEY, shown(store))
        validate(result, map_of(anything), shown(store))
        under = _key(facts["conditions"])
        results[under] = {**results.pop(under, {}), ScalingJob(**facts["job"]): result}
    return results


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
