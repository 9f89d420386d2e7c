"""What safety costs: hashing, locking and writing as shares of the time of one examination.

    make bench BENCH=promises            # MiniLM, 16 texts of 512 tokens, 3 rounds: about three minutes on two cores
    make bench BENCH="promises --quick"  # 2 texts of 128 tokens, 1 round: seconds

In every round one run of `examine` writes a report into a new directory, and the time spent in each part is taken from
inside that run, so that what else the machine does slows all of them.  Printed are the median over rounds and
half the distance between the quartiles.  The promise is that hashing and locking stay below 3 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import headwise.examination.examiner as examiner
from headwise.cli.tables import print_table
from headwise.examination import write_report
from headwise.locks import DirectoryLock
from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.output_directory import OutputDirectory

PARTS: dict[str, list[tuple[Any, str]]] = {
    "hashing weights and batches": [(examiner, "weights_hash"), (examiner, "batch_hash"), (examiner, "run_key")],
    "lock and marker": [
        (DirectoryLock, "acquire"),
        (DirectoryLock, "release"),
        (OutputDirectory, "_recover"),
        (OutputDirectory, "_check_names"),
        (OutputDirectory, "_write_marker"),
    ],
    "partial results": [(examiner, "save_measurements")],
    "flushing and renaming the report": [(OutputDirectory, "publish")],
}
PROMISED = ("hashing weights and batches", "lock and marker")


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Add the time that each part takes to `seconds`."""

    def around(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                seconds[part] += time.perf_counter() - start

        return inner

    with ExitStack() as patches:
        for part, functions in PARTS.items():
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, around(part, getattr(owner, name))))
        yield


def one_round(model: Any, batches: Sequence[Any]) -> dict[str, float]:
    """Seconds of every part of one examination, and of all of it."""
    seconds = dict.fromkeys(PARTS, 0.0)
    with tempfile.TemporaryDirectory() as directory, timed(seconds):
        start = time.perf_counter()
        with OutputDirectory(Path(directory) / "out", command="examine") as out:
            write_report(examiner.examine(model, batches, partial_results=out.partial), out)
        seconds["all"] = time.perf_counter() - start
    seconds["flushing and renaming the report"] -= min(
        seconds["lock and marker"], seconds["flushing and renaming the report"]
    )  # the marker is written while the report is published
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 texts of 128 tokens, one round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    loaded = load_model("minilm")
    length, texts, rounds = (128, 2, 1) if options.quick else (512, 16, options.rounds)
    batches = text_input(loaded, None, length=length, texts=texts).batches
    one_round(loaded.model, batches[:1])  # imports and first calls
    measured = [one_round(loaded.model, batches) for _ in range(rounds)]

    def row(name: str, parts: Sequence[str]) -> list[str]:
        shares = [sum(x[part] for part in parts) / x["all"] for x in measured]
        quartiles = statistics.quantiles(shares, n=4) if rounds > 1 else [shares[0]] * 3
        seconds = statistics.median(sum(x[part] for part in parts) for x in measured)
        half = (quartiles[2] - quartiles[0]) / 2
        return [name, f"{1000 * seconds:.0f}", f"{statistics.median(shares):.2%} ± {half:.2%}"]

    rows = [row(part, [part]) for part in PARTS]
    rows += [row("hashing and locking, promised below 3 %", PROMISED), row("the whole examination", ["all"])]
    title = f"Shares of one examination: {loaded.name}, {texts} texts of {length} tokens, {rounds} rounds"
    print_table(title, ["part", "ms", "share"], rows, bold=len(PARTS))


if __name__ == "__main__":
    main()
