"""`headwise bench scaling | peers | fidelity | ranks`: measure what attention costs on this machine."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.options import (
    MODEL_HELP,
    Parser,
    add_force,
    add_json,
    add_loading,
    add_output,
    file_path,
    is_quiet,
    load,
    nonempty,
    number,
    whole_number,
)
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.output_directory import OutputDirectory
from headwise.outputs import json_text
from headwise.progress import bar

TOKENS, RANKS = (1_000_000, 10_000_000), (8, 64, 1024)

if TYPE_CHECKING:
    from headwise.bench import Fidelity, LayerTimes, Scaling, Timing
    from headwise.bench.kept import Kept
    from headwise.bench.sharded_cost import ProjectedTime


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="headwise bench", description="Measure what attention costs on this machine.")
    commands = parser.add_subparsers(required=True, metavar="scaling | peers | fidelity | ranks")
    scaling = commands.add_parser("scaling", help="every operator over n: time, memory, operations, fitted exponents")
    scaling.add_argument("--operators", nargs="+", type=nonempty, metavar="NAME", help="some operators (default: all)")
    add_output(scaling, default="headwise-bench", help="scaling.json and scaling.svg are written here")
    peers = commands.add_parser("peers", help="the same layer by other installed packages, as ratios in one run")
    peers.add_argument(
        "--layers", nargs="+", type=nonempty, metavar="NAME", help="some layers, of headwise or others (default: all)"
    )
    add_output(peers, default="headwise-bench", help="peers.json is written here")
    fidelity = commands.add_parser("fidelity", help="distance of every operator from softmax attention, and its cost")
    source = fidelity.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        nargs="?",
        const="minilm",
        type=nonempty,
        metavar="MODEL",
        help=f"use q, k and v of every layer of a model that reads a text: {MODEL_HELP}",
    )
    source.add_argument(
        "--tensors",
        type=file_path,
        metavar="FILE",
        help="q, k and v (*batch, n, width) saved by torch.save as a dictionary",
    )
    add_output(fidelity, default=None, help="fidelity.json is written here (default: nothing is written or kept)")
    add_loading(fidelity)
    for part, command in ((scaling, _scaling), (peers, _peers), (fidelity, _fidelity)):
        nargs = None if part is fidelity else "+"
        part.add_argument("--n", nargs=nargs, type=whole_number(2, 1 << 20), metavar="N", help="number of tokens")
        part.add_argument("--quick", action="store_true", help="short sequences, few rounds")
        part.add_argument(
            "--rounds",
            type=whole_number(1, 1_000_000),
            metavar="R",
            help="measurements of each time (default: 5; quick: 2)",
        )
        part.add_argument(
            "--fresh", action="store_true", help="measure again what earlier or interrupted runs in DIR have measured"
        )
        add_force(part)
        add_json(part)
        part.set_defaults(command=command)
    _add_ranks(
        commands.add_parser("ranks", help="one sequence on many processes: measured here, projected to clusters")
    )
    return parser


def _add_ranks(part: argparse.ArgumentParser) -> None:
    names = "some operators (default: all)"
    part.add_argument("--operators", nargs="+", type=nonempty, metavar="NAME", help=names)
    most = "tokens and ranks that are projected to (default: {})"
    for name, least, largest, default in (("tokens", 1024, 10**9, TOKENS), ("ranks", 2, 1 << 16, RANKS)):
        given = most.format(" ".join(map(str, default)))
        part.add_argument(
            f"--{name}", nargs="+", type=whole_number(least, largest), default=default, metavar="N", help=given
        )
    part.add_argument(
        "--bandwidth", type=number(1e-6), default=25.0, metavar="GB/S", help="into one rank (default: %(default)s)"
    )
    part.add_argument(
        "--latency", type=number(0), default=20.0, metavar="US", help="of one message (default: %(default)s)"
    )
    part.add_argument("--quick", action="store_true", help="an eighth of the length, two rounds")
    add_json(part)
    part.set_defaults(command=_ranks)


@contextlib.contextmanager
def _kept(options: argparse.Namespace, name: str, files: Sequence[str], **settings: Any) -> Iterator[_Session]:
    """A directory for the result, with the measurements of earlier runs in NAME.jsonl; without one, only in memory.

    If the run is interrupted, what it has is printed before it ends.
    """
    from headwise.bench.kept import Kept, conditions

    under = conditions(**settings)
    force = options.force or options.fresh
    with contextlib.ExitStack() as stack:
        out = None
        if options.out is not None:
            out = stack.enter_context(OutputDirectory(options.out, command="bench", names=files, force=force))
        kept = Kept(None if out is None else out.path / f"{name}.jsonl", under, fresh=options.fresh)
        session = _Session(out, kept)
        try:
            yield session
        except KeyboardInterrupt:
            session.show(False)
            if out is not None and not options.json:
                again = "without --fresh, to continue" if options.fresh else "to continue"
                print(f"interrupted; what is measured is kept in {kept.file}: give the same command {again}")
            raise
    session.show(True)


@dataclass
class _Session:
    """Where a run writes and keeps its measurements, and how it prints them: whole, or as far as they are there."""

    out: OutputDirectory | None
    kept: Kept
    show: Callable[[bool], None] = lambda complete: None

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        if self.out is not None:
            self.out.write_json(name, value)


def _scaling(options: argparse.Namespace) -> int:
    from headwise.bench.scaling import LENGTHS, QUICK, measure_scaling, measured_scaling, scaling_jobs

    lengths = _lengths(options.n, QUICK if options.quick else LENGTHS)
    jobs = scaling_jobs(options.operators, lengths, ranks=options.operators is None)
    names = ["scaling.json", "scaling.svg"] if find_spec("matplotlib") else ["scaling.json"]  # it is an extra
    settings = {
        "rounds": options.rounds or (2 if options.quick else 5),
        "seconds": 20.0 if options.quick else 60.0,
        "together": options.quick,
    }
    with _kept(options, "scaling", names, **settings) as session:

        def show(complete: bool) -> None:
            scaling = measured_scaling(jobs, session.kept)
            if options.json:
                print(json_text({**scaling.to_dict(), "complete": complete}))
                return
            _print_scaling(scaling)
            if complete and session.out is not None:
                print("wrote", ", ".join(str(session.out.path / name) for name in names))

        session.show = show
        scaling = measure_scaling(jobs, session.kept, not is_quiet(options), **settings)
        session.write_json("scaling.json", scaling.to_dict())
        if "scaling.svg" in names and session.out is not None:
            from headwise.bench.scaling_figure import draw_scaling

            with session.out.atomic("scaling.svg") as path:
                draw_scaling(scaling, path)
    return 0


def _print_scaling(scaling: Scaling) -> None:
    from headwise.bench.scaling import FITTED, PROJECTIONS, claim

    fits, sizes = [], []
    for name in scaling.names():
        n, forward = scaling.curve(name, "forward")
        backward, memory, counted, depth = (
            scaling.curve(name, what)[1][-1]
            for what in ("forward_backward", "forward_backward_mb", "multiply_adds", "depth")
        )
        megabytes = "" if math.isnan(memory) else f"{memory:.0f}"
        times = [f"{forward[-1]:.3g}", f"{backward:.3g}"]
        sizes.append(
            [name, str(n[-1]), *times, _softmax_ratio(scaling, name), megabytes, f"{counted:.2e}", f"{depth:g}"]
        )
        *timed, counts = (scaling.exponent(name, what) for what in FITTED)
        fits.append([name, claim(name), f"{counts.value:.2f}", *(f"{x.value:.2f} ± {x.half_width:.2f}" for x in timed)])
    headings = ["operator", "claimed", "counted", "forward", "forward + backward"]
    print_table("Exponents of n over the four longest lengths", headings, fits, no_wrap=["operator"])
    headings = ["operator", "n", "forward, s", "f + b, s", "softmax / it, at n", "MB", "mult-adds", "depth"]
    print_table("One attention, 8 heads of 64, at the longest n", headings, sizes, no_wrap=["operator"])
    by_rank = {name: scaling.by_rank(name, "forward") for name in PROJECTIONS}
    if any(by_rank.values()):
        headings = ["projection", *(f"r = {r}" for r, _ in next(iter(by_rank.values())))]
        rows = [[name, *(_seconds(x) for _, x in curve)] for name, curve in by_rank.items()]
        print_table("Forward by number of slots r", headings, rows, no_wrap=["projection"])


def _softmax_ratio(scaling: Scaling, name: str) -> str:
    """The forward time of softmax over that of an operator at the longest n that both were measured at: 12.3 (16384)"""
    ours, exact = (dict(zip(*scaling.curve(x, "forward"), strict=True)) for x in (name, "softmax"))
    both = [n for n in ours if n in exact]
    return f"{exact[max(both)] / ours[max(both)]:.2f} ({max(both)})" if both and name != "softmax" else ""


def _peers(options: argparse.Namespace) -> int:
    from headwise.bench.peers import PEERS, chosen_layers, compare_layers, measured_layers

    settings = {
        "rounds": options.rounds or (2 if options.quick else 5),
        "seconds": 5.0 if options.quick else 150.0,
    }
    lengths = _lengths(options.n, (512,) if options.quick else (1024, 4096, 16384))
    chosen_layers(min(lengths), options.layers)  # an unknown name is refused before a directory is made
    failed: dict[str, str] = {}
    missing = [peer.package for peer in PEERS.values() if not peer.installed]

    def facts(rows: list[LayerTimes], complete: bool) -> dict[str, Any]:
        found = {"rows": [asdict(row) for row in rows], "not_installed": missing, "failed": failed}
        return {"schema": 1, **found, "complete": complete}

    with _kept(options, "peers", ["peers.json"], **settings) as session:

        def rows() -> list[LayerTimes]:
            return [row for n in lengths for row in measured_layers(n, options.layers, session.kept)]

        def show(complete: bool) -> None:
            if options.json:
                print(json_text(facts(rows(), complete)))
            else:
                _print_peers(rows(), missing, failed)

        session.show = show
        with bar("measuring", len(lengths), quiet=is_quiet(options)) as advance:
            for count, n in enumerate(lengths, start=1):
                failed |= compare_layers(n, names=options.layers, kept=session.kept, **settings)[1]
                advance(count)
        session.write_json("peers.json", facts(rows(), True))
    return 0


def _print_peers(rows: list[LayerTimes], missing: list[str], failed: dict[str, str]) -> None:
    from headwise.bench.peers import OURS, PEERS

    headings = ["layer, and others of its kind", "forward, s", "f + b, s", "ratio f", "f + b"]
    for n in dict.fromkeys(row.n for row in rows):
        cells = []
        same_length = [row for row in rows if row.n == n]
        for ours in (row for row in same_length if row.name in OURS):
            others = [row for row in same_length if row.name in PEERS and row.against == ours.name]
            for row in (ours, *others):
                ratios = ["" if math.isnan(x) else f"{x:.2f}" for x in row.ratios]
                times = _timing(row.times.forward), _timing(row.times.forward_backward)
                cells.append([row.name if row is ours else f"  {row.name}", *times, *ratios])
        print_table(f"Layers of width 512, 8 heads, n = {n}", headings, cells, no_wrap=headings[:1])
    print("Ratios: for layers of headwise, softmax's time over theirs; for others, their time over that of headwise.")
    if missing:
        print("not installed:", ", ".join(missing))
    for name, error in failed.items():
        print(f"{name} failed: {error}")


def _fidelity(options: argparse.Namespace) -> int:
    from headwise.bench.fidelity import measure_fidelity, measured_fidelity, random_heads

    n = options.n or (256 if options.quick else None)
    if options.tensors is not None:
        layers = [_tensors(options.tensors)]
    elif options.model is not None:
        layers = _captured(options, n)
    else:
        layers = [random_heads(n or 2048)]

    def facts(rows: list[Fidelity], refused: dict[str, str], complete: bool) -> dict[str, Any]:
        found = {"layers": len(layers), "rows": [asdict(row) for row in rows], "refused": refused}
        return {**found, "complete": complete}

    with _kept(options, "fidelity", ["fidelity.json"]) as session:

        def show(complete: bool) -> None:
            rows, refused = measured_fidelity(layers, session.kept)
            if options.json:
                print(json_text(facts(rows, refused, complete)))
                return
            cells = [
                [r.name, f"{r.cost:.4f}", f"{r.error:.3f}", f"{r.worst:.3f}", "causal" if r.causal else ""]
                for r in rows
            ]
            shape = tuple(layers[0][1].shape)
            title = f"Distance from softmax attention, {len(layers)} layer{'s' * (len(layers) > 1)} of k {shape}"
            headings = ["operator", "relative cost", "error of P v", "worst head", "against"]
            print_table(title, headings, cells, no_wrap=["operator"])
            for name, error in refused.items():
                print(f"{name}: {error}")

        session.show = show
        rows, refused = measure_fidelity(layers, kept=session.kept, progress=not is_quiet(options))
        session.write_json("fidelity.json", facts(rows, refused, True))
    return 0


def _captured(options: argparse.Namespace, length: int | None) -> list[tuple[Any, Any, Any]]:
    """q, k and v of every self-attention of a model that reads one text, scaled so that scores are q.k / sqrt(k)."""
    import torch

    from headwise.models.inputs import text_input
    from headwise.models.intercept import AttentionCall, intercept
    from headwise.models.run import placed, run_model

    loaded = load(options)
    layers = []

    def store(call: AttentionCall) -> None:
        if call.kind == "self" and call.mask.attn_bias is None:
            call = call.measurable
            layers.append((call.q * (call.scale * math.sqrt(call.q.shape[-1])), call.k.clone(), call.v.clone()))

    batch = text_input(loaded, None, length=length, texts=1).batches[0]
    with torch.no_grad(), intercept(loaded.model, store):
        run_model(loaded.model, placed(batch, options.device, None))
    if not layers:
        raise InputError(f"{loaded.name}: no self-attention without an additive bias was intercepted; use --tensors")
    return layers


def _tensors(path: Path) -> tuple[Any, Any, Any]:
    """q, k and v of a file, checked: floating point, at least (n, width), values for every entry."""
    from torch import Tensor

    from headwise.models.gate import load_tensors

    saved = load_tensors(path)
    missing = [name for name in "qkv" if not isinstance(saved, dict) or not isinstance(saved.get(name), Tensor)]
    if missing:
        raise InputError(f"{path} must be a dictionary of tensors q, k and v, but has no tensor {missing[0]!r}")
    for name in "qkv":
        x = saved[name]
        shape = tuple(x.shape)
        if not x.is_floating_point() or x.is_sparse or x.is_quantized or x.dim() < 2 or 0 in shape:
            raise InputError(f"{path}: {name} must be (*batch, n, width) in floating point, but is {x.dtype} {shape}")
        if x.numel() * x.element_size() > x.untyped_storage().nbytes():
            raise InputError(f"{path}: {name} is {shape} but repeats fewer stored numbers; save a contiguous tensor")
        if not x.isfinite().all():
            raise InputError(f"{path}: {name} has entries that are not finite")
    q, k, v = (saved[name].detach().contiguous() for name in "qkv")
    if q.shape[:-2] != k.shape[:-2] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True))
        raise InputError(f"{path}: {shapes} do not fit; q is (*batch, m, k), k (*batch, n, k), v (*batch, n, d)")
    return q, k, v


def _lengths(requested: list[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if requested is None else tuple(requested)


def _seconds(x: float) -> str:
    return f"{1000 * x:.1f} ms" if x < 1 else f"{x:.2f} s"


def _timing(x: Timing) -> str:
    """Seconds: 0.0432 ± 0.0022"""
    if math.isnan(x.median):
        return ""
    return f"{x.median:.3g}" + ("" if math.isnan(x.spread) else f" ± {x.spread:.1g}")


def _ranks(options: argparse.Namespace) -> int:
    from headwise.bench.sharded_cases import sharded_cases
    from headwise.bench.sharded_cost import as_rows, compared, fitted_costs, projected_times
    from headwise.bench.sharded_runs import PARTS, run_sharded

    cases, names = sharded_cases(), options.operators
    for name in names or ():
        if name not in cases:
            raise InputError(f"bench: there is no operator {name!r}; there are {'; '.join(cases)}")
    settings = {"repeats": 5, "shrink": 8} if options.quick else {"repeats": 10}
    runs: dict[int, dict[str, Any]] = {}
    with bar("measuring", len(PARTS), quiet=is_quiet(options)) as advance:
        for count, size in enumerate(PARTS, start=1):
            runs[size] = run_sharded(sharded_cases, size, names=names, **settings)
            advance(count)
    costs = fitted_costs(cases, runs[1])
    rows = compared(cases, costs, runs)
    stated = {"bandwidth": options.bandwidth * 1e9, "latency": options.latency * 1e-6}
    projected = projected_times(cases, costs, runs, options.tokens, options.ranks, **stated)
    links = {size: found["link"] for size, found in runs.items() if size > 1}
    if options.json:
        facts = {"schema": 2, "links": links, "rows": as_rows(rows), "stated": stated}
        print(json_text({**facts, "projected": as_rows(projected)}))
        return 0
    headings = ["operator", "n", "processes", "seconds", "predicted", "ratio"]
    cells = [[x.name, f"{x.n}", f"{x.ranks}", f"{x.seconds:.4f}", f"{x.predicted:.4f}", f"{x.ratio:.2f}"] for x in rows]
    title = f"Processor time of forward and backward, mean of {settings['repeats']}; fitted to one process"
    print_table(title, headings, cells, no_wrap=headings[:1])
    for size, x in links.items():
        speeds = (
            f"{kind} {x['latency'][kind] * 1e6:.0f} us, {x['bandwidth'][kind] / 1e9:.2f} GB/s" for kind in x["latency"]
        )
        print(f"processor time of collectives of {size} processes here: {'; '.join(speeds)}")
    columns = [(n, size) for n in options.tokens for size in options.ranks]
    table = {(x.name, x.n, x.ranks): x for x in projected}
    cells = [[name, *(_projected(table[name, *column]) for column in columns)] for name in costs]
    title = f"Projected seconds, and the share of messages: {options.bandwidth:g} GB/s, {options.latency:g} us"
    print_table(title, ["operator", *(f"{n:.3g}, {size}" for n, size in columns)], cells, no_wrap=["operator"])
    return 0


def _projected(time: ProjectedTime) -> str:
    return "" if math.isnan(time.seconds) else f"{time.seconds:.3g} {time.communication / time.seconds:.0%}"
