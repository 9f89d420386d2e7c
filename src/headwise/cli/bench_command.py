"""`headwise bench scaling | peers | targets | fidelity`: what attention costs, measured here and now."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.progress import bar
from headwise.errors import InputError

if TYPE_CHECKING:
    from headwise.bench.scaling import Scaling


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.rounds is not None and options.rounds < 1:
        raise InputError(f"--rounds must be at least 1, but is {options.rounds}")
    return {"scaling": _scaling, "peers": _peers, "targets": _targets, "fidelity": _fidelity}[options.what](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headwise bench", description="What attention costs, measured here and now.")
    parts = parser.add_subparsers(dest="what", required=True, metavar="scaling | peers | targets | fidelity")
    scaling = parts.add_parser("scaling", help="every operator over n: time, memory, operations, fitted exponents")
    scaling.add_argument("--operators", nargs="+", metavar="NAME", help="some of them (default: all)")
    peers = parts.add_parser("peers", help="the same layer by other installed packages, as ratios in one run")
    peers.add_argument("--layers", nargs="+", metavar="NAME", help="some of them, ours and others' (default: all)")
    targets = parts.add_parser("targets", help="every speed that was asked for, beside what is reached here")
    targets.add_argument("--only", nargs="+", metavar="RACE", help="some of the comparisons (default: all)")
    for part in (scaling, targets):
        part.add_argument("-o", "--out", type=Path, default=Path("headwise-bench"), metavar="DIR")
        part.add_argument("--fresh", action="store_true", help="measure again what an earlier run has measured")
    fidelity = parts.add_parser("fidelity", help="distance from exact attention against cost")
    fidelity.add_argument(
        "--model",
        nargs="?",
        const="",
        metavar="MODEL",
        help="q, k and v of every layer of a model that reads a text (default: all-MiniLM-L6-v2)",
    )
    fidelity.add_argument(
        "--tensors", type=Path, metavar="FILE", help="q, k and v (*batch, n, width) saved by torch.save as a dictionary"
    )
    for part, lengths in ((scaling, True), (peers, True), (targets, True), (fidelity, False)):
        part.add_argument("--n", nargs="+" if lengths else None, type=int, metavar="N", help="lengths")
        part.add_argument("--quick", action="store_true", help="short lengths, few rounds")
        part.add_argument("--rounds", type=int, default=None, metavar="R")
        part.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _scaling(options: argparse.Namespace) -> int:
    from headwise.bench.scaling import LENGTHS, QUICK, collect, jobs

    lengths = _lengths(options.n, QUICK if options.quick else LENGTHS)
    rounds, seconds = options.rounds or (2 if options.quick else 5), 20.0 if options.quick else 60.0
    todo = jobs(options.operators, lengths, ranks=options.operators is None)
    _make(options.out)
    store = options.out / "scaling.jsonl"
    if options.fresh:
        store.unlink(missing_ok=True)
    with bar("measuring", len(todo), quiet=options.json) as advance:
        scaling = collect(todo, store, advance, rounds=rounds, seconds=seconds, together=options.quick)
    files = [options.out / "scaling.json", *_figure(scaling, options.out / "scaling.svg")]
    files[0].write_text(json.dumps(scaling.to_dict(), indent=1))
    if options.json:
        print(json.dumps(scaling.to_dict()))
        return 0
    _print_scaling(scaling)
    print("written:", ", ".join(map(str, files)))
    return 0


def _figure(scaling: Scaling, path: Path) -> list[Path]:
    try:
        from headwise.bench.scaling_figure import draw

        return [draw(scaling, path)]
    except ImportError:
        return []  # matplotlib is an extra


def _print_scaling(scaling: Scaling) -> None:
    from headwise.bench.scaling import PROJECTIONS, claim

    fits, sizes = [], []
    for name in scaling.names():
        n, seconds = scaling.curve(name, "forward")
        both, memory, counted, depth = (
            scaling.curve(name, what)[1][-1] for what in ("both", "both_mb", "multiply_adds", "depth")
        )
        megabytes = "" if math.isnan(memory) else f"{memory:.0f}"
        sizes.append(
            [name, str(n[-1]), _seconds(seconds[-1]), _seconds(both), megabytes, f"{counted:.2e}", f"{depth:g}"]
        )
        found = [scaling.exponent(name, what) for what in ("multiply_adds", "forward", "both")]
        cells = [f"{x.value:.2f} ± {x.half_width:.2f}" for x in found[1:]]
        fits.append([name, claim(name)[0], f"{found[0].value:.2f}", *cells])
    head = ["operator", "claimed", "counted", "forward", "forward + backward"]
    _table("Exponents of n over the four longest lengths", head, fits)
    head = ["operator", "n", "forward", "f + b", "MB", "mult-adds", "depth"]
    _table("One attention, 8 heads of 64, at the longest n", head, sizes)
    ranked = [(name, scaling.by_rank(name, "forward")) for name in PROJECTIONS]
    if any(x for _, x in ranked):
        ranks = [str(r) for r, _ in ranked[0][1]]
        rows = [[name, *(_seconds(x) for _, x in curve)] for name, curve in ranked]
        _table("Forward by number of slots r", ["projection", *(f"r = {r}" for r in ranks)], rows)


def _peers(options: argparse.Namespace) -> int:
    from headwise.bench.peers import OURS, absent, compare

    rounds = options.rounds or (2 if options.quick else 5)
    lengths = _lengths(options.n, (512,) if options.quick else (1024, 4096, 16384))
    rows, failed = [], {}
    with bar("measuring", len(lengths), quiet=options.json) as advance:
        for count, n in enumerate(lengths, start=1):
            more, wrong = compare(n, names=options.layers, rounds=rounds, seconds=5.0 if options.quick else 150.0)
            rows, failed = rows + more, {**failed, **wrong}
            advance(count)
    missing = [peer.package for peer in absent()]
    if options.json:
        print(json.dumps({"rows": [row.to_dict() for row in rows], "absent": missing, "failed": failed}))
        return 0
    for n in lengths:
        there = [row for row in rows if row.n == n]
        own = [row for row in there if row.name in OURS]
        head = ["layer, and others' of its kind", "forward, ms", "f + b, ms", "ratio f", "f + b"]
        cells = []
        for mine in own:
            for row in [mine, *(row for row in there if row not in own and row.against == mine.name)]:
                name = row.name if row is mine else f"  {row.name}"
                ratios = ["" if math.isnan(x) else f"{x:.2f}" for x in (row.ratio_forward, row.ratio_both)]
                cells.append([name, _timing(row.forward), _timing(row.both), *ratios])
        _table(f"Layers of width 512, 8 heads, n = {n}", head, cells)
    print("Ratios: of ours, exact's time over theirs; of the others, their time over ours above them.")
    if missing:
        print("absent:", ", ".join(missing))
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    return 0


def _targets(options: argparse.Namespace) -> int:
    from headwise.bench import races, scaling
    from headwise.bench.targets import RACES, exponent_rows, rows

    names = list(dict.fromkeys(race.name for race in RACES))
    if unknown := [name for name in options.only or () if name not in names]:
        raise InputError(f"bench targets: no comparison {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [
        replace(race, n=min(race.n, 512)) if options.quick else race
        for race in RACES
        if (options.only is None or race.name in options.only) and (options.n is None or race.n in options.n)
    ]
    _make(options.out)
    store = options.out / ("targets-quick.jsonl" if options.quick else "targets.jsonl")
    if options.fresh:
        store.unlink(missing_ok=True)
    with bar("measuring", len(chosen), quiet=options.json) as advance:
        results = races.collect(
            chosen,
            store,
            advance,
            rounds=options.rounds or (1 if options.quick else 5),
            seconds=1.0 if options.quick else 30.0,
        )
    found = rows(results, chosen)
    known = scaling.load(options.out / "scaling.jsonl")
    if options.only is None and options.n is None and not options.quick:
        found += exponent_rows(scaling.Scaling(known))
    if options.json:
        print(json.dumps({"rows": [row.to_dict() for row in found]}))
        return 0
    number = lambda x: "absent" if x is None else f"{x:.2f}"  # noqa: E731
    verdict = {True: "yes", False: "no", None: ""}
    cells = [
        [row.what, str(row.n or ""), row.asked, number(row.forward), number(row.both), verdict[row.met]]
        for row in found
    ]
    _table("How many times as fast", ["what", "n", "asked", "forward", "f + b", "met"], cells)
    if not known:
        print(f"no exponents: run `headwise bench scaling -o {options.out}` first")
    return 0


def _fidelity(options: argparse.Namespace) -> int:
    from headwise.bench.fidelity import fidelity_over, random_heads

    n = options.n or (256 if options.quick else None)
    if options.tensors is not None:
        layers = [_tensors(options.tensors)]
    elif options.model is not None:
        layers = _captured(options.model or None, n)
    else:
        layers = [random_heads(_lengths([n or 2048], ())[0])]
    rows, refused = fidelity_over(layers)
    if options.json:
        print(json.dumps({"layers": len(layers), "rows": [row.to_dict() for row in rows], "refused": refused}))
        return 0
    cells = [[r.name, f"{r.cost:.4f}", f"{r.error:.3f}", f"{r.worst:.3f}", "causal" if r.causal else ""] for r in rows]
    shape = tuple(layers[0][1].shape)
    title = f"Distance from exact attention, {len(layers)} layer{'s' * (len(layers) > 1)} of k {shape}"
    _table(title, ["operator", "cost / exact", "error of P v", "worst head", "against"], cells)
    for name, why in refused.items():
        print(f"{name}: {why}")
    return 0


def _captured(model: str | None, length: int | None) -> list[tuple[Any, Any, Any]]:
    """q, k and v of every self-attention of a model that reads one text, as it really scores them."""
    import torch

    from headwise.models.inputs import text_input
    from headwise.models.intercept import AttentionCall, intercept
    from headwise.models.load import load_model

    loaded = load_model(model)
    found = []

    def see(call: AttentionCall) -> None:
        if call.kind == "self" and call.mask.attn_bias is None:
            # operators divide by sqrt(k), whatever the model does
            found.append((call.q * (call.scale * math.sqrt(call.q.shape[-1])), call.k.clone(), call.v.clone()))

    batch = text_input(loaded, None, length=length, texts=1).batches[0]
    with torch.no_grad(), intercept(loaded.model, see):
        loaded.model(**batch)
    if not found:
        raise InputError(f"{loaded.name} has no self-attention of q and k alone that can be seen; use --tensors")
    return found


def _tensors(path: Path) -> tuple[Any, Any, Any]:
    import torch

    try:
        saved = torch.load(path, weights_only=True)
        return saved["q"], saved["k"], saved["v"]
    except (OSError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path}: needs a dictionary of tensors q, k and v saved by torch.save ({error})") from error


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror or error}; choose another directory with -o"
        ) from error


def _lengths(given: list[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    lengths = default if given is None else tuple(given)
    if min(lengths) < 2:
        raise InputError(f"--n must be at least 2, but is {min(lengths)}")
    return lengths


def _seconds(x: float) -> str:
    return f"{1000 * x:.1f} ms" if x < 1 else f"{x:.2f} s"


def _timing(x: Any) -> str:
    """Milliseconds: 43.2 ± 2.2"""
    return f"{1000 * x.median:.4g}" + ("" if math.isnan(x.spread) else f" ± {1000 * x.spread:.2g}")


def _table(title: str, head: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    short = max((len(row[0]) for row in rows), default=0) <= 32  # a longer name may be folded, a figure never
    for index, heading in enumerate(head):
        table.add_column(heading, no_wrap=short or index > 0, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
