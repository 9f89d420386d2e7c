"""`headwise compare A B`: what changed between two examinations, or how far two models' answers are apart."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headwise.errors import InputError


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise compare",
        description="What changed between two examinations: checkpoints of one model, or before and after a change.  "
        "Or, of two model directories: how far their answers to the same texts are apart, and how long each takes.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="a directory written by examine, or a model's")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    parser.add_argument("--heads", type=int, default=10, metavar="K", help="rows to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every head as JSON")
    data = parser.add_argument_group("of two models")
    data.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="plain text (default: a text that ships)")
    data.add_argument("--tokens", type=int, metavar="N", help="random tokens instead, N in each text")
    data.add_argument("--length", type=int, metavar="N", help="tokens in each text")
    data.add_argument("--texts", type=int, default=8, metavar="K", help="at most K texts (default: %(default)s)")
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

    from headwise.examination.compare import compare, read

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


def _models(options: argparse.Namespace) -> int:
    from headwise.cli.progress import bar
    from headwise.models import inputs as feed
    from headwise.replacement.model_comparison import apart, open_model

    if options.texts < 1:
        raise InputError(f"--texts is {options.texts}; it must be at least 1")
    with bar("loading", None, quiet=options.json):
        old, new = open_model(options.a), open_model(options.b)
    if options.tokens is not None:
        fed = feed.random_tokens(old, options.tokens, texts=options.texts, seed=0)
    else:
        fed = feed.text_input(old, options.text, length=options.length, texts=options.texts)
    with bar("running both models", len(fed.batches), quiet=options.json) as advance:
        found = apart(old, new, fed.batches, progress=advance)
    if options.json:
        print(json.dumps(found.to_dict()))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found.old} against {found.new}", title_justify="left")
    for heading in ("text", f"drift ({found.measure})", "seconds, old", "new"):
        table.add_column(heading, justify="right")
    for row in zip(found.drifts, found.seconds_old, found.seconds_new, strict=False):
        table.add_row(str(table.row_count), f"{row[0]:.2e}", f"{row[1]:.3f}", f"{row[2]:.3f}")
    console = Console()
    console.print(table)
    console.print(f"mean drift {found.drift:.2e}, {sum(found.seconds_old) / sum(found.seconds_new):.2f} times as fast")
    if found.operators:
        console.print("heads of the second: " + ", ".join(f"{n} {kind}" for kind, n in found.operators.items()))
    return 0
