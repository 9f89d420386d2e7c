"""`headwise compare A B`: what changed between two examinations, or how far two models' answers are apart."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.options import (
    MODEL_HELP,
    Parser,
    add_force,
    add_inputs,
    add_json,
    add_loading,
    add_output,
    is_quiet,
    make_inputs,
    nonempty,
    trust,
    whole_number,
)
from headwise.cli.rewrite_command import print_trials
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.outputs import json_text
from headwise.progress import bar

if TYPE_CHECKING:
    from headwise.examination import ExaminationComparison, HeadDifference


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="headwise compare",
        description="What changed between two examinations: checkpoints of one model, or before and after a change.  "
        "Or, of two model directories: how far their answers to the same texts are apart, and how long each takes.",
    )
    parser.add_argument(
        "a", type=nonempty, metavar="A", help=f"a directory written by examine, or a MODEL: {MODEL_HELP}"
    )
    parser.add_argument("b", type=nonempty, metavar="B", help="the other one")
    add_loading(parser)
    rows = whole_number(1, 1_000_000)
    parser.add_argument("--heads", type=rows, default=10, metavar="K", help="rows to show (default: %(default)s)")
    add_output(parser, help="write comparison.html, the two examinations side by side, and comparison.json")
    add_force(parser)
    add_json(parser, "every head")
    add_inputs(parser.add_argument_group("for two models"), texts=8, kinds=())
    options = parser.parse_args(argv)

    from headwise.replacement.model_comparison import is_examination

    examinations = [is_examination(given) for given in (options.a, options.b)]
    if not any(examinations):
        if options.out is not None:
            raise InputError("--out writes a page about two examinations, but these are two models; examine them first")
        return _models(options)
    if not all(examinations):
        which, other = (options.a, options.b) if examinations[0] else (options.b, options.a)
        raise InputError(
            f"{which} is an examination and {other} is not; compare two directories that examine wrote, or two models"
        )

    from headwise.examination import compare_examinations, read_report, write_comparison

    a, b = read_report(Path(options.a)), read_report(Path(options.b))
    found = compare_examinations(a, b)
    files = [] if options.out is None else write_comparison(a, b, options.out, force=options.force)
    if options.json:
        print(json_text(found.to_dict()))
    else:
        _print_examinations(found, options.heads)
        for what, file in zip(("page", "json"), files, strict=False):
            print(f"{what}  {file}")
    return 0


def _print_examinations(found: ExaminationComparison, count: int) -> None:
    from headwise.examination.report.site_labels import site_labels

    if found.differs:
        print("These examinations differ in more than the model, and so may their heads:", *found.differs, sep="\n  ")
    print(f"{found.a} against {found.b}: {len(found.heads)} heads in both, {found.kinds_changed} changed kind.")
    ends = [residuals[-1] for residuals in (found.residual_a, found.residual_b) if residuals]
    if len(ends) == 2 and None not in ends:
        print(f"Relative residual after the last layer: {ends[0]:.3g} and {ends[1]:.3g}.")
    has_z, changes = found.ranked_by == "z", found.heads[:count]
    layers = list(dict.fromkeys(change.layer for change in found.heads))
    short = dict(zip(layers, site_labels(layers), strict=True))
    rows = [
        (
            f"{short[change.layer]} · {change.head}",
            (change.kind_a if change.kind_a == change.kind_b else f"{change.kind_a} → {change.kind_b}")
            + "*" * (not change.same_length),
            change.measure.replace("_", " "),
            f"{change.a:.3g}",
            f"{change.b:.3g}",
            f"{change.relative:.0%}",
            *(["–" if change.z is None else f"{change.z:.1f}"] if has_z else []),
        )
        for change in changes
    ]
    headings = ("head", "kind", "measure", "A", "B", "change", *(["z"] if has_z else []))
    title = f"The {len(rows)} heads that changed most"
    print_table(title, headings, rows, words=("head", "kind", "measure"), no_wrap=("head",))
    print(f"A and B are means over {_texts(changes)}.")
    if not all(change.same_length for change in changes):
        print("* judged on texts of other lengths, which alone can change a kind")
    if not has_z:
        print("Sorted by relative change: one text on a side shows no spread.  Examine more texts for a z-score.")
    else:
        way = "in pairs of the same text" if found.paired else "by Welch's t-test"
        print(f"z: the change of the mean in standard errors, {way}, allowing for the number of texts.")
    if found.unranked:
        names = ", ".join(name.replace("_", " ") for name in found.unranked)
        print(f"Left out, as measured on one text only: {names}.  Examine with --spectra-every 1 to include them.")


def _texts(changes: Sequence[HeadDifference]) -> str:
    """16 texts; 2 to 16 texts."""
    counts = sorted({n for change in changes for n in (change.texts_a, change.texts_b)})
    if counts == [1]:
        return "one text"
    return f"{counts[0]} texts" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} texts"


def _models(options: argparse.Namespace) -> int:
    from headwise.replacement.model_comparison import compare_models, open_model
    from headwise.replacement.trials import trial

    with bar("loading the models", None, quiet=is_quiet(options)):
        given = {name: getattr(options, name) for name in ("allow_missing", "device", "dtype")}
        old, new = (open_model(spec, trust(options), **given) for spec in (options.a, options.b))
    batches = make_inputs(options, old).batches
    found = compare_models(old, new, batches, progress=not is_quiet(options))
    first = [trial(old.model, new.model, batches[:1], "the first text")] if "input_ids" in batches[0] else []
    if options.json:
        print(json_text({**found.to_dict(), "trials": [each.to_dict() for each in first]}))
        return 0
    rows = [
        (str(index), f"{drift:.2e}", f"{before:.3f}", f"{after:.3f}")
        for index, (drift, before, after) in enumerate(
            zip(found.drifts, found.seconds_old, found.seconds_new, strict=False)
        )
    ]
    headings = ("text", f"drift ({found.measure})", "seconds, old", "new")
    print_table(f"{found.old} against {found.new}", headings, rows, words=())
    spread = 1.96 * statistics.stdev(found.drifts) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
    print(f"mean drift {found.drift:.2e} ± {spread:.1e} (95 % over texts), ", end="")
    print(f"{sum(found.seconds_old) / sum(found.seconds_new):.2f} times as fast")
    print_trials([each.to_dict() for each in first])
    if found.operators:
        print("heads of the second: " + ", ".join(f"{n} {kind}" for kind, n in found.operators.items()))
    return 0
