"""`headwise examine`: load a model, feed it, measure every head, and write one page and one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError

if TYPE_CHECKING:
    from headwise.examination.record import Examination, Record
    from headwise.models.inputs import Input
    from headwise.models.load import Loaded


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    rank = _join_processes()
    new = not Path(options.out).exists()
    out = _writable(Path(options.out)) if rank == 0 else Path(options.out)
    command = "headwise examine " + shlex.join(argv)
    try:
        examination = _examine(options, out, command, quiet=rank != 0 or options.json)
    except InputError:
        if new and rank == 0:
            with suppress(OSError):  # there is work in it to go on with
                out.rmdir()
        raise
    if rank != 0:
        return 0
    from headwise.examination.report.page import write

    files = write(examination, out)
    shutil.rmtree(_work(out), ignore_errors=True)
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
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a directory or hub name for transformers, a .gguf file, or python:module:factory; "
        "default: all-MiniLM-L6-v2 from its package",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="plain text (default: a text that ships)")
    data.add_argument("--images", type=Path, metavar="DIR", help="a directory of pictures")
    data.add_argument("--audio", nargs="+", type=Path, metavar="FILE", help="recordings")
    data.add_argument("--tokens", type=int, metavar="N", help="random tokens, N in each text")
    parser.add_argument("-o", "--out", default="headwise-report", metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens in each text (default: 512 or the model's most)"
    )
    parser.add_argument("--texts", type=int, default=16, metavar="K", help="at most K texts (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="texts in one forward pass")
    parser.add_argument(
        "--spectra-every", type=int, default=8, metavar="K", help="spectra on every K-th batch; 0: none (default: 8)"
    )
    parser.add_argument("--memory", type=int, metavar="MB", help="megabytes that blocks of P may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--no-ablations", action="store_true", help="leave out collapse curves and path lengths")
    parser.add_argument("--allow-pickle", action="store_true", help="load pickled weights; they can run code")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    return parser


def _examine(options: argparse.Namespace, out: Path, command: str, *, quiet: bool) -> Examination:
    for name, least in (("texts", 1), ("batch", 1), ("spectra_every", 0), ("tokens", 4), ("memory", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    from headwise.cli.progress import bar
    from headwise.examination.examine import examine
    from headwise.models.fingerprint import fingerprint
    from headwise.models.load import load_model

    with bar("loading the model", None, quiet=quiet):
        loaded = load_model(
            options.model, allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code
        )
    fed = _feed(loaded, options)
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "resume", "json")}
    work = _open_work(out, fingerprint(loaded.model, settings), options.resume)
    with bar("measuring heads", len(fed.batches), quiet=quiet) as advance:
        examination = examine(
            loaded.model,
            fed.batches,
            name=loaded.name,
            data=fed.described,
            made={"command": command},
            tokens=fed.tokens,
            spectra_every=options.spectra_every,
            memory=None if options.memory is None else options.memory << 20,
            seed=options.seed,
            work=work,
            progress=advance,
        )
    if options.no_ablations:
        return examination
    from headwise.examination.measure.depth import with_depth

    with bar("switching skips and MLPs off", None, quiet=quiet):
        return with_depth(examination, loaded.model, fed.batches[0])


def _feed(loaded: Loaded, options: argparse.Namespace) -> Input:
    from headwise.models import inputs as feed

    if loaded.batches is not None:
        batches = list(loaded.batches)
        return feed.Input(batches[: options.texts], None, {"kind": "the factory's own batches"})
    if options.images is not None:
        return feed.image_input(loaded, options.images, limit=options.texts)
    if options.audio is not None:
        return feed.audio_input(loaded, options.audio, limit=options.texts)
    if options.tokens is not None:
        return feed.random_tokens(loaded, options.tokens, texts=options.texts, seed=options.seed)
    return feed.text_input(loaded, options.text, length=options.length, texts=options.texts, batch=options.batch)


def _join_processes() -> int:
    """Started by torchrun: join the others.  The thread count is torchrun's business."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def _writable(out: Path) -> Path:
    """The output directory, or a sentence before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".headwise-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror or error}; choose another directory with -o"
        ) from error
    return out


def _work(out: Path) -> Path:
    return out / ".unfinished"


def _open_work(out: Path, key: str, resume: bool) -> Path:
    """Where batches are kept until the report is written; another model's or another setting's work is not mixed in."""
    work = _work(out)
    mark = work / "key"
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        if resume and mark.exists() and mark.read_text() != key:
            raise InputError(
                f"{work} holds the unfinished work of another model or other options; run without --resume, or "
                "with the options of the run that was interrupted"
            )
        if not resume and work.exists():
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        mark.write_text(key)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed as dist

        dist.barrier()
    return work


def _print(examination: Examination, files: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{examination.model['name']}[/bold]")
    for line in examination.headline:
        console.print(line)
    table = Table(title="The ten most telling heads", title_justify="left")
    for heading in ("layer", "head", "kind", "eff. rank", "rank-64 error", "what it does"):
        table.add_column(heading, justify="right" if heading in ("head", "eff. rank", "rank-64 error") else "left")
    short = short_names([site["name"] for site in examination.sites])
    for record in telling(examination.records):
        rank, error = _number(record, "effective_rank", ".0f"), _number(record, "output_error_64", ".1%")
        table.add_row(short[record.site], str(record.head), record.kind, rank, error, record.words)
    console.print(table)
    console.print(f"report  {files[0]}\njson    {files[1]}", highlight=False, soft_wrap=True)


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


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
