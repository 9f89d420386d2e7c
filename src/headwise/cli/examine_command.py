"""`headwise examine`: load a model, feed it, measure every head, and write one page and one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.options import (
    add_inputs,
    add_json,
    add_model,
    add_output,
    check_at_least,
    is_quiet,
    load,
    make_inputs,
)
from headwise.cli.progress import bar
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.outputs import partial_results, writable_directory

if TYPE_CHECKING:
    from headwise.examination.record import Examination, Record


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    check_at_least(options, texts=1, batch=1, spectra_every=0, random_tokens=4, memory=1)
    rank, processes = _join_processes()
    is_new = not options.out.exists()
    out = writable_directory(options.out) if rank == 0 else options.out
    options.quiet = options.quiet or rank != 0
    try:
        examination = _examine(options, out, "headwise examine " + shlex.join(argv), rank, processes)
    except InputError:
        if is_new and rank == 0:
            with suppress(OSError):  # not empty: it holds partial results for --resume
                out.rmdir()
        raise
    if rank != 0:
        return 0
    from headwise.examination.report.page import write

    files = write(examination, out)
    shutil.rmtree(_partial(out), ignore_errors=True)
    if options.json:
        print(json.dumps({"report": str(files[0]), "json": str(files[1]), **examination.to_dict()}, allow_nan=False))
    else:
        _print(examination, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headwise examine",
        description="What every head of a model is doing: one HTML page, one JSON file, figures, and a table.",
        epilog="Several processes share the work: torchrun --nproc-per-node N -m headwise examine …",
    )
    add_model(parser)
    add_inputs(parser, texts=16)
    add_output(parser, default="headwise-report", help="directory of the report")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="texts in one forward pass (default: 1)")
    parser.add_argument(
        "--spectra-every", type=int, default=8, metavar="K", help="spectra on every K-th batch; 0: none (default: 8)"
    )
    parser.add_argument("--memory", type=int, metavar="MB", help="megabytes that blocks of P may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--no-ablations", action="store_true", help="leave out collapse curves and path lengths")
    add_json(parser)
    return parser


def _examine(options: argparse.Namespace, out: Path, command: str, rank: int, processes: int) -> Examination:
    from headwise.examination.examine import examine
    from headwise.models.fingerprint import fingerprint

    loaded = load(options)
    inputs = make_inputs(options, loaded)
    unused = ("out", "resume", "json", "quiet")
    settings = {key: str(value) for key, value in vars(options).items() if key not in unused}
    partial = _partial(out)
    if rank == 0:
        if not options.resume:
            shutil.rmtree(partial, ignore_errors=True)
        partial_results(partial, fingerprint(loaded.model, settings))
    if processes > 1:
        import torch.distributed as dist

        dist.barrier()  # the directory exists
    with bar("measuring heads", len(inputs.batches), quiet=is_quiet(options)) as advance:
        examination = examine(
            loaded.model,
            inputs.batches,
            name=loaded.name,
            data=inputs.description,
            made={"command": command},
            tokens=inputs.token_names,
            spectra_every=options.spectra_every,
            memory=None if options.memory is None else options.memory << 20,
            seed=options.seed,
            work=partial,
            progress=advance,
        )
    if options.no_ablations:
        return examination
    from headwise.examination.measure.depth import with_depth

    with bar("switching skips and MLPs off", None, quiet=is_quiet(options)):
        return with_depth(examination, loaded.model, inputs.batches[0])


def _join_processes() -> tuple[int, int]:
    """(rank, number of processes); started by torchrun, join the other processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return 0, 1
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), processes


def _partial(out: Path) -> Path:
    """Where the results of batches are kept until the report is written."""
    return out / ".unfinished"


def _print(examination: Examination, files: list[Path]) -> None:
    print(examination.model["name"], *examination.headline, sep="\n")
    short = short_names([site["name"] for site in examination.sites])
    rows = [
        (
            short[record.site],
            str(record.head),
            record.kind,
            _number(record, "effective_rank", ".0f"),
            _number(record, "output_error_64", ".1%"),
            record.words,
        )
        for record in telling(examination.records)
    ]
    headings = ("layer", "head", "kind", "eff. rank", "rank-64 error", "what it does")
    print_table("The ten most unusual heads", headings, rows, words=("layer", "kind", "what it does"))
    print(f"report  {files[0]}\njson    {files[1]}")


def telling(records: list[Record], count: int = 10) -> list[Record]:
    """The heads that stand out most: largest distance from the median head over a few measures, in units of spread."""
    names = ("effective_rank", "entropy_share", "sink_mass", "best_offset_mass", "mass_within_16", "output_error_64")
    scores = [0.0] * len(records)
    for name in names:
        values = [r.measures[name].mean for r in records if name in r.measures]
        if len(values) < len(records):
            continue
        middle = sorted(values)[len(values) // 2]
        spread = sorted(abs(x - middle) for x in values)[len(values) // 2] or 1e-9
        scores = [max(old, abs(x - middle) / spread) for old, x in zip(scores, values, strict=True)]
    found: list[int] = []
    for i in sorted(range(len(records)), key=lambda i: -scores[i]):
        # at most three of a kind: ten local heads would tell one thing ten times
        if sum(records[j].kind == records[i].kind for j in found) < 3:
            found.append(i)
    return [records[i] for i in sorted(found[:count])]


def short_names(names: list[str]) -> list[str]:
    """Names without the parts that all of them share: encoder.layer.3.attention.self becomes 3."""
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and len({x[0] for x in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [x[1:] for x in parts]
    while len(parts) > 1 and len({x[-1] for x in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [x[:-1] for x in parts]
    return [".".join(x) for x in parts]


def _number(record: Record, name: str, form: str) -> str:
    found: Any = record.measures.get(name)
    return "–" if found is None else format(found.mean, form)
