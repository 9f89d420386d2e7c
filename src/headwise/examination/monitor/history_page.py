"""A History as files: history.html, a page with a slider over steps (one file, no network), and history.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.errors import InputError
from headwise.examination.monitor.history import MEASURES, NAMES, Head, History, layer_names
from headwise.examination.report.page import assembled_page
from headwise.output_directory import OutputDirectory, directory_for
from headwise.outputs import json_text

MOST_STEPS = 240
"""Steps on the page; of more, evenly spaced ones and those with an alarm."""

NAMES_OF_FILES = ["history.html", "history.json"]


def write_history(history: History, directory: str | Path | OutputDirectory, *, force: bool = False) -> list[Path]:
    """Write history.html and history.json in `directory`; an earlier page there is replaced with `force`."""
    page = history_page(history)
    with directory_for(directory, command="monitor", names=NAMES_OF_FILES, force=force) as out:
        out.write_text("history.json", json_text(history.to_dict()))
        out.write_text("history.html", page)
        return [out.path / name for name in NAMES_OF_FILES]


def history_page(history: History) -> str:
    """The whole page as one string, with styles, script and data."""
    if not history.steps:
        raise InputError("history: there is no measurement to show; run at least one step that is measured")
    facts = history.to_dict()
    chosen = _shown_steps(history)
    layers = list(dict.fromkeys(head.layer for head in history.heads))
    labels = dict(zip(layers, layer_names(layers), strict=True))
    order = sorted(
        range(len(history.heads)), key=lambda i: (layers.index(history.heads[i].layer), history.heads[i].head)
    )
    index = {history.heads[i]: place for place, i in enumerate(order)}
    data = {
        "kinds": {},
        "heads": [
            {"layer": head.layer, "label": labels[head.layer] or "attention", "head": head.head}
            for head in (history.heads[i] for i in order)
        ],
        "steps": [history.steps[place] for place in chosen],
        "measures": [{"name": m.name, "unit": m.unit, "meaning": m.meaning} for m in MEASURES],
        "values": {name: [_row(facts["values"][name][place], order) for place in chosen] for name in NAMES},
        "losses": _thinned(facts["losses"]),
        "alarms": _alarms(history, chosen, index),
        "left_out": len(history) - len(chosen),
    }
    count = len({(alarm.layer, alarm.head) for alarm in history.alarms})
    words = "1 alarm" if len(history.alarms) == 1 else f"{len(history.alarms)} alarms"
    return assembled_page(
        "history.html",
        ["basics.js", "pictures.js", "history.js"],
        data,
        title=history.model or "model",
        subtitle=f"{len(history.heads)} heads in {len(layers)} layers, {len(history)} measurements, steps "
        f"{history.steps[0]} to {history.steps[-1]}",
        alarms=f"{words} about {count} of {len(history.heads)} heads" if history.alarms else "",
        version=__version__,
    )


def _shown_steps(history: History) -> list[int]:
    """Places in `steps`: all, or evenly spaced ones, the last, and those with an alarm."""
    count = len(history)
    if count <= MOST_STEPS:
        return list(range(count))
    alarmed = {alarm.step for alarm in history.alarms}
    places = {round(i * (count - 1) / (MOST_STEPS - 1)) for i in range(MOST_STEPS)}
    return sorted(places | {place for place, step in enumerate(history.steps) if step in alarmed})


def _row(numbers: list[float | None], order: list[int]) -> list[float | None]:
    short = [None if x is None else float(f"{x:.4g}") for x in numbers]
    return [short[i] if i < len(short) else None for i in order]


def _thinned(losses: list[Any]) -> list[Any]:
    if len(losses) <= MOST_STEPS:
        return losses
    return [losses[round(i * (len(losses) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]


def _alarms(history: History, chosen: list[int], index: dict[Head, int]) -> list[dict[str, Any]]:
    """Alarms with the places of their step and of their head on the page."""
    place = {history.steps[of_history]: of_page for of_page, of_history in enumerate(chosen)}
    return [
        {
            "step": alarm.step,
            "kind": alarm.kind,
            "message": alarm.message,
            "place": place[alarm.step],
            "index": index[Head(alarm.layer, alarm.head)],
        }
        for alarm in history.alarms
        if alarm.step in place and Head(alarm.layer, alarm.head) in index
    ]
