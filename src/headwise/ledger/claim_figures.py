"""Four published figures, recomputed: residual by depth, path lengths, spectra and sketch sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import needs_extra
from headwise.ledger.entry import generator
from headwise.operators.linear.efficient import efficient
from headwise.operators.softmax import softmax
from headwise.theory import paths
from headwise.theory.collapse import collapse, relative_residual
from headwise.theory.concentration import Frequency, failures_of_low_rank, sketch_size
from headwise.theory.stack import Stack, random_stack

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _network(depth: int, heads: int, width: int, n: int) -> tuple[Stack, Tensor, torch.Generator]:
    """A random stack, standard normal tokens, and the generator that drew them."""
    seeded = generator()
    stack = random_stack(depth, heads, width, generator=seeded)
    return stack, torch.randn(n, width, dtype=torch.float64, generator=seeded), seeded


def depth_curves(depth: int = 12, heads: int = 12, width: int = 48, n: int = 32) -> dict[str, list[float]]:
    """Relative residual after each layer: pure attention, with an MLP, with skips, with both."""
    stack, x, seeded = _network(depth, heads, width, n)
    first, second = (
        torch.randn(depth, width, width, dtype=torch.float64, generator=seeded) * (2 / width) ** 0.5 for _ in range(2)
    )
    curves: dict[str, list[float]] = {}
    for name, skip, mlp in (("attention", 0, 0), ("+ MLP", 0, 1), ("+ skip", 1, 0), ("+ skip + MLP", 1, 1)):
        y, curve = x, [relative_residual(x).item()]
        for layer in range(depth):
            y = stack.layers[layer](y) + skip * y
            if mlp:
                y = torch.relu(y @ first[layer]) @ second[layer] + skip * y
            curve.append(relative_residual(y).item())
        curves[name] = curve
    return curves


def bound_curves(depth: int = 4, width: int = 48, n: int = 32, size: float = 1e-3) -> dict[str, list[float]]:
    """log10 of the residual of pure attention and of its bound, for inputs small enough for the bound to shrink."""
    stack, x, _ = _network(depth, 1, width, n)
    sides = collapse(stack, size * x)
    return {
        "the bound": [y / math.log(10) for y in sides.log_bound],
        "measured": [y / math.log(10) for y in sides.log_measured],
    }


def bound_of_ordinary_inputs(heads: int = 12, width: int = 48, n: int = 32) -> float:
    """log10 of the bound after one layer, for the inputs and weights of `depth_curves`."""
    stack, x, _ = _network(1, heads, width, n)
    return collapse(stack, x).log_bound[1] / math.log(10)


def path_groups(depth: int = 12, heads: int = 12, width: int = 48, n: int = 32) -> tuple[list[float], list[float]]:
    """For every length, the norm of the sum of its paths relative to the output, and its relative residual."""
    stack, x, _ = _network(depth, heads, width, n)
    groups = paths.by_length(Stack(stack.layers, skip=True), x)
    return (groups.norms() / groups.output.norm()).tolist(), groups.residuals().tolist()


def cumulative_spectra(
    lengths: tuple[int, ...] = (128, 256, 512, 1024), d: int = 16
) -> dict[str, dict[int, list[float]]]:
    """Cumulative share of the singular values for softmax and for the double softmax, by length."""
    shares: dict[str, dict[int, list[float]]] = {"softmax": {}, "double softmax": {}}
    for n in lengths:
        seeded = generator(n)
        q, k = (2 * torch.randn(n, d, dtype=torch.float64, generator=seeded) for _ in range(2))
        for name, build in (("softmax", softmax), ("double softmax", efficient)):
            values = torch.linalg.svdvals(build(q, k).dense())
            shares[name][n] = (values.cumsum(0) / values.sum()).tolist()
    return shares


SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def failure_rates(sizes: tuple[int, ...] = SIZES, n: int = 256, draws: int = 60) -> dict[str, list[Frequency]]:
    """How often a sketch of each size misses P w by more than half of ||P w||, for three kinds of w."""
    seeded = generator()
    q, k = (torch.randn(n, 16, dtype=torch.float64, generator=seeded) for _ in range(2))
    p = softmax(q, k).dense()
    w = torch.randn(n, 1, dtype=torch.float64, generator=seeded)
    vectors = {"of zero mean": w - w.mean(), "half constant": 1 + w, "nearly constant": 1 + 0.01 * w}
    return {
        name: [failures_of_low_rank(p, v, size, 0.5, draws, generator=seeded) for size in sizes]
        for name, v in vectors.items()
    }


FIGURES = ("residual-by-depth", "path-lengths", "spectra", "failures")


def figure_files() -> list[str]:
    """Names of the files that `draw` writes."""
    return [f"{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")]


def draw(directory: Path) -> list[Path]:
    """Write the figures into an existing directory, as SVG and PNG; returns their paths."""
    with needs_extra("report", "--figures"):
        import matplotlib

    matplotlib.use("Agg")

    figures: dict[str, Figure] = dict(zip(FIGURES, (_depth(), _lengths(), _spectra(), _failures()), strict=True))
    written = [directory / name for name in figure_files()]
    for file in written:
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figures[file.stem].savefig(file, dpi=150, metadata=metadata)
    return written


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _depth() -> Figure:
    left, right = (figure := _figure(10, 3.8)).subplots(1, 2)
    for (name, curve), style in zip(depth_curves().items(), ("-", "--", ":", "-."), strict=True):
        left.semilogy(curve, style, label=name)
    left.axhline(2**-52, color="0.6", linewidth=0.8)
    left.text(12, 2**-52 * 2, "rounding of float64", ha="right", fontsize=8, color="0.4")
    left.set(xlabel="layer", ylabel="relative residual", title="12 layers of 12 heads, random weights")
    left.legend(
        frameon=False,
        fontsize=8,
        title=f"bound: 1e{bound_of_ordinary_inputs():.0f} after one layer, and growing",
        title_fontsize=8,
    )
    for (name, curve), style in zip(bound_curves().items(), ("--", "-"), strict=True):
        right.plot(curve, style, marker="o", label=name, color="#0072B2" if name == "measured" else "#D55E00")
    right.set(xlabel="layer", ylabel="log10 of ||res X||", title="one head, inputs of size 0.001")
    right.set_xticks(range(5))
    right.legend(frameon=False, fontsize=8)
    return figure


def _lengths() -> Figure:
    left, right = (figure := _figure(9, 3.2)).subplots(1, 2)
    norms, residuals = path_groups()
    for axes, values, label in (
        (left, norms, "norm of their sum / output"),
        (right, residuals, "relative residual of their sum"),
    ):
        axes.bar(range(len(values)), values, color="#0072B2")
        axes.set(xlabel="heads on the path", ylabel=label, yscale="log")
    figure.suptitle("12 layers of 12 heads with skips: all 2.3e13 paths by length", fontsize=10)
    return figure


def _spectra() -> Figure:
    axes = (figure := _figure(5.6, 3.6)).subplots()
    for (name, curves), style in zip(cumulative_spectra().items(), ("-", "--"), strict=True):
        for (n, curve), colour in zip(curves.items(), ("#56B4E9", "#0072B2", "#E69F00", "#D55E00"), strict=True):
            axes.plot([(i + 1) / n for i in range(n)], curve, style, color=colour, label=f"{name}, n = {n}")
    axes.set(xlabel="index / n", ylabel="cumulative share of singular values", title="d = 16, scores of size 4")
    axes.legend(frameon=False, fontsize=7.5)
    return figure


def _failures() -> Figure:
    axes = (figure := _figure(5.6, 3.6)).subplots()
    n = 256
    for (name, rates), marker in zip(failure_rates(n=n).items(), ("o", "s", "^"), strict=True):
        low, high = zip(*((x.rate - x.interval[0], x.interval[1] - x.rate) for x in rates), strict=True)
        axes.errorbar(
            SIZES, [x.rate for x in rates], yerr=[low, high], marker=marker, markersize=4, capsize=2, label=f"w {name}"
        )
    claimed = sketch_size(n, 0.5)
    axes.axvline(claimed, color="0.6", linestyle=":")
    axes.text(claimed * 1.05, 0.5, f"the theorem's k = {claimed}", fontsize=8, color="0.4")
    axes.set(xscale="log", xlabel="sketch size k", ylabel="share of draws that fail, 99 % interval")
    axes.set_title("||PR'Rw - Pw|| <= 0.5 ||Pw||, softmax attention, n = 256", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc=(0.53, 0.16))
    return figure
