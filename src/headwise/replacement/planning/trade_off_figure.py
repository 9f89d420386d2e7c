"""The trade-off of a plan as a figure: cost against drift, the curve beside single operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.errors import needs_extra
from headwise.replacement.plans import Plan

SHOWN = ("window", "projected", "efficient", "near_far", "nystrom")
LARGEST = 0.6


def draw(plan: Plan, file: Path) -> None:
    """Write an SVG; points with a drift above LARGEST are left out."""
    with needs_extra("report", "the figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes: Any = figure.subplots()
    for kind in SHOWN:
        points = [p for p in plan.baselines if p.name.split()[0] == kind and p.drift <= LARGEST]
        points.sort(key=lambda p: p.cost)
        if points:
            label = f"{kind.replace('_', ' ')} for all heads"
            axes.plot([p.cost for p in points], [p.drift for p in points], "o--", markersize=4, label=label)
    curve = [p for p in plan.curve if 0 < p.drift <= LARGEST]
    axes.plot([p.cost for p in curve], [p.drift for p in curve], "k.-", linewidth=2, label="chosen head by head")
    axes.set(xscale="log", yscale="log", xlabel="attention cost, share of softmax attention")
    axes.set_ylabel(f"drift on test texts ({plan.measure})")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file)
