"""`headwise monitor HISTORY.json`: what a Monitor saw during training, and a page with a slider over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.cli.options import Parser, add_force, add_json, add_output, file_path
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.outputs import json_text

if TYPE_CHECKING:
    from headwise.examination.monitor import History

ALARMS = 20
"""Alarms that are printed."""


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="headwise monitor",
        description="What headwise.Monitor measured during training: the alarms, and how each layer changed.",
    )
    parser.add_argument("history", type=file_path, metavar="HISTORY", help="a file written by Monitor.save")
    add_output(parser, help="write history.html, a page with a slider over steps, and history.json")
    add_force(parser)
    add_json(parser)
    options = parser.parse_args(argv)

    from headwise.examination.monitor import History
    from headwise.examination.monitor.history_page import write_history

    history = History.load(options.history)
    if not history.steps:
        raise InputError(f"{options.history} holds no measurement; train for at least one step that is measured")
    written = [] if options.out is None else write_history(history, options.out, force=options.force)
    if options.json:
        print(json_text(history.to_dict()))
        return 0
    _print(history)
    if written:
        print(f"\nThe page is {written[0]}")
    return 0


def _print(history: History) -> None:
    from headwise.examination.monitor.history import layer_names

    print(f"{history.model}: {len(history)} measurements of {len(history.heads)} heads, ", end="")
    print(f"steps {history.steps[0]} to {history.steps[-1]}")
    for alarm in history.alarms[:ALARMS]:
        print(f"step {alarm.step}, {alarm.kind} in {alarm.message}")
    if len(history.alarms) > ALARMS:
        print(f"and {len(history.alarms) - ALARMS} more alarms")
    if not history.alarms:
        print("no alarm")
    layers = list(dict.fromkeys(head.layer for head in history.heads))
    places = [[i for i, head in enumerate(history.heads) if head.layer == layer] for layer in layers]
    logits, shares = history.series("max_logit"), history.series("entropy_share")
    rows = [
        (
            name,
            f"{logits[0, of_layer].max():.3g}",
            f"{logits[-1, of_layer].max():.3g}",
            f"{logits[:, of_layer].nan_to_num(nan=-float('inf')).max():.3g}",
            f"{shares[0, of_layer].nanmean():.2f}",
            f"{shares[-1, of_layer].nanmean():.2f}",
        )
        for name, of_layer in zip(layer_names(layers), places, strict=True)
    ]
    headings = ("layer", "logit, first", "last", "largest", "entropy share, first", "last ")
    print_table("Largest score, and mean share of the possible entropy", headings, rows)
