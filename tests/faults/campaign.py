"""Run all faults, collect what broke, and print one table of tried and survived.

    python -m tests.faults [--kills 320] [--disk 6] [--damage 20] [--only kills disk damage hostile] [--seed 0] [--json]

Every trial is drawn from the seed and is named in the report with what is needed to repeat it: `--repeat N` runs only
the trial of that number.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.checks import CATEGORIES, Trial, count_problems
from tests.faults.damage import damage_once, draw_damage, make_targets
from tests.faults.disk import can_mount, disk_once, draw_disk_faults, result_size
from tests.faults.kills import Kill, Reference, draw_kills, earlier, kill_once, uninterrupted
from tests.faults.server import ROOT, Server
from tests.faults.subjects import SUBJECTS, Subject, write_compiler, write_models, write_results

Job = Callable[[Server, Path], Trial]
ATTEMPTS = 6
"""Moments that are tried until a kill finds its run still going."""
PARTS = ("kills", "disk", "damage", "hostile")


class Campaign:
    """Servers, models and uninterrupted runs: what every trial needs."""

    def __init__(self, directory: Path, subjects: Sequence[Subject], *, jobs: int, say: Callable[[str], None]) -> None:
        self.directory, self.subjects, self.say = directory, subjects, say
        self.session = directory / "session"
        self.session.mkdir(parents=True)
        self._idle: queue.Queue[Server] = queue.Queue()
        self._pool = ThreadPoolExecutor(jobs)
        self.servers = list(self._pool.map(lambda _: Server(), range(jobs)))
        for server in self.servers:
            self._idle.put(server)
        say("writing the models")
        write_models(self.session)
        write_results(self.session, self.servers[0])
        if any(subject.name == "kernels build" for subject in subjects):
            say("compiling the kernels")
            write_compiler(self.session, self.servers[0])
        say("running every command without a fault")
        found = self._all([partial(self._reference, subject) for subject in subjects])
        self.references: dict[str, Reference] = dict(zip((x.name for x in subjects), found, strict=True))
        self.sizes = {x.name: result_size(self.session / "whole" / x.name) for x in subjects}

    def _reference(self, subject: Subject, server: Server) -> Reference:
        reference = uninterrupted(server, self.session / "whole" / subject.name, self.session, subject)
        if subject.other:
            another = self.session / "earlier" / subject.name
            ended = server.run(subject.command(self.session, *subject.other), another, **subject.request(self.session))
            assert ended.code == 0, ended.err
        return reference

    def kills(self, count: int, rng: random.Random) -> list[Job]:
        drawn = list(draw_kills(self.subjects, self.references, count, rng))
        some = [x for x in self.subjects if x.name in ("examine a factory", "rewrite", "grow")]
        drawn += [
            Kill(x, name, f"{rng.uniform(0.02, 1):.3f}", cold=True) for x in some for name in ("int", "term", "kill")
        ]
        return [partial(self._kill, kill) for kill in drawn]

    def _kill(self, kill: Kill, server: Server, directory: Path) -> Trial:
        """The kill; if the run ended before it, the same kind of kill at an earlier moment, until one is reached.

        Every attempt is checked, and what broke in any of them is kept.
        """
        reference, problems = self.references[kill.subject.name], []
        for attempt in range(ATTEMPTS):
            chosen = kill if attempt == 0 else earlier(kill, reference, attempt)
            place = directory.with_name(f"{directory.name}-{attempt}")
            trial = kill_once(server, place, self.session, chosen, reference)
            problems += trial.problems
            if trial.reached:
                break
        trial.problems = problems
        return trial

    def disk(self, each: int, rng: random.Random) -> list[Job]:
        why = can_mount()
        if why:
            self.say(f"no full disk: {why}; limits on file sizes and failing calls stand in for it")
        faults = draw_disk_faults(self.subjects, self.references, self.sizes, each, rng, mount=why is None)
        return [partial(self._disk, fault) for fault in faults]

    def _disk(self, fault: Any, server: Server, directory: Path) -> Trial:
        return disk_once(server, directory, self.session, fault, self.references[fault.subject.name])

    def damage(self, each: int, rng: random.Random) -> list[Job]:
        self.say("preparing the files to be damaged")
        targets = make_targets(self.servers[0], self.session, SUBJECTS, self.references)
        expected = {target.name: numbers for target, numbers in targets}
        drawn = draw_damage([target for target, _ in targets], each, rng)
        return [partial(self._damage, damage, expected[damage.target.name]) for damage in drawn]

    def _damage(self, damage: Any, expected: Any, server: Server, directory: Path) -> Trial:
        return damage_once(server, directory, self.session, damage, expected)

    def run(self, jobs: Sequence[Job], only: int | None = None, *, keep: bool = False) -> list[Trial]:
        """The trials of all jobs; directories of failed ones are kept if `keep`."""
        started, lock, done = time.monotonic(), threading.Lock(), [0, 0]

        def one(number: int, job: Job, server: Server) -> Trial:
            directory, began = self.directory / f"trial-{number}", time.monotonic()
            trial = job(server, directory)
            trial.detail = f"#{number} {trial.detail}"
            trial.seconds = time.monotonic() - began
            for path in self.directory.glob(f"trial-{number}*"):
                if not (keep and trial.problems) and path.name.partition("-")[2].partition("-")[0] == str(number):
                    shutil.rmtree(path, ignore_errors=True)
            with lock:
                done[0] += 1
                done[1] += bool(trial.problems)
                if done[0] % 20 == 0 or trial.problems:
                    spent = time.monotonic() - started
                    first = (
                        f": {trial.command}, {trial.fault}, {trial.detail}: {trial.problems[0]}"
                        if trial.problems
                        else ""
                    )
                    self.say(f"{done[0]} of {len(chosen)} trials, {done[1]} broken, {spent:.0f} s{first}")
            return trial

        chosen = [(i, job) for i, job in enumerate(jobs) if only is None or i == only]
        return self._all([partial(one, number, job) for number, job in chosen])

    def _all(self, tasks: Sequence[Callable[[Server], Any]]) -> list[Any]:
        """The results of tasks, each of which uses one server at a time."""

        def with_server(task: Callable[[Server], Any]) -> Any:
            server = self._idle.get()
            try:
                return task(server)
            finally:
                self._idle.put(server)

        return list(self._pool.map(with_server, tasks))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for server in self.servers:
            server.close()


def hostile(say: Callable[[str], None], jobs: int) -> dict[str, Any]:
    """Run tests/hostile with many examples: the number of inputs of each test, and the tests that failed."""
    if not list((ROOT / "tests" / "hostile").glob("test_*.py")):
        return {"inputs": {}, "failed": []}
    say("generating hostile inputs")
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as counts:
        environment = {
            **os.environ,
            "HEADWISE_EXAMPLES": "large",
            "HEADWISE_COUNTS": counts.name,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "-p", "no:cacheprovider", "tests/hostile"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        inputs: dict[str, int] = defaultdict(int)
        for line in counts.read().splitlines():
            row = json.loads(line)
            inputs[row["test"]] += row["inputs"]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1):
        failed.append(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return {"inputs": dict(inputs), "failed": failed}


COLUMNS = {
    "SIGKILL": "SIGKILL",
    "SIGTERM": "SIGTERM",
    "SIGINT": "SIGINT",
    "full disk": "full disk",
    "file size limit": "full disk",
    "no space left": "failing\nwrite",
    "input/output error": "failing\nwrite",
    "permission denied": "failing\nwrite",
    "read-only directory": "obstacle",
    "a file in the way": "obstacle",
    "a dangling link": "obstacle",
    "a directory in the way": "obstacle",
    "directory removed": "directory\nremoved",
    "file descriptors": "few\ndescriptors",
    "memory": "little\nmemory",
}


def print_report(trials: Sequence[Trial], generated: dict[str, Any], seconds: float) -> None:
    """Tried and survived by fault and command, then what was promised and how often it broke."""
    from headwise.cli.tables import print_table

    os.environ.setdefault("COLUMNS", "120")
    reached = [trial for trial in trials if trial.reached or trial.problems]
    cells: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in reached:
        damaged = trial.fault.startswith("damage")
        cells["damaged" if damaged else trial.command, trial.command if damaged else COLUMNS[trial.fault]].append(trial)

    def tally(some: Sequence[Trial]) -> str:
        return f"{sum(not x.problems for x in some)}/{len(some)}" if some else ""

    commands = list(dict.fromkeys(trial.command for trial in reached if not trial.fault.startswith("damage")))
    columns = [x for x in dict.fromkeys(COLUMNS.values()) if any((c, x) in cells for c in commands)]
    if commands:
        rows = [[name, *(tally(cells[name, column]) for column in columns)] for name in commands]
        total = [tally([t for name in commands for t in cells[name, column]]) for column in columns]
        print_table("Faults: survived / tried", ["command", *columns], [*rows, ["all", *total]], bold=-1)
    damaged = {key: some for (kind, key), some in cells.items() if kind == "damaged"}
    if damaged:
        rows = [[name, tally(some)] for name, some in damaged.items()]
        print_table(
            "Damaged files: survived / tried",
            ["file", ""],
            [*rows, ["all", tally([x for some in damaged.values() for x in some])]],
            bold=-1,
        )
    if generated["inputs"]:
        rows = [[name, f"{count:,}"] for name, count in sorted(generated["inputs"].items())]
        rows.append(["all", f"{sum(generated['inputs'].values()):,}"])
        print_table("Generated hostile inputs", ["test", "inputs"], rows, bold=-1)
        print(f"{len(generated['failed'])} hostile tests failed", *generated["failed"], sep="\n  ")
    problems = count_problems(list(trials))
    kills = sum(trial.fault.startswith("SIG") for trial in reached)
    print(f"{len(reached)} faults, {kills} of them kills, in {seconds / 60:.1f} minutes")
    print(*(f"  {problems[category]} {meaning}" for category, meaning in CATEGORIES.items()), sep="\n")
    for trial in trials:
        for category, sentence in trial.problems:
            print(f"BROKEN {trial.command}: {trial.fault} {trial.detail}: {category}: {sentence}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Try to break runs of the command.")
    parser.add_argument(
        "--kills",
        type=int,
        default=320,
        metavar="N",
        help="interruptions of running commands (default: %(default)s)",
    )
    parser.add_argument("--disk", type=int, default=6, metavar="N", help="failing writes of each command (default: 6)")
    parser.add_argument("--damage", type=int, default=26, metavar="N", help="damaged copies of each file (default: 26)")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--commands", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="some commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, metavar="#", help="run one trial, by the number in the report")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and keep what broken trials left")
    parser.add_argument("--json", action="store_true", help="print every trial as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(argv)
    began = time.monotonic()

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    trials: list[Trial] = []
    generated: dict[str, Any] = {"inputs": {}, "failed": []}
    with tempfile.TemporaryDirectory(prefix="headwise-faults-") as temporary:
        directory = Path(temporary) if options.keep is None else options.keep
        # `damage` reads what four of the commands write
        names = {
            *options.commands,
            *(("examine", "plan", "rewrite", "bench scaling", "convert") if "damage" in options.only else ()),
        }
        if set(options.only) - {"hostile"}:
            campaign = Campaign(directory, [SUBJECTS[x] for x in SUBJECTS if x in names], jobs=options.jobs, say=say)
            campaign.subjects = [SUBJECTS[x] for x in SUBJECTS if x in options.commands]
            try:
                for part, count in (("kills", options.kills), ("disk", options.disk), ("damage", options.damage)):
                    if part in options.only:
                        jobs = getattr(campaign, part)(count, random.Random(f"{options.seed} {part}"))
                        say(f"{part}: {len(jobs)} trials")
                        trials += campaign.run(jobs, options.repeat, keep=options.keep is not None)
            finally:
                campaign.close()
    if "hostile" in options.only:
        generated = hostile(say, options.jobs)
    if options.json:
        print(json.dumps({"trials": [asdict(trial) for trial in trials], "hostile": generated}))
    else:
        print_report(trials, generated, time.monotonic() - began)
    reached = sum(trial.fault.startswith("SIG") and trial.reached for trial in trials)
    if "kills" in options.only and options.repeat is None and reached < options.kills * 15 // 16:
        say(f"only {reached} of {options.kills} kills found their run still going: run it again on a less busy machine")
        return 1
    return 1 if any(trial.problems for trial in trials) or generated["failed"] else 0
