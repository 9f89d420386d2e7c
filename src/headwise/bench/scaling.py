"""The complexity table as a measurement: every operator over a geometric range of n, fitted exponents beside claims."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from headwise.bench.cases import ENTRIES, RECURRENT
from headwise.bench.clock import without_nan
from headwise.errors import HeadwiseError, InputError
from headwise.theory.complexity import Exponent, exponent

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK = (256, 512, 1024)
RANKS = (64, 128, 256, 512)
FITTED = ("forward", "both", "multiply_adds")
PROJECTIONS = ("factored pooling", "factored CountSketch", "factored dense")


@dataclass(frozen=True)
class Job:
    name: str
    n: int
    rank: int | None = None
    heads: int = 8
    width: int = 64


@dataclass(frozen=True)
class Scaling:
    """Everything measured, by job; a table and figures are made from this."""

    results: dict[Job, dict[str, float]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(dict.fromkeys(job.name for job in self.results if job.rank is None))

    def curve(self, name: str, what: str) -> tuple[list[int], list[float]]:
        rows = sorted((job.n, x[what]) for job, x in self.results.items() if job.name == name and job.rank is None)
        return [n for n, _ in rows], [x for _, x in rows]

    def exponent(self, name: str, what: str) -> Exponent:
        """Over the four longest lengths: below them constant costs hide the law."""
        n, seconds = self.curve(name, what)
        return exponent(n[-4:], seconds[-4:])

    def by_rank(self, name: str, what: str) -> list[tuple[int, float]]:
        return sorted((job.rank, x[what]) for job, x in self.results.items() if job.name == name and job.rank)

    def to_dict(self) -> dict[str, object]:
        rows = [without_nan({**asdict(job), **x}) for job, x in self.results.items()]
        fits = {
            name: {
                what: without_nan(asdict(self.exponent(name, what))) for what in ("forward", "both", "multiply_adds")
            }
            for name in self.names()
        }
        return {"schema": 1, "rows": rows, "exponents": fits, "claims": {n: claim(n)[0] for n in self.names()}}


def claim(name: str) -> tuple[str, float]:
    """What the source says, as text and as an exponent of n."""
    return ("O(n), n steps", 1.0) if name == RECURRENT else (ENTRIES[name].claim, ENTRIES[name].exponent)


def jobs(names: Sequence[str] | None, lengths: Sequence[int], *, ranks: bool) -> list[Job]:
    """Every operator at every length that it can do in minutes; projections over their number of slots."""
    names = [RECURRENT, *ENTRIES] if names is None else list(names)
    if unknown := [name for name in names if name not in ENTRIES and name != RECURRENT]:
        raise InputError(f"bench: no operator {unknown[0]!r}; there are {', '.join([RECURRENT, *ENTRIES])}")
    longest = {name: 16384 if name == RECURRENT else ENTRIES[name].longest for name in names}
    todo = [Job(name, n) for name in names for n in sorted(lengths) if n <= longest[name]]
    if ranks:
        n = max(n for n in lengths if n <= 16384)
        todo += [Job(name, n, r) for name in PROJECTIONS for r in RANKS if r <= n]
    return todo


def run(
    todo: Sequence[Job],
    store: Path | None = None,
    *,
    rounds: int = 5,
    seconds: float = 60.0,
    together: bool = False,
) -> Iterator[tuple[Job, dict[str, float]]]:
    """Measurements as they come; those already in `store` are not made again.

    All lengths of an operator are timed in turns in one process, and have their memory measured in one each.  Or,
    `together`, everything is timed in turns in one process, which is quicker and does not know the memory.
    """
    known = load(store)
    if store is not None and store.exists() and not store.read_text().endswith("\n"):
        store.write_text(store.read_text() + "\n")  # an interrupted run left half a line
    groups: dict[object, list[Job]] = {}
    for job in todo:
        groups.setdefault(None if together else (job.name, job.rank is None), []).append(job)
    for group in groups.values():
        if any(job not in known for job in group):
            made = _times(group, rounds, seconds)
            for job, found in zip(group, made, strict=True):
                found.update({"forward_mb": math.nan, "both_mb": math.nan} if together else _memory(job))
            if store is not None:
                lines = [json.dumps({"job": asdict(job), "result": x}) for job, x in zip(group, made, strict=True)]
                with store.open("a") as file:
                    file.write("\n".join(lines) + "\n")
            known.update(zip(group, made, strict=True))
        yield from ((job, known[job]) for job in group)


def load(store: Path | None) -> dict[Job, dict[str, float]]:
    """What an earlier run left; a last line cut off by an interruption is left out."""
    if store is None or not store.exists():
        return {}
    known = {}
    for line in store.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if set(row["job"]) == {field.name for field in fields(Job)}:  # older versions measured otherwise
            known[Job(**row["job"])] = row["result"]
    return known


def collect(
    todo: Sequence[Job],
    store: Path | None = None,
    done: Callable[[int], None] | None = None,
    *,
    rounds: int = 5,
    seconds: float = 60.0,
    together: bool = False,
) -> Scaling:
    results = {}
    found = run(todo, store, rounds=rounds, seconds=seconds, together=together)
    for count, (job, result) in enumerate(found, start=1):
        results[job] = result
        if done is not None:
            done(count)
    return Scaling(results)


def _times(group: Sequence[Job], rounds: int, seconds: float) -> list[dict[str, float]]:
    given = {"jobs": [asdict(job) for job in group], "rounds": rounds, "seconds": seconds}
    return _in_a_process("times", given, f"{group[0].name} at n = {', '.join(str(job.n) for job in group)}")


def _memory(job: Job) -> dict[str, float]:
    return _in_a_process("memory", asdict(job), f"{job.name} at n = {job.n}")[0]


def _in_a_process(what: str, given: dict, who: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "headwise.bench.worker", what, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = done.stderr.strip().splitlines()
        last = complaint[-1] if complaint else "killed, probably for want of memory"
        raise HeadwiseError(f"bench: {who} failed: {last}")
    return [json.loads(line) for line in done.stdout.splitlines()]
