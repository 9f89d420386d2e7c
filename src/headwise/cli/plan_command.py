"""`headwise plan`: the cheapest operator for every head of a model within a tolerance, and the whole trade-off."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli import options as shared
from headwise.errors import check_extra
from headwise.output_directory import OutputDirectory
from headwise.outputs import json_text

if TYPE_CHECKING:
    from headwise.replacement import Plan

TOLERANCES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if not options.json:
        check_extra("report", "the figure", "matplotlib")
    check_extra("models", "a plan", "safetensors")
    if options.report is not None:
        from headwise.examination.report.page import check_report

        check_report(options.report)
    from headwise.replacement.plans import FILES

    names = [*FILES, "trade-off.svg"]
    with OutputDirectory(options.out, command="plan", names=names, force=options.force, resume=options.resume) as out:
        plan = _plan(options, out.partial, "headwise plan " + shlex.join(argv))
        files = plan.save(out)
        if not options.json:
            from headwise.replacement.planning.trade_off_figure import draw

            with out.atomic("trade-off.svg") as path:
                draw(plan, path)
            files.append(out.path / "trade-off.svg")
    if options.report is not None:
        from headwise.examination.report.page import add_plan

        files.append(add_plan(options.report, plan.to_dict()))
    if options.json:
        print(json_text(plan.to_dict()))
    else:
        _print(plan, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = shared.Parser(
        prog="headwise plan",
        description="Choose for every head the cheapest operator that keeps the output of the model: fitted on some "
        "texts, chosen by others, tested on the rest.",
        epilog="Then: headwise rewrite MODEL --plan DIR -o NEW",
    )
    shared.add_model(parser)
    shared.add_inputs(parser, texts=None, texts_default="28; with --quick 12", kinds=("images",))
    parser.add_argument(
        "--tolerance",
        type=shared.number(0),
        default=0.05,
        metavar="T",
        help="largest drift allowed (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer candidates, fitting steps and texts")
    parser.add_argument(
        "--objective",
        choices=("multiply_adds", "seconds"),
        default="multiply_adds",
        help="quantity to minimise (default: %(default)s)",
    )
    parser.add_argument(
        "--transfer",
        type=shared.whole_number(0, 1_000_000),
        default=0,
        metavar="STEPS",
        help="train the chosen operators for STEPS more steps",
    )
    shared.add_output(parser, default="headwise-plan")
    parser.add_argument(
        "--report", type=shared.file_path, metavar="DIR", help="add the plan to the report of examine there"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    shared.add_force(parser)
    shared.add_seed(parser, "of the split of the texts, the fits and the search")
    shared.add_json(parser, "the plan")
    return parser


def _plan(options: argparse.Namespace, partial: Path, command: str) -> Plan:
    from headwise.cli.progress import bars
    from headwise.replacement import Effort, plan
    from headwise.replacement.planning.make_plan import QUICK

    if options.texts is None:
        options.texts = 12 if options.quick else 28
    loaded = shared.load(options)
    inputs = shared.make_inputs(options, loaded)
    with bars(quiet=shared.is_quiet(options)) as progress:
        return plan(
            loaded.model,
            inputs.batches,
            tolerance=options.tolerance,
            length=options.length,
            objective=options.objective,
            effort=QUICK if options.quick else Effort(),
            transfer=options.transfer,
            seed=options.seed,
            name=loaded.name,
            provenance={"command": command, "data": inputs.description},
            partial_results=partial,
            progress=progress,
        )


def _print(plan: Plan, files: list[Path]) -> None:
    from headwise.cli.tables import print_table, print_text

    headings = ("tolerance", f"cost at {plan.length}", "predicted", "largest drift", "bound")
    rows: list[tuple[str, ...]] = []
    last, bold = None, None
    for tolerance in sorted({*TOLERANCES, plan.tolerance}):
        point = plan.at(tolerance).point
        if point is None or (point is last and tolerance != plan.tolerance):
            continue
        bold = len(rows) if tolerance == plan.tolerance else bold
        rows.append(
            (
                ("→ " if tolerance == plan.tolerance else "") + f"{tolerance:g}",
                f"{point.cost:.1%}",
                f"{point.predicted:.4f}",
                f"{point.largest:.4f}",
                f"{point.bound:.4f}",
            )
        )
        last = point
    ratio = plan.timing["ratio"]
    print_text(f"Attention takes {ratio:.0%} of the time of softmax attention at {plan.length} on this machine.")
    if ratio > 1 and plan.provenance["objective"] != "seconds":
        print_text(
            "Fewer multiply-adds need not be faster on short sequences; --objective seconds minimises measured time."
        )
    title = f"{plan.model['name']}: attention cost against drift"
    print_table(title, headings, rows, words=(), no_wrap=headings, bold=bold)
    for site, why in plan.skipped.items():
        print(f"skipped: {site}: {why}")
    for file in files:
        print(file)
