"""Time against n on logarithmic axes, one line per operator of a `Scaling`."""

from __future__ import annotations

from pathlib import Path

from headwise.bench.scaling import Scaling
from headwise.errors import needs_extra

PASSES = ("forward", "forward_backward")


def draw_scaling(scaling: Scaling, path: Path) -> None:
    """Forward on the left, forward and backward on the right; the suffix of `path` is the format."""
    with needs_extra("report", "the figure"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6), sharey=True)
    marks, colors = "osv^D<>pP*Xd+", pyplot.get_cmap("tab20")
    names = scaling.names()
    for axis, what in zip(axes, PASSES, strict=True):
        for i, name in enumerate(names):
            n, seconds = scaling.curve(name, what)
            style = {"marker": marks[i % len(marks)], "color": colors((2 * i + (i >= 10)) % 20)}
            axis.loglog(n, seconds, markersize=5, linewidth=1.2, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("n")
        axis.set_title(what.replace("_", " and "))
        axis.grid(True, which="major", linewidth=0.3)
    axes[0].set_ylabel("seconds")
    handles = axes[0].get_legend_handles_labels()[0]
    labels = [_label(scaling, name) for name in names]
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * -(-len(names) // 4), 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def _label(scaling: Scaling, name: str) -> str:
    """The name and the two exponents."""
    if len(scaling.curve(name, "forward")[0]) < 2:
        return name
    return f"{name}: n^{' / '.join(f'{scaling.exponent(name, what).value:.2f}' for what in PASSES)}"
