"""`headwise verify`: check published claims about attention, or audit the attention weights of a model."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.options import Parser, add_force, add_json, add_output, file_path, is_quiet, nonempty, whole_number
from headwise.cli.progress import bar
from headwise.cli.tables import print_table
from headwise.errors import check_extra
from headwise.output_directory import OutputDirectory
from headwise.outputs import json_text, new_file, writing

if TYPE_CHECKING:
    from headwise.ledger import Ledger

COLOURS = {"HOLDS": "green", "HOLDS WITH PREMISE": "yellow", "REFUTED": "red", "CORRECTED": "magenta"}
SOURCES = "S0 (Xie), S1 (Burgund), S2 (Verma), S3 (Ji & Xie) or S4 (Dordevic)"


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.weights is not None:
        return _audit(options)
    if options.figures is not None:
        check_extra("report", "--figures", "matplotlib")
        from headwise.ledger.claim_figures import draw, figure_files

        with (
            OutputDirectory(options.figures, command="verify", names=figure_files(), force=options.force) as out,
            bar("drawing", None, quiet=is_quiet(options)),
        ):
            draw(out.staged)
        files = [str(out.path / name) for name in figure_files()]
        print(json_text({"figures": files}) if options.json else "\n".join(files))
        return 0

    from headwise.ledger import select, verify

    total = len(select(source=options.source, claim=options.claim))
    with contextlib.ExitStack() as files:
        json_file, docs_file = (
            None if path is None else files.enter_context(new_file(path, force=options.force))
            for path in (options.out, options.docs)
        )
        with bar("checking claims", total, quiet=is_quiet(options)) as advance:
            ledger = verify(source=options.source, claim=options.claim, timing=True, progress=advance)
        if json_file is not None:
            _write(options.out, json_file, json_text(ledger.to_json(), indent=1))
        if docs_file is not None:
            from headwise.ledger.claims_page import page

            _write(options.docs, docs_file, page(ledger.results))
    if options.json:
        print(json_text(ledger.to_json()))
    else:
        _print(ledger)
    return 1 if ledger.different else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="headwise verify",
        description="Check claims that five texts make about attention.  Exit code 1 if an outcome is not the recorded "
        "one.",
    )
    parser.add_argument("--source", type=nonempty, metavar="S0", help=f"only the claims of one text: {SOURCES}")
    parser.add_argument("--claim", type=nonempty, metavar="ID", help="only one claim, such as S0.low-rank")
    parser.add_argument(
        "--weights",
        type=nonempty,
        metavar="FILE",
        help="evaluate the theorems on attention weights instead: a .safetensors file or its directory, "
        "python:module:factory, or minilm",
    )
    heads = whole_number(1, 1 << 16)
    parser.add_argument("--heads", type=heads, metavar="N", help="heads of each layer, if the weights do not tell")
    add_output(parser, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--docs", type=file_path, metavar="FILE", help="write the page docs/claims.md")
    parser.add_argument("--figures", type=file_path, metavar="DIR", help="only redraw four published figures")
    add_force(parser)
    add_json(parser)
    return parser


def _write(path: Path, temporary: Path, text: str) -> None:
    with writing(path):
        temporary.write_text(text, encoding="utf-8")


def _print(ledger: Ledger) -> None:
    from rich.console import Console
    from rich.text import Text

    from headwise.ledger import SOURCES

    rows = [
        (
            result.entry.id,
            result.entry.statement,
            Text(result.finding.outcome.value, style=COLOURS[result.finding.outcome.value]),
            f"{result.finding.printed.measured:.2g}",
            f"{result.finding.printed.bound:.2g}",
        )
        for result in ledger.results
    ]
    headings = ("claim", "statement", "outcome", "measured", "bound")
    print_table(None, headings, rows, words=headings[:3], no_wrap=("claim", "outcome"))
    console = Console(highlight=False)
    for result in ledger.results:
        entry, example = result.entry, result.finding.example
        false = result.finding.outcome.value in ("REFUTED", "CORRECTED")
        for label, text in (
            ("premise", entry.premise),
            ("true instead", entry.truth),
            ("counter-example", example if false else ""),
            ("timing", result.timed),
        ):
            if text:
                console.print(Text.assemble((entry.id, "bold"), f" {label}: {text}"))
    checked = {result.entry.source for result in ledger.results}
    for source in SOURCES:
        if source.id in checked:
            console.print(Text(f"{source.id}: {source.authors}, {source.title}"))
    console.print(Text(ledger.summary))
    if ledger.different:
        console.print(Text(f"Different from the record: {', '.join(ledger.different)}", style="red"))


def _audit(options: argparse.Namespace) -> int:
    from headwise.ledger import audit_weights

    out: Path | None = options.out
    with contextlib.ExitStack() as files:
        file = None if out is None else files.enter_context(new_file(out, force=options.force))
        audit = audit_weights(options.weights, heads=options.heads)
        if out is not None and file is not None:
            _write(out, file, json_text(audit.to_json(), indent=1))
    if options.json:
        print(json_text(audit.to_json()))
        return 0
    headings = ("quantity", "value", "note")
    rows = [[row[heading] for heading in headings] for row in audit.rows]
    print_table(
        f"{audit.layers} attention layers of {audit.heads} heads, width {audit.width}", headings, rows, words=headings
    )
    if audit.left_out:
        print(f"Not covered, since the theorems are about attention alone: {', '.join(audit.left_out)}")
    return 0
