"""`headwise examine`: measure every head of a model on some inputs; write a page, a JSON file and figures."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli import options as shared
from headwise.cli.progress import bar
from headwise.cli.tables import print_table
from headwise.errors import check_extra
from headwise.output_directory import PARTIAL, OutputDirectory
from headwise.outputs import json_text

if TYPE_CHECKING:
    from headwise.examination.record import Examination, Record


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    command = "headwise examine " + shlex.join(argv)
    rank, processes = _join_processes()
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
    if options.json:
        print(json_text({"report": str(files[0]), "json": str(files[1]), **examination.to_dict()}))
    else:
        _print(examination, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = shared.Parser(
        prog="headwise examine",
        description="What every head of a model is doing: one HTML page, one JSON file, figures, and a table.",
        epilog="Several processes share the work: torchrun --nproc-per-node N -m headwise examine …",
    )
    shared.add_model(parser)
    shared.add_inputs(parser, texts=16)
    shared.add_output(parser, default="headwise-report", help="directory of the report")
    texts, batches, megabytes = (shared.whole_number(least, 1_000_000) for least in (1, 0, 1))
    parser.add_argument("--batch", type=texts, default=1, metavar="B", help="texts in one forward pass (default: 1)")
    parser.add_argument(
        "--spectra-every",
        type=batches,
        default=8,
        metavar="K",
        help="spectra on every K-th batch; 0: none (default: 8)",
    )
    parser.add_argument("--memory", type=megabytes, metavar="MB", help="megabytes that blocks of P may take")
    shared.add_seed(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    shared.add_force(parser)
    parser.add_argument("--no-ablations", action="store_true", help="leave out collapse curves and path lengths")
    shared.add_json(parser)
    return parser


def _examine(options: argparse.Namespace, partial: Path, command: str, processes: int) -> Examination:
    from headwise.examination import examine, with_depth

    loaded = shared.load(options)
    inputs = shared.make_inputs(options, loaded)
    if processes > 1:
        import torch.distributed as dist

        dist.barrier()  # the first process has taken the lock and removed partial results of an earlier run
    with bar("measuring heads", len(inputs.batches), quiet=shared.is_quiet(options)) as advance:
        examination = examine(
            loaded.model,
            inputs.batches,
            name=loaded.name,
            inputs=inputs.description,
            provenance={"command": command},
            token_names=inputs.token_names,
            spectra_every=options.spectra_every,
            block_bytes=None if options.memory is None else options.memory << 20,
            seed=options.seed,
            partial_results=partial,
            progress=advance,
        )
    if options.no_ablations:
        return examination
    with bar("switching skips and MLPs off", None, quiet=shared.is_quiet(options)):
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


def _print(examination: Examination, files: list[Path]) -> None:
    from headwise.examination import unusual_heads

    print(examination.model["name"], *examination.headline, sep="\n")
    short = short_names([site["name"] for site in examination.sites])
    rows = [
        (
            short[record.site],
            str(record.head),
            f"{record.kind} {record.kind_counts[record.kind]}/{record.judged}",
            _mean(record, "effective_rank", ".0f"),
            _mean(record, "output_error_64", ".1%"),
            record.description,
        )
        for record in unusual_heads(examination.records)
    ]
    headings = ("layer", "head", "kind", "eff. rank", "rank-64 error", "description")
    title = f"The {len(rows)} most unusual heads"
    print_table(title, headings, rows, words=("layer", "kind", "description"))
    spectra = f"{examination.inputs['spectra_texts']} of {examination.inputs['texts']} texts have spectra"
    print(f"2/3 after a kind: on 2 of the 3 texts that could be judged; {spectra}, for ranks and errors")
    for what, part in (("collapse curves", examination.ablations), ("path lengths", examination.paths)):
        if part.get("why"):
            print(f"{what} were not measured: {part['why']}")
    print(f"report  {files[0]}\njson    {files[1]}")


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
    return "–" if statistic is None else format(statistic.mean, form)
