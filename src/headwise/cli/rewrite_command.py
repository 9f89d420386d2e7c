"""`headwise rewrite MODEL --plan PLAN -o DIR`: replace attention heads as a plan says, and print a receipt."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.options import Parser, add_force, add_json, add_model, add_output, file_path, is_quiet, load, number
from headwise.errors import check_extra

if TYPE_CHECKING:
    from headwise.models.receipt import Receipt


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="headwise rewrite",
        usage="headwise rewrite [MODEL] --plan PLAN -o DIR [--tolerance T] [--force] [--json]",
        description="Replace the attention heads of a model by the operators of a plan.",
        epilog="DIR is loaded by headwise.replacement.load(DIR), a python: model by load(DIR, model=factory()).",
    )
    add_model(parser)
    parser.add_argument("--plan", required=True, type=file_path, metavar="PLAN", help="plan.json or its directory")
    add_output(parser, required=True, help="a new directory for the rewritten model")
    parser.add_argument(
        "--tolerance", type=number(0), metavar="T", help="use another point of the plan's trade-off curve"
    )
    add_force(parser)
    add_json(parser, "the receipt")
    options = parser.parse_args(argv)
    check_extra("models", "a rewritten model", "safetensors")
    receipt = _rewrite(options)
    if options.json:
        from headwise.outputs import json_text

        print(json_text(receipt.to_json(), indent=2))
    else:
        _print(receipt, options.out)
    return 0


def _rewrite(options: argparse.Namespace) -> Receipt:
    from headwise.cli.progress import bar
    from headwise.output_directory import OutputDirectory
    from headwise.replacement import Plan, rewrite
    from headwise.replacement.install.saved import save

    with OutputDirectory(options.out, command="rewrite", force=options.force, exclusive=True) as out:
        plan = Plan.load(options.plan)
        plan = plan if options.tolerance is None else plan.at(options.tolerance)
        loaded = load(options, with_head=True)
        with bar("rewriting", None, quiet=is_quiet(options)):
            new, receipt = rewrite(loaded.model, plan)
            save(new, plan, out, loaded)
    return receipt


def _print(receipt: Receipt, out: Path) -> None:
    from headwise.cli.tables import print_table

    def share(part: Receipt) -> str:
        return f"{part.cost_after.multiply_adds / part.cost_before.multiply_adds:.1%}"

    rows = [(part.what, part.notes[0].replace(", ", "\n"), share(part)) for part in receipt.parts]
    title = f"{receipt.what}: {len(receipt.parts)} attention sites"
    words = ("site", "heads")
    print_table(title, (*words, "cost"), [*rows, ("all", "", share(receipt))], words=words, no_wrap=("heads",), bold=-1)
    before, after = receipt.cost_before.multiply_adds, receipt.cost_after.multiply_adds
    print(f"multiply-adds of attention: {before:,} before, {after:,} after")
    added = receipt.parameters_after - receipt.parameters_before
    print(f"{receipt.parameters_after:,} parameters, {added:,} of them new")
    if receipt.largest_change == receipt.largest_change:
        print(f"largest change of the output on a probe: {receipt.largest_change:.1e} of {receipt.scale:.3g}")
    for note in receipt.notes:
        print(note)
    print(f"written to {out}")
