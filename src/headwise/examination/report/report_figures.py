"""Figures fit for a paper, from an Examination alone: each as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.examination.measure.head_kinds import KINDS
from headwise.examination.record import Examination

COLOURS = {
    "uniform": "#999999",
    "positional": "#E69F00",
    "sink": "#CC79A7",
    "local": "#56B4E9",
    "low rank": "#009E73",
    "broad": "#F0E442",
    "dense": "#0072B2",
}
"""Okabe & Ito's colours, the same as on the page."""


def draw(examination: Examination, directory: Path) -> list[Path]:
    """kinds, effective-rank (or entropy), collapse and paths, as far as they were measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("the figures need matplotlib; pip install 'headwise[report]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figures: dict[str, Any] = {"kinds": _kinds(Figure(figsize=(6, 3.2), layout="constrained"), examination)}
    name = "effective_rank" if "effective_rank" in examination.records[0].measures else "entropy"
    figures[name.replace("_", "-")] = _map(Figure(figsize=(6, 3.6), layout="constrained"), examination, name)
    if examination.ablations.get("supported"):
        figures["collapse"] = _collapse(Figure(figsize=(5, 3.4), layout="constrained"), examination)
    if examination.paths.get("supported"):
        figures["paths"] = _paths(Figure(figsize=(5, 3), layout="constrained"), examination)
    written = []
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, figure in figures.items():
            for suffix in ("svg", "png"):
                written.append(directory / f"{name}.{suffix}")
                figure.savefig(written[-1], dpi=160, metadata={"Date": None} if suffix == "svg" else None)
    return written


def _kinds(figure: Any, examination: Examination) -> Any:
    axes = figure.subplots()
    layers = len(examination.sites)
    below = [0] * layers
    for kind in KINDS:
        counts = [sum(r.site == s and r.kind == kind for r in examination.records) for s in range(layers)]
        if any(counts):
            axes.bar(range(layers), counts, bottom=below, color=COLOURS[kind], label=kind, width=0.85)
            below = [a + b for a, b in zip(below, counts, strict=True)]
    axes.set(xlabel="layer", ylabel="heads", title=f"Kinds of heads in {examination.model['name']}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _map(figure: Any, examination: Examination, name: str) -> Any:
    axes = figure.subplots()
    heads = max(site["heads"] for site in examination.sites)
    grid = [[float("nan")] * heads for _ in examination.sites]
    for record in examination.records:
        grid[record.site][record.head] = record.measures[name].mean
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    axes.set(xlabel="head", ylabel="layer", title=name.replace("_", " "))
    figure.colorbar(image, ax=axes)
    return figure


def _collapse(figure: Any, examination: Examination) -> Any:
    axes = figure.subplots()
    for (name, curve), style in zip(examination.ablations["curves"].items(), ("-", "--", ":", "-."), strict=False):
        axes.semilogy(curve, style, marker="o", markersize=3, label=name)
    axes.set(xlabel="layer", ylabel="relative residual", title="Do tokens collapse?")
    axes.legend(frameon=False)
    return figure


def _paths(figure: Any, examination: Examination) -> Any:
    axes = figure.subplots()
    axes.bar(examination.paths["lengths"], examination.paths["share"], color="#0072B2")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="attention layers on the path", ylabel="share of the output", title="Contribution by path length")
    return figure
