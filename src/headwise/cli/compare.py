"""`headwise compare A B`: what changed between two examinations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise compare",
        description="What changed between two examinations: checkpoints of one model, or before and after a change.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="a directory written by examine, or its report.json")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    parser.add_argument("--heads", type=int, default=10, metavar="K", help="rows to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every head as JSON")
    options = parser.parse_args(argv)

    from headwise.examine.compare import compare, read

    found = compare(read(options.a), read(options.b))
    if options.json:
        print(json.dumps(found.to_dict()))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{found.a} against {found.b}: {len(found.heads)} heads in both, {found.kinds_changed} changed kind.")
    if found.residual_a and found.residual_b:
        ends = found.residual_a[-1], found.residual_b[-1]
        console.print(f"Relative residual after the last layer: {ends[0]:.3g} and {ends[1]:.3g}.")
    table = Table(title=f"The {min(options.heads, len(found.heads))} heads that moved most", title_justify="left")
    for heading in ("layer", "head", "kind", "measure", "A", "B", "spreads"):
        table.add_column(heading)
    for change in found.heads[: options.heads]:
        kind = change.before if change.before == change.after else f"{change.before} → {change.after}"
        values = (change.measure.replace("_", " "), f"{change.a:.3g}", f"{change.b:.3g}", f"{change.z:.1f}")
        table.add_row(change.layer, str(change.head), kind, *values)
    console.print(table)
    return 0
