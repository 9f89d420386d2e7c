"""`headwise rewrite MODEL --plan PLAN -o DIR`: replace attention heads as a plan says, and print a receipt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise rewrite",
        usage="headwise rewrite [MODEL] --plan PLAN -o DIR [--tolerance T] [--json]",
        description="Replace the attention heads of a model by the operators a plan names, with a receipt.",
        epilog="DIR is loaded by headwise.replacement.load(DIR), a python: model by load(DIR, model=factory()).",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as in `headwise examine`; default all-MiniLM-L6-v2")
    parser.add_argument(
        "--plan", required=True, metavar="PLAN", help="plan.json, or its directory, as `headwise plan` wrote"
    )
    parser.add_argument("-o", "--out", required=True, metavar="DIR", type=Path, help="a new directory")
    parser.add_argument("--tolerance", type=float, help="another point of the plan's trade-off curve")
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    parser.add_argument("--allow-pickle", action="store_true", help="load weights that are pickled")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    options = parser.parse_args(argv)
    receipt = _rewrite_attention(options)
    if options.json:
        print(json.dumps(_without_nan(receipt.to_json()), indent=2))
    else:
        _attention_table(receipt, options.out)
    return 0


def _rewrite_attention(options: argparse.Namespace) -> Any:
    from headwise.cli.progress import bar
    from headwise.models.load import load_model
    from headwise.replacement.install.saved import new_directory, save
    from headwise.replacement.plan import Plan

    with new_directory(options.out) as out:  # refused now if it exists, and removed again if anything goes wrong
        plan = Plan.load(options.plan)
        plan = plan if options.tolerance is None else plan.at(options.tolerance)
        with bar("loading", None, quiet=options.json):
            loaded = load_model(
                options.model,
                with_head=True,
                allow_pickle=options.allow_pickle,
                trust_remote_code=options.trust_remote_code,
            )
        with bar("rewriting", None, quiet=options.json):
            from headwise.replacement.rewrite import rewrite

            new, receipt = rewrite(loaded.model, plan)
            save(new, plan, out, loaded)
    return receipt


def _without_nan(value: Any) -> Any:
    """What was not measured is null: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(x) for x in value]
    return None if isinstance(value, float) and value != value else value


def _attention_table(receipt: Any, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{receipt.what}: {len(receipt.parts)} attention sites", title_justify="left")
    table.add_column("site", overflow="fold")
    table.add_column("heads", no_wrap=True)
    table.add_column("cost left", justify="right", no_wrap=True)
    for part in (*receipt.parts, receipt):
        last = part is receipt
        before, after = part.cost_before.multiply_adds, part.cost_after.multiply_adds
        heads = "" if last else part.notes[0].replace(", ", "\n")
        share = f"{100 * after / before:.1f} %"
        name = "all" if last else part.what
        table.add_row(name, heads, share, style="bold" if last else None)
    console = Console()
    console.print(table)
    before, after = receipt.cost_before.multiply_adds, receipt.cost_after.multiply_adds
    console.print(f"multiply-adds of attention: {before:,} before, {after:,} after")
    added = receipt.parameters_after - receipt.parameters_before
    console.print(f"{receipt.parameters_after:,} parameters, {added:,} of them new")
    if receipt.largest_change == receipt.largest_change:
        console.print(f"largest change of the output on a probe {receipt.largest_change:.1e} of {receipt.scale:.3g}")
    for note in receipt.notes:
        console.print(note)
    console.print(f"written to {out}")
