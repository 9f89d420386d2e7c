"""`headwise grow`: a small model on a built-in task that widens its heads where they are too narrow, as it trains.

A live table of widths, losses and bottlenecks; with --out, grow.json and a figure of the widths over training.  An
interrupted run leaves complete files of what was done until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.growth.demo import Snapshot


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    out = None if options.out is None else _directory(options.out)
    from headwise.growth.demo import TASKS, train_and_grow

    moments: list[Snapshot] = []
    stream = train_and_grow(
        TASKS[options.task](keys=options.keys),
        steps=options.steps,
        every=options.every,
        key_width=options.key_width,
        layers=options.layers,
        heads=options.heads,
        seed=options.seed,
    )
    files: list[Path] = []
    try:
        _follow(stream, moments, quiet=options.json)
    finally:  # also when interrupted: what there is is written whole
        if out is not None and moments:
            files = [_write(out / "grow.json", lambda path: _dump(path, moments)), _figure(out, moments)]
    if options.json:
        print(json.dumps({"task": options.task, "moments": [m.to_dict() for m in moments]}, indent=2))
        return 0
    for file in files:
        print(f"wrote {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headwise grow",
        description="Train a small model that widens its query/key dimensions where the data say they are too few.",
    )
    parser.add_argument(
        "--task",
        choices=("lookup", "average"),
        default="lookup",
        help="lookup: the key width is the bottleneck; average: it is not, and nothing should grow",
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=200, help="ask for growth every so many (default: %(default)s)")
    parser.add_argument("--key-width", type=int, default=2, metavar="K", help="of every head at the start (default: 2)")
    parser.add_argument("--keys", type=int, default=128, help="keys to tell apart (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="write DIR/grow.json and DIR/widths.png")
    parser.add_argument("--json", action="store_true", help="print the whole run as JSON")
    return parser


def _follow(stream: Any, moments: list[Snapshot], *, quiet: bool) -> None:
    if quiet:
        moments.extend(stream)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not sys.stdout.isatty():
        moments.extend(stream)
        console.print(_table(moments))
        return
    with Live(_table(moments), console=console, refresh_per_second=4) as live:
        for moment in stream:
            moments.append(moment)
            live.update(_table(moments))


def _table(moments: Sequence[Snapshot]) -> Table:
    from rich.table import Table

    table = Table(title="key widths over training")
    for column in ("step", "loss", "parameters"):
        table.add_column(column, justify="right")
    table.add_column("widths")
    table.add_column("bottleneck (validated)")
    table.add_column("what happened")
    for m in moments:
        widths = "  ".join(" ".join(map(str, w)) for w in m.widths.values())
        ordered = sorted(m.scores, key=lambda s: (s.layer, s.head))
        table.add_row(
            str(m.step),
            f"{m.loss:.4f}",
            str(m.parameters),
            widths,
            " ".join(f"{s.validated:.2g}" for s in ordered),
            "" if m.event is None else _said(m),
        )
    return table


def _said(m: Snapshot) -> str:
    event = m.event
    if event is None or not event.changes:
        return "nothing grows: " + ("" if event is None else event.reason)
    heads = ", ".join(f"{c.layer.split('.')[1]}:{c.head} {c.before}→{c.after}" for c in event.changes)
    measured = "" if event.measured is None else f", held-out loss {event.measured:+.3f}"
    return f"{heads} ({event.solution}{measured})"


def _directory(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: cannot be made a directory ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"--out {path}: cannot be written to")
    return path


def _write(path: Path, how: Callable[[Path], None]) -> Path:
    """Under another name first: a file by this name is always a whole one."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        how(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _dump(path: Path, moments: Sequence[Snapshot]) -> None:
    path.write_text(json.dumps([m.to_dict() for m in moments], indent=2), encoding="utf-8")


def _figure(out: Path, moments: Sequence[Snapshot]) -> Path:
    """A row for every head, cut where it grew, shaded and labelled by its width; the loss beneath."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    heads = [(layer, head) for layer, widths in moments[0].widths.items() for head in range(len(widths))]
    steps = [m.step for m in moments]
    widest = max(width for m in moments for widths in m.widths.values() for width in widths)
    rows = 0.6 + 0.28 * len(heads)
    figure = Figure(figsize=(7, 2.4 + rows), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(rows, 2))
    shades = colormaps["Blues"]
    for place, (layer, head) in enumerate(heads):
        for start, end, width in _spells(steps, [m.widths[layer][head] for m in moments]):
            share = width / widest
            above.broken_barh([(start, end - start)], (place - 0.4, 0.8), color=shades(0.15 + 0.6 * share))
            above.text((start + end) / 2, place, str(width), ha="center", va="center", fontsize="small")
    above.set_yticks(range(len(heads)), [f"{layer}, head {head}" for layer, head in heads], fontsize="small")
    above.invert_yaxis()
    above.set_title("query/key width", fontsize="medium")
    below.plot(steps, [m.loss for m in moments], color="black")
    below.set_yscale("log")
    below.set_ylabel("loss on unseen data")
    below.set_xlabel("training step")
    for m in moments:
        if m.event is not None and m.event.changes:
            below.axvline(m.step, color="0.8", zorder=0)
    return _write(out / "widths.png", lambda path: figure.savefig(path, dpi=120))


def _spells(steps: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, width) for every stretch of training at one width."""
    found: list[tuple[int, int, int]] = []
    for step, width in zip(steps, widths, strict=True):
        if found and found[-1][2] == width:
            found[-1] = (found[-1][0], step, width)
        else:
            if found:
                found[-1] = (found[-1][0], step, found[-1][2])
            found.append((step, step, width))
    return found
