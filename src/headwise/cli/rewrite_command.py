"""`headwise rewrite MODEL --plan PLAN -o DIR`, or `--all NAME`: replace attention heads, and print a receipt."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.options import (
    Parser,
    add_force,
    add_json,
    add_model,
    add_output,
    file_path,
    is_quiet,
    load,
    nonempty,
    number,
    whole_number,
)
from headwise.errors import check_extra

if TYPE_CHECKING:
    from torch import nn

    from headwise.models.load import LoadedModel
    from headwise.models.receipt import Receipt
    from headwise.replacement import Choice, Plan

TOKENS = 8192
"""Of which there is a kind of text for each planned length, or one text if it is longer."""

LONGEST_TRIAL = 2048
"""Tokens of a text on which models are compared, if there is no plan that asks for longer ones."""

LARGEST = 1 << 20
OPERATOR_OPTIONS = (
    *("width", "leading", "stride", "block", "summaries", "sharpness"),
    *("rounds", "chunk", "landmarks", "rank", "by"),
)
"""Options of operators, by which `--all` is set."""


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="headwise rewrite",
        usage="headwise rewrite [MODEL] (--plan PLAN | --all OPERATOR [--width N …]) -o DIR [--tolerance T] [--stock] "
        "[--no-trial] [--force] [--json]",
        description="Replace the attention heads of a model by the operators of a plan, or all by one operator.",
        epilog="DIR is loaded by AutoModel once headwise is imported, or by headwise.replacement.load(DIR); a python: "
        "model by load(DIR, model=factory()).  With --stock nothing of headwise is needed.",
    )
    add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", type=file_path, metavar="PLAN", help="plan.json or its directory")
    source.add_argument("--all", type=nonempty, metavar="OPERATOR", help="one operator for all heads, such as window")
    group = parser.add_argument_group("options of the operator of --all, and the most keys it is for")
    for name in OPERATOR_OPTIONS:
        group.add_argument(f"--{name}", type=number(-LARGEST), metavar="N")
    group.add_argument("--length", type=whole_number(1, LARGEST), metavar="N")
    add_output(parser, required=True, help="a new directory for the rewritten model")
    parser.add_argument(
        "--tolerance", type=number(0), metavar="T", help="use another point of the plan's trade-off curve"
    )
    parser.add_argument(
        "--stock",
        action="store_true",
        help="write an architecture of transformers with sliding layers; for plans that have one window for all heads "
        "of a layer, or none",
    )
    parser.add_argument(
        "--no-trial", action="store_true", help="do not run both models on texts of the planned lengths"
    )
    add_force(parser)
    add_json(parser, "the receipt")
    options = parser.parse_args(argv)
    given = [name for name in (*OPERATOR_OPTIONS, "length") if getattr(options, name) is not None]
    if given and options.all is None:
        parser.error(f"--{given[0]} is an option of the operator of --all")
    if options.tolerance is not None and options.all is not None:
        parser.error("--tolerance chooses a point of a plan's trade-off curve, and --all has none")
    check_extra("models", "a rewritten model", "safetensors")
    receipt = _rewrite(options)
    if options.json:
        from headwise.outputs import json_text

        print(json_text(receipt.to_json(), indent=2))
    else:
        _print(receipt, options.out)
    return 0


def _rewrite(options: argparse.Namespace) -> Receipt:
    from headwise.output_directory import OutputDirectory
    from headwise.progress import bar
    from headwise.replacement import Plan, rewrite
    from headwise.replacement.install.saved import save
    from headwise.replacement.install.stock_models import stock_model

    with OutputDirectory(options.out, command="rewrite", force=options.force, exclusive=True) as out:
        plan = None if options.plan is None else Plan.load(options.plan)
        plan = plan if plan is None or options.tolerance is None else plan.at(options.tolerance)
        choice = None if plan is not None else _choice(options)
        loaded = load(options, with_head=True)
        plan = _everywhere(loaded, choice, options) if plan is None else plan
        with bar("rewriting", None, quiet=is_quiet(options)):
            new, receipt = rewrite(loaded.model, plan)
            if options.stock:
                new = stock_model(loaded.model, new)
                what = (
                    f"written as {type(new).__name__}, whose windows have no planned length: longer texts use them too"
                )
                receipt = replace(receipt, notes=(*receipt.notes, what))
            save(new, plan, out, loaded)
        if not options.no_trial:
            receipt = _with_trials(receipt, plan, loaded, new, options)
    return receipt


def _choice(options: argparse.Namespace) -> Choice:
    """The operator of --all with its options."""
    from headwise.errors import InputError
    from headwise.replacement import KINDS, Choice
    from headwise.replacement.replacing import named_operator

    given = {name: getattr(options, name) for name in OPERATOR_OPTIONS if getattr(options, name) is not None}
    choice = named_operator(options.all, given)
    if not isinstance(choice, Choice):
        known = ", ".join(name for name, kind in KINDS.items() if kind.start is None)
        raise InputError(f"--all {options.all}: cannot be saved with a model; the operators that can are {known}")
    return choice


def _everywhere(loaded: LoadedModel, choice: Any, options: argparse.Namespace) -> Plan:
    from headwise.models.factory import take_batches
    from headwise.progress import bar
    from headwise.replacement.planning.uniform_plan import uniform_plan

    with bar("finding the attention", None, quiet=is_quiet(options)):
        batch = None if loaded.batches is None else take_batches(options.model, loaded.batches, 1)[0]
        return uniform_plan(loaded.model, choice, batch=batch, length=options.length, name=options.model)


def _with_trials(
    receipt: Receipt, plan: Plan, loaded: LoadedModel, new: nn.Module, options: argparse.Namespace
) -> Receipt:
    """The receipt with the drift, the seconds and the bytes of the cache on texts of the planned lengths."""
    from headwise.errors import InputError
    from headwise.models.inputs import needs_text
    from headwise.progress import bar
    from headwise.replacement.trials import trial, warnings

    if loaded.is_factory or not needs_text(loaded.model):
        return receipt
    try:
        texts = _texts(loaded, plan)
    except InputError as error:
        return replace(receipt, notes=(*receipt.notes, f"drift and seconds on texts were not measured: {error}"))
    trials = []
    with bar("measuring on texts", len(texts), quiet=is_quiet(options)) as advance:
        for done, (kind, batches) in enumerate(texts):
            trials.append(trial(loaded.model, new, batches, kind))
            advance(done + 1)
    promised = plan.tolerance if options.all is None else math.inf  # one operator for all heads promises nothing
    notes = (*receipt.notes, *warnings(trials, promised))
    return replace(receipt, notes=notes, trials=tuple(each.to_dict() for each in trials))


def _texts(loaded: LoadedModel, plan: Plan) -> list[tuple[str, list[dict[str, Any]]]]:
    """(kind of text, texts of one length) for every planned length: those that drifted most when planned come first,
    and as many as fit into TOKENS, at least one."""
    from headwise.replacement.planning.calibration_texts import calibration_texts, texts_by_kind

    sources = calibration_texts()
    planned = {} if plan.point is None else plan.point.drift
    found = []
    for n in [n for n in plan.lengths if n <= LONGEST_TRIAL or n == plan.lengths[0] or plan.curve]:
        order = sorted(sources, key=lambda kind: -planned.get(kind, {}).get(n, 0.0))
        some = {kind: sources[kind] for kind in order[: max(1, TOKENS // n)]}
        found += list(texts_by_kind(loaded, some, [n], texts=1 if n > 1024 else 4).items())
    return found


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
    print_trials(receipt.trials)
    for note in receipt.notes:
        print(note)
    print(f"written to {out}")


def print_trials(trials: Sequence[Mapping[str, Any]]) -> None:
    """Drift with its interval, seconds and bytes of the cache, before and after, by length and kind of text."""
    from headwise.cli.tables import print_table

    if not trials:
        return

    def pair(values: Sequence[float] | None, form: str, unit: float = 1) -> str:
        return "–" if values is None else " → ".join(format(x / unit, form) for x in values)

    headings = ("tokens", "text", "drift", "loss", "seconds", "cache MB")
    rows = [
        (
            str(each["length"]),
            each["kind"],
            f"{each['drift']:.4f}" + ("" if math.isnan(each["interval"]) else f" ± {each['interval']:.4f}"),
            pair(each["losses"], ".3f"),
            pair(each["seconds"], ".2f"),
            pair(each["cache_bytes"], ".1f", 1e6),
        )
        for each in trials
    ]
    measure = "loss per token" if trials[0]["losses"] else "1 - cosine"
    print_table(f"Before → after, drift of the {measure} with its 95 % interval", headings, rows, words=("text",))
