"""`headwise plan`: the cheapest operator for every head of a model within a tolerance, and the whole trade-off."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError

if TYPE_CHECKING:
    from headwise.replacement.plan import Plan, Point

TOLERANCES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    plan = _plan(options, "headwise plan " + shlex.join(argv))
    out = Path(options.out)
    files = plan.save(out)
    if not options.json:
        from headwise.replacement.planning.trade_off_figure import draw

        files.append(draw(plan, out / "trade-off.svg"))
    if options.report is not None:
        from headwise.examination.report.page import add_plan

        files.append(add_plan(options.report, plan.to_dict()))
    shutil.rmtree(_work(out), ignore_errors=True)
    print(json.dumps(plan.to_dict(), allow_nan=False)) if options.json else _print(plan, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headwise plan",
        description="Choose for every head the cheapest operator that keeps the model's answer: fitted on some texts, "
        "chosen by others, reported on a third part.",
        epilog="Then: headwise rewrite MODEL --plan DIR -o NEW",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as in `headwise examine`; default all-MiniLM-L6-v2")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="plain text (default: a text that ships)")
    data.add_argument("--images", type=Path, metavar="DIR", help="a directory of pictures")
    data.add_argument("--tokens", type=int, metavar="N", help="random tokens, N in each text")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, metavar="T", help="largest drift allowed (default: %(default)s)"
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens a text (default: 512 or the model's most)")
    parser.add_argument("--texts", type=int, metavar="K", help="at most K texts (default: 28; with --quick 12)")
    parser.add_argument("--quick", action="store_true", help="fewer candidates, steps and texts: minutes less")
    parser.add_argument(
        "--price", choices=("multiply_adds", "seconds"), default="multiply_adds", help="what is to be made small"
    )
    parser.add_argument(
        "--transfer", type=int, default=0, metavar="STEPS", help="train the chosen operators so many steps further"
    )
    parser.add_argument("-o", "--out", default="headwise-plan", metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="add a view of the plan to the page that examine wrote there",
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow-pickle", action="store_true", help="load pickled weights; they can run code")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def _plan(options: argparse.Namespace, command: str) -> Plan:
    from headwise.cli.progress import bar
    from headwise.models.load import load_model
    from headwise.replacement.planning.effort import QUICK, Effort
    from headwise.replacement.planning.make_plan import plan

    with bar("loading the model", None, quiet=options.json):
        loaded = load_model(
            options.model, allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code
        )
    batches, described = _feed(loaded, options)
    if options.report is not None and not (options.report / "report.json").is_file():
        raise InputError(f"--report {options.report}: no report.json in it; run `headwise examine -o DIR` first")
    work = _work(Path(options.out))
    if not options.resume:
        shutil.rmtree(work, ignore_errors=True)
    with _bars(quiet=options.json) as progress:
        return plan(
            loaded.model,
            batches,
            tolerance=options.tolerance,
            length=options.length,
            price=options.price,
            effort=QUICK if options.quick else Effort(),
            transfer=options.transfer,
            seed=options.seed,
            name=loaded.name,
            made={"command": command, "data": described},
            work=work,
            progress=progress,
        )


def _feed(loaded: Any, options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    from headwise.models import inputs as feed

    texts = options.texts if options.texts is not None else 12 if options.quick else 28
    if options.transfer < 0:
        raise InputError(f"--transfer is {options.transfer}; it must be at least 0")
    if texts < 1:
        raise InputError(f"--texts is {texts}; it must be at least 1")
    if loaded.batches is not None:
        return list(loaded.batches)[:texts], {"kind": "the factory's own batches"}
    if options.images is not None:
        fed = feed.image_input(loaded, options.images, limit=texts)
    elif options.tokens is not None:
        fed = feed.random_tokens(loaded, options.tokens, texts=texts, seed=options.seed)
    else:
        fed = feed.text_input(loaded, options.text, length=options.length, texts=texts)
    return list(fed.batches), fed.description


def _work(out: Path) -> Path:
    """Where fits and drifts are kept until the plan is written."""
    return out / ".unfinished"


@contextmanager
def _bars(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """One bar after the other, as the search says what it is doing."""
    from headwise.cli.progress import bar

    with ExitStack() as outer:
        state: dict[str, Any] = {"what": None, "stack": None, "advance": None}

        def progress(what: str, done: int, total: int) -> None:
            if what != state["what"]:
                if state["stack"] is not None:
                    state["stack"].close()
                state["stack"] = outer.enter_context(ExitStack())
                state["advance"] = state["stack"].enter_context(bar(what, total, quiet=quiet))
                state["what"] = what
            state["advance"](done)

        yield progress


def _print(plan: Plan, files: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{plan.model['name']}: attention cost against drift", title_justify="left")
    headings = ("tolerance", f"cost at {plan.length}", "at 4096", "drift", "on test", "best single operator")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[-1] else "right", no_wrap=True)
    chosen, last = plan.point, None
    for tolerance in sorted({*TOLERANCES, plan.tolerance}):
        point = plan.at(tolerance).point
        if point is None or (point is last and tolerance != plan.tolerance):
            continue
        row = (
            ("→ " if tolerance == plan.tolerance else "") + f"{tolerance:g}",
            f"{point.cost:.1%}",
            f"{plan.cost(4096, point.sites):.2%}",
            f"{point.selection:.4f}",
            f"{point.test:.4f}",
            _best_single(plan, point),
        )
        table.add_row(*row, style="bold" if tolerance == plan.tolerance else None)
        last = point
    console.print(table)
    timing = plan.timing
    console.print(f"On this machine attention takes {timing['ratio']:.0%} of the exact time at {plan.length}.")
    if timing["ratio"] > 1 and plan.made.get("price") != "seconds":
        console.print("Multiply-adds are not time: short sequences gain nothing; --price seconds plans by the clock.")
    if chosen is not None and chosen.test is not None and chosen.test > plan.tolerance:
        console.print(f"On the test texts the drift is {chosen.test:.4f}, above the tolerance of {plan.tolerance:g}.")
    for site, why in plan.left.items():
        console.print(f"left as it is: {site}: {why}")
    for file in files:
        console.print(str(file), highlight=False, soft_wrap=True)


def _best_single(plan: Plan, point: Point) -> str:
    """The single-operator plan with the least drift among those at most as dear."""
    cheap = [other for other in plan.baselines if other.cost <= point.cost * (1 + 1e-9)]
    if not cheap:
        return "none is as cheap"
    best = min(cheap, key=lambda other: other.test if other.test is not None else other.selection)
    return f"{best.test:.4f} {best.name.split()[0]}"
