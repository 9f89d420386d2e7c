"""`headwise verify`: run the ledger of claims, or evaluate what applies to the user's own weights."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.ledger import Result

COLOURS = {"HOLDS": "green", "HOLDS WITH PREMISE": "yellow", "REFUTED": "red", "CORRECTED": "magenta"}


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.weights is not None:
        return _own_weights(options)
    from headwise.cli.progress import bar
    from headwise.ledger import examine, select

    if options.figures is not None:
        from headwise.ledger.claim_figures import draw

        with bar("drawing", None, quiet=options.json):
            files = draw(options.figures)
        print(*files, sep="\n")
        return 0

    entries = select(source=options.source, claim=options.claim)
    results: list[Result] = []
    with bar("testing claims", len(entries), quiet=options.json) as advance:
        for done, entry in enumerate(entries, start=1):
            results.append(examine(entry))
            advance(done)
    different = [result.entry.id for result in results if not result.as_recorded]
    facts = {"schema": 1, "claims": [result.to_json() for result in results], "different": different}
    if options.out is not None:
        _write(options.out, json.dumps(facts, indent=1))
    if options.docs is not None:
        from headwise.ledger.claims_page import page

        _write(options.docs, page(results))
    if options.json:
        print(json.dumps(facts))
    else:
        _print(results, different)
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headwise verify",
        description="Does what the papers claim about attention hold?  Exit code 1 if a verdict is not the ledger's.",
    )
    parser.add_argument("--source", metavar="S0", help="only the claims of one source, S0 … S4")
    parser.add_argument("--claim", metavar="ID", help="only one claim, such as S0.low-rank")
    parser.add_argument("--weights", metavar="FILE|python:M:F", help="what applies to your own attention weights")
    parser.add_argument("--heads", type=int, metavar="N", help="heads of each layer, where --weights does not say")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page docs/claims.md")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the sources' figures from numbers, and stop")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _print(results: list[Result], different: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(show_lines=False)
    widest = max(len(result.entry.id) for result in results)  # names are what --claim takes: never cut them
    for heading in ("claim", "statement", "verdict", "measured", "bound", "premise, or what is true"):
        right, least = heading in ("measured", "bound"), widest if heading == "claim" else None
        table.add_column(heading, justify="right" if right else "left", min_width=least)
    for result in results:
        entry, finding = result.entry, result.finding
        outcome = finding.outcome.value
        verdict = f"[{COLOURS[outcome]}]{outcome}[/]"
        numbers = f"{finding.printed.measured:.2g}", f"{finding.printed.bound:.2g}"
        table.add_row(entry.id, escape(entry.statement), verdict, *numbers, escape(entry.truth or entry.premise))
    console.print(table)
    outcomes = [result.finding.outcome.value for result in results]
    console.print(", ".join(f"{outcomes.count(name)} {name}" for name in COLOURS if name in outcomes))
    for result in results:
        if result.finding.outcome.value in ("REFUTED", "CORRECTED") and result.finding.example:
            console.print(f"[bold]{result.entry.id}[/] {escape(result.finding.example)}", highlight=False)
        if result.timed:
            console.print(f"[bold]{result.entry.id}[/] {escape(result.timed)}", highlight=False)
    if different:
        console.print(f"[red]Different from the ledger: {', '.join(different)}[/]")


def _own_weights(options: argparse.Namespace) -> int:
    from headwise.ledger.audit import evaluate

    facts = evaluate(options.weights, heads=options.heads)
    if options.out is not None:
        _write(options.out, json.dumps(facts, indent=1))
    if options.json:
        print(json.dumps(facts))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{facts['layers']} attention layers of {facts['heads']} heads, width {facts['width']}")
    for heading in ("what", "value", "note"):
        table.add_column(heading)
    for row in facts["rows"]:
        table.add_row(row["what"], row["value"], row["note"])
    console = Console()
    console.print(table)
    if facts["left_out"]:
        console.print(f"Left out, since the theorems speak of attention alone: {', '.join(facts['left_out'])}")
    return 0


def _write(path: Path, text: str) -> None:
    """Beside, then renamed: never half a file."""
    from headwise.errors import InputError

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
