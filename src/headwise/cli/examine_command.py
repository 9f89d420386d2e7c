"""`headwise examine`: measure every head of a model on some inputs; write a page, a JSON file and figures."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli import options as shared
from headwise.cli.tables import print_table, print_text
from headwise.errors import InputError, check_extra
from headwise.output_directory import PARTIAL, OutputDirectory
from headwise.outputs import json_text

if TYPE_CHECKING:
    from headwise.examination.record import Examination, Record
    from headwise.models.inputs import Inputs
    from headwise.models.load import LoadedModel
    from headwise.models.run import Batch


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    command = "headwise examine " + shlex.join(argv)
    rank, processes = shared.join_processes(options.timeout)
    if rank != 0:  # the first process has the lock, writes the report and prints
        options.quiet = True
        _examine(options, options.out.expanduser() / PARTIAL, command, processes)
        return 0
    check_extra("report", "the report", "jinja2", "matplotlib")
    from headwise.examination.report.page import report_names, write_report

    with OutputDirectory(
        options.out, command="examine", names=report_names(), force=options.force, resume=options.resume
    ) as out:
        examination = _examine(options, out.partial, command, processes)
        files = write_report(examination, out)
    warn_unseen(examination)
    if options.json:
        print(json_text({"report": str(files[0]), "json": str(files[1]), **examination.to_dict()}))
    else:
        _print(examination, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = shared.Parser(
        prog="headwise examine",
        description="What every head of a model is doing: advice, a table, one HTML page, one JSON file, and figures.",
        epilog="Several processes share the work: torchrun --nproc-per-node N -m headwise examine …",
    )
    shared.add_model(parser)
    shared.add_inputs(parser, texts=16)
    shared.add_output(parser, default="headwise-report", help="directory of the report")
    texts, batches, megabytes = (shared.whole_number(least, 1_000_000) for least in (1, 0, 1))
    more = parser.add_argument_group("what is measured and shown")
    more.add_argument(
        "--importance", action="store_true", help="how much the answer changes without each head; takes longer"
    )
    lengths = "also the kind of each head on the same texts cut to each of these lengths"
    tokens = shared.whole_number(*shared.TOKENS)
    more.add_argument("--lengths", nargs="+", type=tokens, default=[], metavar="N", help=lengths)
    more.add_argument(
        "--excerpt", type=shared.nonempty, metavar="TEXT", help="text in the pictures of attention (default: the first)"
    )
    more.add_argument("--no-ablations", action="store_true", help="leave out collapse curves and path lengths")
    more.add_argument(
        "--spectra-every",
        type=batches,
        default=8,
        metavar="K",
        help="spectra on every K-th batch; 0: none (default: 8)",
    )
    parser.add_argument("--batch", type=texts, default=1, metavar="B", help="texts in one forward pass (default: 1)")
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="with torchrun: the processes share the tokens of each text, not the texts",
    )
    parser.add_argument("--memory", type=megabytes, metavar="MB", help="megabytes that blocks of P may take")
    shared.add_seed(parser)
    shared.add_timeout(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    shared.add_force(parser)
    shared.add_json(parser)
    return parser


def _examine(options: argparse.Namespace, partial: Path, command: str, processes: int) -> Examination:
    from headwise.examination import examine, with_depth, with_importance, with_lengths
    from headwise.models.tokenized import shortened

    if options.sequence_parallel:
        _check_sequence_parallel(options, processes)
    loaded = shared.load(options)
    inputs = shared.make_inputs(options, loaded)
    tokenizer = _tokenizer(options, loaded, inputs)
    lengths = _lengths(options, inputs)
    cut: dict[int, list[Batch]] = {n: [shortened(batch, n, tokenizer) for batch in inputs.batches] for n in lengths}
    shared.wait_for_processes(processes)
    progress = not shared.is_quiet(options)
    examination = examine(
        loaded.model,
        inputs.batches,
        name=loaded.name,
        inputs=inputs.description,
        provenance={"command": command},
        token_names=inputs.token_names,
        excerpt=options.excerpt,
        tokenizer=tokenizer if options.excerpt else None,
        spectra_every=options.spectra_every,
        block_bytes=None if options.memory is None else options.memory << 20,
        seed=options.seed,
        partial_results=partial,
        progress=progress,
        sequence_parallel=options.sequence_parallel,
    )
    if options.sequence_parallel:
        why = "they run the model on a whole text, which the processes share; examine a shorter text for them"
        return replace(examination, ablations={"supported": False, "why": why}, paths={"supported": False, "why": why})
    if options.importance:
        examination = with_importance(examination, loaded.model, inputs.batches, progress=progress)
    if cut:
        names = inputs.token_names
        examination = with_lengths(examination, loaded.model, cut, token_names=names, progress=progress)
    if not options.no_ablations:
        examination = with_depth(examination, loaded.model, inputs.batches[0], progress=progress)
    return examination


def _check_sequence_parallel(options: argparse.Namespace, processes: int) -> None:
    if processes == 1:
        raise InputError(
            "--sequence-parallel is for several processes; start them with torchrun --nproc-per-node N -m headwise "
            "examine …, or leave it out"
        )
    for given, name in ((options.importance, "--importance"), (options.lengths, "--lengths")):
        if given:
            raise InputError(f"{name} runs the model on whole texts, which --sequence-parallel shares; leave one out")
    if options.batch != 1:
        raise InputError(f"--sequence-parallel shares one text at a time, but --batch is {options.batch}")


def _tokenizer(options: argparse.Namespace, loaded: LoadedModel, inputs: Inputs) -> Any:
    """The tokenizer of the model, if --excerpt or --lengths needs it."""
    needed = "--excerpt" if options.excerpt else "--lengths" if options.lengths else None
    if needed is None or (needed == "--lengths" and inputs.description["kind"] == "random tokens"):
        return None
    if inputs.description["kind"] not in ("text", "random tokens"):
        raise InputError(f"{needed} is for texts, but these inputs are {inputs.description['kind']}; leave it out")
    from headwise.models.inputs import tokenizer_of

    return tokenizer_of(loaded)


def _lengths(options: argparse.Namespace, inputs: Inputs) -> list[int]:
    longest = inputs.description.get("length")
    for length in options.lengths:
        if longest is not None and length > longest:
            raise InputError(
                f"--lengths {length} is more than the {longest} tokens of the texts; use at most {longest}, or pass "
                f"--length {length}"
            )
    return sorted({*options.lengths} - {longest})


def _print(examination: Examination, files: list[Path]) -> None:
    """What to do, then what was seen, then the table."""
    print(f"{examination.model['name']}: {len(examination.records)} heads, {examination.inputs_in_words()}")
    if examination.advice:
        print("\nWhat to do")
    for number, advice in enumerate(examination.advice, start=1):
        print_text(advice["text"], indent="    ", first=f"{number:>2}. ")
        if advice.get("command"):
            print(f"    $ {advice['command']}")  # in one line, to be copied
    print("\nWhat was seen")
    for sentence in examination.headline:
        print_text(sentence, indent="    ", first="  · ")
    print()
    _print_heads(examination)
    if examination.by_length:
        print()
        _print_lengths(examination)
    for what, part in (("collapse curves", examination.ablations), ("path lengths", examination.paths)):
        if part.get("why"):
            print_text(f"{what} were not measured: {part['why']}")
    print(f"\npage  {files[0]}\njson  {files[1]}")


def _print_heads(examination: Examination) -> None:
    from headwise.examination import unusual_heads

    has_importance = any("importance" in record.measures for record in examination.records)
    if has_importance:
        chosen = sorted(examination.records, key=lambda record: -_importance(record))[:10]
        title = f"The {len(chosen)} heads that matter most"
    else:
        chosen = unusual_heads(examination.records)
        title = f"The {len(chosen)} most unusual heads"
    short = short_names([site["name"] for site in examination.sites])
    rows = [
        (
            short[record.site],
            str(record.head),
            *([_mean(record, "importance", ".2g")] if has_importance else []),
            f"{record.kind} {record.kind_counts[record.kind]}/{record.judged}",
            _mean(record, "effective_rank", ".0f"),
            record.description + (f"; also {', '.join(record.traits)}" if record.traits else ""),
        )
        for record in chosen
    ]
    importance = ["importance"] if has_importance else []
    headings = ("layer", "head", *importance, "kind", "effective rank", "what it does")
    print_table(title, headings, rows, words=("layer", "kind", "what it does"))
    items, counts = examination.words["items"], examination.inputs
    print_text(
        f"2/3 after a kind: on 2 of the 3 {items} that could be judged; {counts['spectra_texts']} of {counts['texts']} "
        f"{items} have spectra, for ranks"
    )
    if has_importance:
        unit = next(measure["unit"] for measure in examination.measures if measure["name"] == "importance")
        print_text(f"importance: change of the answer ({unit}) if the head's output is replaced by its mean")


def _print_lengths(examination: Examination) -> None:
    lengths, kinds = examination.by_length["lengths"], examination.by_length["kinds"]
    counts = [Counter(kinds[str(length)]) for length in lengths]
    names = sorted({kind for count in counts for kind in count}, key=lambda kind: -counts[-1][kind])
    rows = [(kind, *(str(count[kind] or "–") for count in counts)) for kind in names]
    print_table(f"Heads of each kind, by length in {examination.words['units']}", ("kind", *map(str, lengths)), rows)


def warn_unseen(examination: Examination) -> None:
    """On standard error: attention of the model that no number is about."""
    if examination.unseen:
        print("warning: what looks like attention and was not measured:", file=sys.stderr)
    for module in examination.unseen:
        print(f"  {module['name']} ({module['class']}): {module['why']}", file=sys.stderr)


def short_names(names: list[str]) -> list[str]:
    """Names without the parts that all of them have in common: encoder.layer.3.attention.self becomes 3."""
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and len({x[0] for x in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [x[1:] for x in parts]
    while len(parts) > 1 and len({x[-1] for x in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [x[:-1] for x in parts]
    return [".".join(x) for x in parts]


def _mean(record: Record, measure: str, form: str) -> str:
    statistic = record.measures.get(measure)
    return "–" if statistic is None or not math.isfinite(statistic.mean) else format(statistic.mean, form)


def _importance(record: Record) -> float:
    mean = record.measures["importance"].mean
    return mean if math.isfinite(mean) else -math.inf
