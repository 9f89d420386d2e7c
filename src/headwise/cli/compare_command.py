"""`headwise compare A B`: what changed between two examinations, or how far two models' answers are apart."""

from __future__ import annotations

import argparse
from pathlib import Path

from headwise.cli.options import add_inputs, add_json, is_quiet, make_inputs
from headwise.cli.progress import bar
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.outputs import json_text


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise compare",
        description="What changed between two examinations: checkpoints of one model, or before and after a change.  "
        "Or, of two model directories: how far their answers to the same texts are apart, and how long each takes.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="a directory written by examine, or a model's")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    parser.add_argument("--heads", type=int, default=10, metavar="K", help="rows to show (default: %(default)s)")
    add_json(parser, "every head")
    add_inputs(parser.add_argument_group("for two models"), texts=8, kinds=())
    options = parser.parse_args(argv)

    from headwise.replacement.model_comparison import is_model

    for path in (options.a, options.b):
        if not path.exists():
            raise InputError(f"there is no {path}; name two directories that examine wrote, or two models'")
    models = [is_model(path) for path in (options.a, options.b)]
    if all(models):
        return _models(options)
    if any(models):
        which, other = (options.a, options.b) if models[0] else (options.b, options.a)
        raise InputError(f"{which} is a model and {other} is not; compare two models, or two examinations")

    from headwise.examination import compare_examinations, read_report

    found = compare_examinations(read_report(options.a), read_report(options.b))
    if options.json:
        print(json_text(found.to_dict()))
        return 0
    print(f"{found.a} against {found.b}: {len(found.heads)} heads in both, {found.kinds_changed} changed kind.")
    if found.residual_a and found.residual_b:
        ends = ("unknown" if x[-1] is None else f"{x[-1]:.3g}" for x in (found.residual_a, found.residual_b))
        print(f"Relative residual after the last layer: {' and '.join(ends)}.")
    rows = [
        (
            change.layer,
            str(change.head),
            change.kind_a if change.kind_a == change.kind_b else f"{change.kind_a} → {change.kind_b}",
            change.measure.replace("_", " "),
            f"{change.a:.3g}",
            f"{change.b:.3g}",
            f"{change.z:.1f}",
        )
        for change in found.heads[: options.heads]
    ]
    headings = ("layer", "head", "kind", "measure", "A", "B", "spreads")
    print_table(f"The {len(rows)} heads that changed most", headings, rows, words=("layer", "kind", "measure"))
    return 0


def _models(options: argparse.Namespace) -> int:
    from headwise.replacement.model_comparison import compare_models, open_model

    with bar("loading the models", None, quiet=is_quiet(options)):
        old, new = open_model(options.a), open_model(options.b)
    batches = make_inputs(options, old).batches
    with bar("running both models", len(batches), quiet=is_quiet(options)) as advance:
        found = compare_models(old, new, batches, progress=advance)
    if options.json:
        print(json_text(found.to_dict()))
        return 0
    rows = [
        (str(index), f"{drift:.2e}", f"{before:.3f}", f"{after:.3f}")
        for index, (drift, before, after) in enumerate(
            zip(found.drifts, found.seconds_old, found.seconds_new, strict=False)
        )
    ]
    headings = ("text", f"drift ({found.measure})", "seconds, old", "new")
    print_table(f"{found.old} against {found.new}", headings, rows, words=())
    print(f"mean drift {found.drift:.2e}, {sum(found.seconds_old) / sum(found.seconds_new):.2f} times as fast")
    if found.operators:
        print("heads of the second: " + ", ".join(f"{n} {kind}" for kind, n in found.operators.items()))
    return 0
