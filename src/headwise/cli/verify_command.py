"""`headwise verify`: the promises of a model, or published claims about attention, also on the weights of a model."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli import options as shared
from headwise.cli.options import Parser, add_force, add_json, add_output, file_path, is_quiet, nonempty, whole_number
from headwise.cli.tables import print_table, print_text, wrapped
from headwise.errors import InputError, check_extra
from headwise.output_directory import OutputDirectory
from headwise.outputs import json_text, new_file, writing
from headwise.progress import bar

if TYPE_CHECKING:
    from headwise.ledger import Ledger, ModelAudit
    from headwise.models.load import LoadedModel

MODEL_OPTIONS = ("text", "images", "audio", "length", "causal", "device", "dtype")
CLAIM_OPTIONS = ("source", "claim", "weights", "heads", "docs", "figures")
STANDINGS = {
    "kept": "green",
    "VIOLATED": "bold red",
    "measured": "cyan",
    "not tried": "yellow",
    "does not apply": "dim",
}
SEQUENCES, TEXT_LENGTH = 3, 64
"""Texts, images or recordings that are taken, and tokens of a text."""

COLOURS = {"HOLDS": "green", "HOLDS WITH PREMISE": "yellow", "REFUTED": "red", "CORRECTED": "magenta"}
SOURCES = "S0 (Xie), S1 (Burgund), S2 (Verma), S3 (Ji & Xie) or S4 (Dordevic)"


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    _check_options(options)
    if options.model is not None:
        return _audit_model(options)
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

    select(source=options.source, claim=options.claim)  # a name that does not exist is said before a file is made
    with contextlib.ExitStack() as files:
        json_file, docs_file = (
            None if path is None else files.enter_context(new_file(path, force=options.force))
            for path in (options.out, options.docs)
        )
        progress = not is_quiet(options)
        ledger = verify(source=options.source, claim=options.claim, timing=True, progress=progress)
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
        description="Does MODEL keep its promises: is it causal, do padding, other sequences of a batch, a cache and "
        "the form of attention change nothing, do windows reach as far as the config says?  Without MODEL: check "
        "claims that five texts make about attention.  Exit code 1 if a promise is broken, or an outcome is not the "
        "recorded one.",
    )
    parser.add_argument(
        "model", nargs="?", type=nonempty, metavar="MODEL", help=shared.MODEL_HELP.partition(" (default")[0]
    )
    model = parser.add_argument_group("with MODEL")
    inputs = model.add_mutually_exclusive_group()
    inputs.add_argument("--text", nargs="+", type=file_path, metavar="FILE", help="texts (default: random tokens)")
    inputs.add_argument("--images", type=file_path, metavar="DIR", help="a directory of images (default: random ones)")
    inputs.add_argument("--audio", nargs="+", type=file_path, metavar="FILE", help="recordings (default: random ones)")
    model.add_argument(
        "--length",
        type=whole_number(8, shared.TOKENS[1]),
        metavar="N",
        help="tokens in each of three sequences (default: 32, or more to see a window of the model)",
    )
    model.add_argument(
        "--causal", choices=("yes", "no"), help="whether no output may depend on a later token (default: by the config)"
    )
    shared.add_seed(model, "of the random inputs")
    shared.add_loading(model)
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


def _check_options(options: argparse.Namespace) -> None:
    """Raise InputError for an option that would have no effect."""
    without = CLAIM_OPTIONS if options.model is not None else MODEL_OPTIONS
    reason = "MODEL is given" if options.model is not None else "no MODEL is given"
    for name in without:
        if getattr(options, name) is not None:
            raise InputError(f"--{name} would have no effect, because {reason}; leave it out, or see verify --help")


def _audit_model(options: argparse.Namespace) -> int:
    from headwise.ledger.model_audit.audit_model import audit_model

    out: Path | None = options.out
    with contextlib.ExitStack() as files:
        file = None if out is None else files.enter_context(new_file(out, force=options.force))
        loaded = shared.load(options)
        batches = _batches(options, loaded)
        audit = audit_model(
            loaded.model,
            batches,
            length=options.length if batches is None else None,
            causal=None if options.causal is None else options.causal == "yes",
            name=loaded.name,
            seed=options.seed,
            progress=not is_quiet(options),
        )
        if out is not None and file is not None:
            _write(out, file, json_text(audit.to_json(), indent=1))
    if options.json:
        print(json_text(audit.to_json()))
    else:
        _print_audit(audit)
    return 1 if audit.violated else 0


def _batches(options: argparse.Namespace, loaded: LoadedModel) -> list[Any] | None:
    """What the options name, a factory's own batches, or None: the audit then draws them."""
    if loaded.batches is None and options.text is None and options.images is None and options.audio is None:
        return None
    if options.text is not None and loaded.lacks_tokenizer:
        raise InputError(
            f"{loaded.source} has no tokenizer (such as tokenizer.json); leave out --text, and the sequences are random"
        )
    options.texts, options.random_tokens, options.batch = SEQUENCES, None, SEQUENCES
    if options.text is not None and options.length is None:
        options.length = TEXT_LENGTH
    return list(shared.make_inputs(options, loaded).batches)


def _print_audit(audit: ModelAudit) -> None:
    from rich.text import Text

    tried = [promise for promise in audit.promises if promise.standing.value != "does not apply"]
    rows = [
        (
            wrapped(promise.name, 16),
            Text(promise.standing.value, style=STANDINGS[promise.standing.value]),
            "" if promise.measured is None else f"{promise.measured:.2g}",
            "" if promise.floor is None else f"{promise.floor:.1g}",
            promise.sentence + (f" ({promise.where})" if promise.where else ""),
        )
        for promise in tried
    ]
    headings = ("promise", "verdict", "measured", "rounding", "what was found")
    title = f"{audit.model}: {audit.kind}, {audit.dtype}, {audit.inputs}"
    print_table(title, headings, rows, words=("promise", "what was found", "verdict"), no_wrap=("verdict",))
    print()
    for reason, names in _not_applicable(audit).items():
        print_text(f"{', '.join(names)}: {reason}", indent="    ")
    print_text(
        "measured, rounding: the largest change of the output relative to its largest entry, unless the last column "
        f"says otherwise.  {audit.summary[0].upper()}{audit.summary[1:]}."
    )
    if audit.violated:
        print_text(f"Broken: {'; '.join(audit.violated)}")


def _not_applicable(audit: ModelAudit) -> dict[str, list[str]]:
    """sentence -> the promises that do not apply for that reason"""
    found: dict[str, list[str]] = {}
    for promise in audit.promises:
        if promise.standing.value == "does not apply":
            found.setdefault(promise.sentence, []).append(promise.name)
    return found


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
