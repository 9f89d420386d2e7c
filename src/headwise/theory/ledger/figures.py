"""Four figures of the sources, made again from numbers: depth, path lengths, spectra and sketch sizes."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from headwise.operators.efficient import efficient
from headwise.operators.softmax import softmax
from headwise.theory import paths
from headwise.theory.collapse import collapse
from headwise.theory.concentration import failures_of_low_rank
from headwise.theory.residual import relative_residual
from headwise.theory.stack import Stack, random_stack


def depth_curves(depth: int = 12, heads: int = 12, width: int = 48, n: int = 32) -> dict[str, list[float]]:
    """Relative residual after each layer: pure attention, with an MLP, with skips, with both."""
    generator = torch.Generator().manual_seed(0)
    stack = random_stack(depth, heads, width, generator=generator)
    x = torch.randn(n, width, dtype=torch.float64, generator=generator)
    first, second = (
        torch.randn(depth, width, width, dtype=torch.float64, generator=generator) * (2 / width) ** 0.5
        for _ in range(2)
    )
    curves: dict[str, list[float]] = {}
    for name, skip, mlp in (("attention", 0, 0), ("+ MLP", 0, 1), ("+ skip", 1, 0), ("+ skip + MLP", 1, 1)):
        y, found = x, [relative_residual(x).item()]
        for layer in range(depth):
            y = stack.layers[layer](y) + skip * y
            if mlp:
                y = torch.relu(y @ first[layer]) @ second[layer] + skip * y
            found.append(relative_residual(y).item())
        curves[name] = found
    return curves


def bound_curves(depth: int = 5, width: int = 48, n: int = 32, size: float = 1e-3) -> dict[str, list[float]]:
    """log10 of the residual of pure attention and of its bound, for inputs small enough for the bound to shrink."""
    generator = torch.Generator().manual_seed(0)
    stack = random_stack(depth, 1, width, generator=generator)
    found = collapse(stack, size * torch.randn(n, width, dtype=torch.float64, generator=generator))
    return {
        "measured": [x / math.log(10) for x in found.log_measured],  # ends where only rounding is left
        "bound": [x / math.log(10) for x in found.log_bound],
    }


def path_shares(depth: int = 12, heads: int = 12, width: int = 48, n: int = 32) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    stack = Stack(random_stack(depth, heads, width, generator=generator).layers, skip=True)
    x = torch.randn(n, width, dtype=torch.float64, generator=generator)
    groups = paths.by_length(stack, x)
    return (groups.by_length.norm(dim=(-2, -1)) / groups.output.norm()).tolist()


def cumulative_spectra(lengths: tuple[int, ...] = (128, 512), d: int = 16) -> dict[str, list[float]]:
    """Cumulative share of the singular values, against the index over n, for softmax and for the double softmax."""
    found = {}
    for n in lengths:
        generator = torch.Generator().manual_seed(n)
        q, k = (2 * torch.randn(n, d, dtype=torch.float64, generator=generator) for _ in range(2))
        for name, build in (("softmax", softmax), ("double softmax", efficient)):
            values = torch.linalg.svdvals(build(q, k).dense())
            found[f"{name}, n = {n}"] = (values.cumsum(0) / values.sum()).tolist()
    return found


def failure_rates(sizes: tuple[int, ...] = (8, 32, 128, 512), n: int = 256) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    p = softmax(q, k).dense()
    w = torch.randn(n, 1, dtype=torch.float64, generator=generator)
    vectors = {"zero mean": w - w.mean(), "nearly constant": 1 + 0.01 * w}
    return {
        name: [failures_of_low_rank(p, v, size, 0.5, 30, generator=generator).rate for size in sizes]
        for name, v in vectors.items()
    }


def draw(directory: Path) -> list[Path]:
    """residual-by-depth, path-lengths, spectra and failures, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    figures = {}
    axes, beside = (figure := Figure(figsize=(9, 3.4), layout="constrained")).subplots(1, 2)
    for (name, curve), style in zip(depth_curves().items(), ("-", "--", ":", "-."), strict=True):
        axes.semilogy(curve, style, label=name)
    axes.set(xlabel="layer", ylabel="relative residual", title="12 layers of 12 heads, random weights")
    axes.legend(frameon=False, fontsize=8)
    for name, curve in bound_curves().items():
        beside.plot(curve, marker="o", label=name)
    beside.set(xlabel="layer", ylabel="log10 of the residual", title="one head, inputs of size 0.001, and the bound")
    beside.legend(frameon=False, fontsize=8)
    figures["residual-by-depth"] = figure
    axes = (figure := Figure(figsize=(5, 3), layout="constrained")).subplots()
    axes.bar(range(len(shares := path_shares())), shares, color="#0072B2")
    axes.set(xlabel="heads on the path", ylabel="norm, relative to the output", yscale="log")
    figures["path-lengths"] = figure
    axes = (figure := Figure(figsize=(5, 3.2), layout="constrained")).subplots()
    for name, curve in cumulative_spectra().items():
        axes.plot([(i + 1) / len(curve) for i in range(len(curve))], curve, label=name)
    axes.set(xlabel="index / n", ylabel="cumulative share of singular values")
    axes.legend(frameon=False, fontsize=8)
    figures["spectra"] = figure
    axes = (figure := Figure(figsize=(5, 3), layout="constrained")).subplots()
    sizes = (8, 32, 128, 512)
    for name, rates in failure_rates(sizes).items():
        axes.semilogx(sizes, rates, marker="o", label=f"w {name}")
    axes.set(xlabel="sketch size k", ylabel="share of draws that fail", title="||PR'Rw - Pw|| <= 0.5 ||Pw||, n = 256")
    axes.legend(frameon=False)
    figures["failures"] = figure
    written = []
    for name, figure in figures.items():
        for suffix in ("svg", "png"):
            written.append(directory / f"{name}.{suffix}")
            figure.savefig(written[-1], dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    return written
