"""Time against n on logarithmic axes, one line an operator; drawn from a `Scaling`, never beside it."""

from __future__ import annotations

from pathlib import Path

from headwise.bench.scaling import Scaling


def draw(scaling: Scaling, path: Path) -> Path:
    """Forward on the left, forward and backward on the right, as SVG or PNG by the ending of `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    marks = "osv^D<>pP*Xd+"
    for axis, what, title in zip(axes, ("forward", "both"), ("forward", "forward and backward"), strict=True):
        for i, name in enumerate(scaling.names()):
            n, seconds = scaling.curve(name, what)
            label = f"{name}: n^{scaling.exponent(name, what).value:.2f}" if len(n) > 1 else name
            axis.loglog(n, seconds, marker=marks[i % len(marks)], markersize=4, linewidth=1, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("n")
        axis.set_title(title)
        axis.grid(True, which="both", linewidth=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("seconds")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
