"""The trade-off of a plan as a figure: cost against drift, the curve beside single operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.errors import needs_extra
from headwise.replacement.plans import Plan

LARGEST = 0.6


def draw(plan: Plan, file: Path) -> None:
    """Write an SVG; points with a drift above LARGEST are left out."""
    with needs_extra("report", "the figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes: Any = figure.subplots()
    curve = [p for p in plan.curve if 0 < p.bound <= LARGEST]
    axes.plot([p.cost for p in curve], [p.bound for p in curve], "k.-", linewidth=2, label="bound for any text")
    axes.plot([p.cost for p in curve], [p.largest for p in curve], ".--", label="largest measured")
    scale = "log" if any(p.largest > 0 for p in curve) else "linear"  # a plan may be exact attention only
    axes.set(xscale=scale, yscale=scale, xlabel="attention cost, share of softmax attention")
    axes.set_ylabel(f"drift ({plan.measure})")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file)
