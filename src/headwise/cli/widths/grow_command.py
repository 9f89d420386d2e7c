"""`headwise grow`: train a small model on a built-in task, and widen its heads where they are too narrow.

A live table of widths, losses and bottlenecks; with --out, grow.json and a figure of the widths over training.  An
interrupted run writes complete files of the steps until then.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.options import Parser, add_force, add_json, add_output, add_seed, whole_number
from headwise.cli.tables import make_table
from headwise.errors import check_extra, needs_extra
from headwise.output_directory import OutputDirectory
from headwise.outputs import json_text

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.growth.demo import Snapshot

SIZES = ("steps", "every", "key_width", "keys", "layers", "heads")


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.out is not None:
        check_extra("report", "the figure", "matplotlib")
    from headwise.growth.demo import TASKS, train_and_grow

    snapshots: list[Snapshot] = []
    sizes = {name: getattr(options, name) for name in SIZES if name != "keys"}
    files: list[Path] = []
    with contextlib.ExitStack() as stack:
        out = None
        if options.out is not None:
            names = ("grow.json", "widths.png")
            out = stack.enter_context(OutputDirectory(options.out, command="grow", names=names, force=options.force))
        try:
            stream = train_and_grow(TASKS[options.task](keys=options.keys), **sizes, seed=options.seed)
            _follow(stream, snapshots, show=not options.json)
        finally:  # also when interrupted: complete files of what was done
            if out is not None and snapshots:
                with out.atomic("widths.png") as path:
                    _draw_widths(path, snapshots)
                files = [out.write_json("grow.json", [s.to_dict() for s in snapshots]), out.path / "widths.png"]
                out.publish()
    if options.json:
        print(json_text({"task": options.task, "snapshots": [s.to_dict() for s in snapshots]}, indent=2))
        return 0
    for file in files:
        print(f"wrote {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="headwise grow",
        description="Train a small model that adds query/key dimensions where the data show that they are too few.",
    )
    parser.add_argument(
        "--task",
        choices=("lookup", "average"),
        default="lookup",
        help="lookup: the key width is the bottleneck; average: it is not, and nothing should grow",
    )
    for size, default, most, help in (
        ("steps", 600, 1_000_000_000, "training steps"),
        ("every", 200, 1_000_000_000, "steps between growths"),
        ("key-width", 2, 1024, "query/key width of every head at the start"),
        ("keys", 128, 65_536, "keys to tell apart"),
        ("layers", 1, 64, "attention layers"),
        ("heads", 2, 64, "heads of each layer"),
    ):
        described = f"{help} (default: %(default)s)"
        parser.add_argument(f"--{size}", type=whole_number(1, most), default=default, metavar="N", help=described)
    add_seed(parser)
    add_output(parser, help="write grow.json and widths.png into DIR")
    add_force(parser)
    add_json(parser, "the whole run")
    return parser


def _follow(stream: Iterable[Snapshot], snapshots: list[Snapshot], *, show: bool) -> None:
    """Collect the snapshots; with `show`, in a table that grows on a terminal, or is printed at the end."""
    if not show or not sys.stdout.isatty():
        snapshots.extend(stream)
    if not show:
        return
    from rich.console import Console
    from rich.live import Live

    if snapshots:
        Console().print(_table(snapshots))
        return
    with Live(_table(snapshots), console=Console(), refresh_per_second=4) as live:
        for snapshot in stream:
            snapshots.append(snapshot)
            live.update(_table(snapshots))


def _table(snapshots: Sequence[Snapshot]) -> Table:
    headings = ["step", "loss", "parameters", "widths", "bottleneck (validated)", "growth"]
    rows = []
    for s in snapshots:
        widths = "\n".join(" ".join(map(str, w)) for w in s.widths.values())  # a line a layer
        scores = " ".join(f"{x.validated:.2g}" for x in sorted(s.scores, key=lambda x: (x.layer, x.head)))
        rows.append([str(s.step), f"{s.loss:.4f}", str(s.parameters), widths, scores, _outcome(s)])
    return make_table("Key widths over training", headings, rows, words=headings[3:])


def _outcome(snapshot: Snapshot) -> str:
    event = snapshot.event
    if event is None:
        return ""
    if not event.changes:
        return f"none: {event.reason}"
    heads = ", ".join(f"{c.layer.split('.')[1]}:{c.head} {c.before}→{c.after}" for c in event.changes)
    measured = "" if event.measured is None else f", held-out loss {event.measured:+.3f}"
    return f"{heads} ({event.solution}{measured})"


def _draw_widths(path: Path, snapshots: Sequence[Snapshot]) -> None:
    """A row for every head, divided where it grew, shaded and labelled by its width; the loss beneath."""
    with needs_extra("report", "the figure"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

    heads = [(layer, head) for layer, widths in snapshots[0].widths.items() for head in range(len(widths))]
    steps = [s.step for s in snapshots]
    widest = max(width for s in snapshots for widths in s.widths.values() for width in widths)
    rows = 0.6 + 0.28 * len(heads)
    figure = Figure(figsize=(7, 2.4 + rows), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(rows, 2))
    shades = colormaps["Blues"]
    for place, (layer, head) in enumerate(heads):
        for start, end, width in stretches(steps, [s.widths[layer][head] for s in snapshots]):
            above.broken_barh([(start, end - start)], (place - 0.4, 0.8), color=shades(0.15 + 0.6 * width / widest))
            above.text((start + end) / 2, place, str(width), ha="center", va="center", fontsize="small")
    above.set_yticks(range(len(heads)), [f"{layer}, head {head}" for layer, head in heads], fontsize="small")
    above.invert_yaxis()
    above.set_title("query/key width", fontsize="medium")
    below.plot(steps, [s.loss for s in snapshots], color="black")
    below.set_yscale("log")
    below.set_ylabel("loss on unseen data")
    below.set_xlabel("training step")
    for s in snapshots:
        if s.event is not None and s.event.changes:
            below.axvline(s.step, color="0.8", zorder=0)
    figure.savefig(path, dpi=120)


def stretches(steps: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first step, last step, width) of every stretch of training at one width; a stretch ends where the next begins.

    >>> stretches([0, 10, 20, 30], [2, 2, 4, 4])
    [(0, 20, 2), (20, 30, 4)]
    """
    starts = [i for i in range(len(steps)) if i == 0 or widths[i] != widths[i - 1]]
    ends = [*(steps[i] for i in starts[1:]), steps[-1]]
    return [(steps[i], end, widths[i]) for i, end in zip(starts, ends, strict=True)]
