"""Figures for a paper, made from an Examination: each as SVG and PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from headwise.errors import needs_extra
from headwise.examination.measure.head_kinds import KINDS
from headwise.examination.record import Examination
from headwise.models.inputs import in_words

COLOURS = {
    "induction": "#D55E00",
    "duplicate token": "#882255",
    "delimiter": "#AA4499",
    "retrieval": "#332288",
    "uniform": "#999999",
    "positional": "#E69F00",
    "sink": "#CC79A7",
    "local": "#56B4E9",
    "low rank": "#009E73",
    "broad": "#F0E442",
    "dense": "#0072B2",
}
"""Colours of Okabe & Ito, and some of Tol's, which most colour-blind readers can tell apart; also used on the page."""

LETTERS = {"low rank": "R", "duplicate token": "T", "delimiter": ";", "retrieval": "F"}
"""Where the initial of a kind is taken."""


FIGURES = ("kinds", "effective-rank", "entropy", "collapse", "paths")


def figure_names() -> list[str]:
    """Names of all files that `draw` may make."""
    return [f"{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")]


def draw(examination: Examination) -> dict[str, bytes]:
    """file name -> content: kinds, effective-rank (or entropy), collapse and paths, as far as they were measured."""
    with needs_extra("report", "the report"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    measure = "effective_rank" if "effective_rank" in examination.records[0].measures else "entropy"
    drawings: dict[str, Callable[[Any], None]] = {
        "kinds": lambda axes: _kinds(axes, examination),
        measure.replace("_", "-"): lambda axes: _map(axes, examination, measure),
    }
    if examination.ablations.get("supported"):
        drawings["collapse"] = lambda axes: _collapse(axes, examination)
    if examination.paths.get("supported"):
        drawings["paths"] = lambda axes: _paths(axes, examination)
    files: dict[str, bytes] = {}
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, drawing in drawings.items():
            figure = Figure(figsize=(6, 3.4), layout="constrained")
            drawing(figure.subplots())
            for suffix in ("svg", "png"):
                content = io.BytesIO()
                metadata = {"Date": None} if suffix == "svg" else None
                figure.savefig(content, format=suffix, dpi=160, metadata=metadata)
                files[f"{name}.{suffix}"] = content.getvalue()
    return files


def _literal(text: str) -> str:
    """`text` for a figure, in which matplotlib finds no formula and no character that it cannot write."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text).replace("$", r"\$")


def _kinds(axes: Any, examination: Examination) -> None:
    layers = len(examination.sites)
    below = [0] * layers
    for kind in KINDS:
        counts = [sum(r.site == s and r.kind == kind for r in examination.records) for s in range(layers)]
        if any(counts):
            axes.bar(range(layers), counts, bottom=below, color=COLOURS[kind], label=kind, width=0.85)
            below = [a + b for a, b in zip(below, counts, strict=True)]
    title = f"Kinds of heads in {_literal(examination.model['name'])}"
    axes.set(xlabel="layer", ylabel="heads", title=f"{title} ({_count(examination, examination.inputs['texts'])})")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _map(axes: Any, examination: Examination, name: str) -> None:
    heads = max(site["heads"] for site in examination.sites)
    grid = [[float("nan")] * heads for _ in examination.sites]
    for record in examination.records:
        grid[record.site][record.head] = record.measures[name].mean
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    measured = _count(examination, max(record.measures[name].texts for record in examination.records))
    axes.set(xlabel="head", ylabel="layer", title=f"{name.replace('_', ' ')} (mean of {measured})")
    axes.figure.colorbar(image, ax=axes)


def _collapse(axes: Any, examination: Examination) -> None:
    curves = examination.ablations["curves"]
    for (name, curve), style in zip(curves.items(), ("-", "--", ":", "-."), strict=False):
        axes.plot(curve, style, marker="o", markersize=3, label=name)
    if any(x > 0 for curve in curves.values() for x in curve):  # one token differs from no other
        axes.set_yscale("log")
    axes.set(xlabel="layer", ylabel="relative residual", title=f"Relative residual by layer ({_count(examination, 1)})")
    axes.legend(frameon=False)


def _paths(axes: Any, examination: Examination) -> None:
    axes.bar(examination.paths["lengths"], examination.paths["share"], color="#0072B2")
    axes.axhline(0, color="black", linewidth=0.5)
    title = f"Contribution by path length ({_count(examination, 1)})"
    axes.set(xlabel="attention layers on the path", ylabel="share of the output", title=title)


def _count(examination: Examination, texts: int) -> str:
    return in_words("one text" if texts == 1 else f"{texts} texts", examination.inputs.get("words", {}))
