"""Where the heads of image networks look while they train, and which operators they can be trained with.

    python -m benchmarks.image_heads places       centres and widths by layer and epoch: about half an hour on one core
    python -m benchmarks.image_heads operators    accuracy and time with each operator of linear cost: as long again
    … [--data fashion mnist] [--seeds 5] [-o DIR] [--pictures DIR]

Runs are kept in DIR line by line, so an interrupted command goes on where it stopped.

`places`: four layers of nine heads on images of 14 x 14 (means of 2 x 2 pixels).  Scores are quadratic in the relative
position, or that plus products of learned queries and keys.  Measured are the attention weights themselves: for the
queries of the middle 4 x 4 cells of 32 test images, the mean offset of a head and its spread about it (in cells).
It answers what is said of the animation of Cordonnier, Loukas & Jaggi (2020):

    local at the start            spread of all heads before training (given by the initial widths, so by construction)
    lower layers spread           spread of layer 1 after training - before
    higher layers move outward    |centre| of layer 4 after - before; and that of layer 4 - that of layer 1, after
    all layers cover more         spread after - before, of every layer
    centres form a kernel         cells of a 3 x 3 kernel with a centre within half a cell, against the same centres
                                  turned about the query by random angles

`operators`: two layers of two heads of 8 over 784 pixels, softmax or one operator for all heads, trained alike.

Each figure is a mean over seeds with a 95 % interval (Student's t); an effect counts if the interval excludes zero.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.image_data import CACHE, images
from headwise.cli.tables import print_table
from headwise.errors import InputError
from headwise.nn import GridAttention, LearnedProjection
from headwise.nn.relative_attention import ConvolutionGeometry, QuadraticAttention
from headwise.operators import efficient, factored, hashed, nystrom, projected, softmax, window
from headwise.operators.relative.quadratic import log_width
from headwise.outputs import append_line, read_lines

SIDE, LAYERS, HEADS, WIDTH = 14, 4, 9, 18
KERNEL = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=2)))
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""The 97.5 % point of Student's t for the mean of this many numbers."""


def offsets(side: int) -> Tensor:
    """k - q for every pair of cells, (n, n, 2)."""
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    return at.unsqueeze(0) - at.unsqueeze(1)


class ContentAndPlace(nn.Module):
    """A builder of P = softmax(q k^T / sqrt(d) - |offset - centre|^2 / (2 width^2)), a centre and a width a head."""

    def __init__(self, heads: int, side: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(heads, 2))
        self.log_widths = nn.Parameter(log_width(1.0).expand(heads).clone())
        self.offsets = offsets(side)

    def forward(self, q: Tensor, k: Tensor, **masks: Any) -> Any:
        away = (self.offsets - self.centres[:, None, None, :]).square().sum(-1)
        return softmax(q, k, attn_bias=-away * (-2 * self.log_widths).exp()[:, None, None] / 2, **masks)


def _quadratic(inputs: int) -> nn.Module:
    geometry = ConvolutionGeometry(inputs, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    weight = torch.empty(WIDTH, inputs, 3, 3).uniform_(-1, 1) / (HEADS * inputs) ** 0.5
    centres = 1 + torch.randn(HEADS, 2)  # the query is at (1, 1) of the padded map
    return QuadraticAttention(geometry, weight, torch.zeros(WIDTH), centres=centres, log_widths=log_width(1.0))


def place_network(kind: str) -> nn.Sequential:
    """Layers of attention, batch norm and ReLU; then means over quarters of the map and a linear map to ten classes."""
    parts: list[nn.Module] = []
    if kind == "content":
        parts.append(nn.Conv2d(1, WIDTH, 1))
    for layer in range(LAYERS):
        if kind == "quadratic":
            parts.append(_quadratic(1 if layer == 0 else WIDTH))
        elif kind == "content":
            parts.append(GridAttention(WIDTH, HEADS, build=ContentAndPlace(HEADS, SIDE)))
        else:
            raise InputError(f"there is no network {kind!r}; there are quadratic and content")
        parts += [nn.BatchNorm2d(WIDTH), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 10))


def train(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, after: Callable[[int], None] = lambda epoch: None
) -> float:
    """Adam, cosine schedule, batches of 100, centres and widths at five times the rate; processor seconds of a step."""
    moving = [p for name, p in model.named_parameters() if name.endswith(("centres", "log_widths"))]
    rest = [p for name, p in model.named_parameters() if not name.endswith(("centres", "log_widths"))]
    optimizer = torch.optim.Adam([{"params": rest, "lr": 3e-3}, {"params": moving, "lr": 1.5e-2}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    seconds, steps = 0.0, 0
    after(0)
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in torch.randperm(len(x)).split(100):
            start = time.process_time()
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            seconds, steps = seconds + time.process_time() - start, steps + 1
        schedule.step()
        after(epoch)
    return seconds / steps


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = sum(int((model(part).argmax(-1) == z).sum()) for part, z in zip(x.split(200), y.split(200), strict=True))
    return right / len(x)


@torch.no_grad()
def places(model: nn.Sequential, sample: Tensor) -> list[dict[str, Any]]:
    """For each layer, the centre (2,) and the spread of every head: means over the middle 16 queries and the sample."""
    model.eval()
    rows, x = [], sample
    middle = [i * SIDE + j for i in range(5, 9) for j in range(5, 9)]
    for part in model:
        if isinstance(part, (QuadraticAttention, GridAttention)):
            if isinstance(part, QuadraticAttention):
                p = part.operator((SIDE, SIDE)).dense()[:, middle].unflatten(-1, (SIDE + 2, SIDE + 2))
                inside = p[..., 1:-1, 1:-1]  # padding cells hold zeros: what they weigh is lost
                p = (inside / inside.sum((-2, -1), keepdim=True)).flatten(-2).unsqueeze(0)
            else:
                p = part.operator(x).dense()[..., middle, :]
            away = offsets(SIDE)[middle]
            centre = torch.einsum("bhqk,qkc->bhqc", p, away)
            square = torch.einsum("bhqk,qk->bhq", p, away.square().sum(-1))
            spread = ((square - centre.square().sum(-1)).clamp(min=0) / 2).sqrt()  # per axis
            rows.append({"centre": centre.mean((0, 2)).tolist(), "spread": spread.mean((0, 2)).tolist()})
        x = part(x)
    return rows


def run_places(data: str, kind: str, seed: int, cache: Path, *, count: int, epochs: int) -> dict[str, Any]:
    x, y, test_x, test_y = _split(*images(data, cache), count)
    x, test_x = F.avg_pool2d(x, 2), F.avg_pool2d(test_x, 2)
    torch.manual_seed(seed)
    model, record = place_network(kind), []
    train(model, x, y, epochs, lambda epoch: record.append(places(model, test_x[:32])))
    return {"accuracy": accuracy(model, test_x, test_y), "epochs": record}


def _split(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`count` images to train, the last 2000 to test."""
    return x[:count], y[:count], x[-2000:], y[-2000:]


def kernel_cells(centres: Tensor) -> int:
    """Cells of a 3 x 3 kernel that have a centre within half a cell, of centres (heads, 2)."""
    return int((torch.cdist(KERNEL, centres).amin(1) < 0.5).sum())


def turned(centres: Tensor, draws: int = 200) -> float:
    """The mean of `kernel_cells` when every centre is turned about the query by a random angle."""
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(draws):
        angle = 2 * math.pi * torch.rand(len(centres), generator=generator)
        distance = centres.norm(dim=-1)
        counts.append(kernel_cells(torch.stack([distance * angle.cos(), distance * angle.sin()], -1)))
    return statistics.mean(counts)


@final
@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval."""

    mean: float
    half: float
    seeds: int

    @classmethod
    def of(cls, x: Sequence[float]) -> Interval:
        if len(x) < 2:
            return cls(x[0], math.inf, 1)
        t = T_95.get(len(x), 1.96 if len(x) > 30 else 2.26)
        return cls(statistics.mean(x), t * statistics.stdev(x) / len(x) ** 0.5, len(x))

    @property
    def verdict(self) -> str:
        if abs(self.mean) <= self.half:
            return "no effect seen"
        return "yes" if self.mean > 0 else "the opposite"

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.half:.2f}"


def observations(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Interval, bool]]:
    """(what is measured, over runs with different seeds, whether it is a difference that can be judged)."""

    def layer(run: Mapping[str, Any], epoch: int, i: int, what: str) -> float:
        values = torch.tensor(run["epochs"][epoch][i][what])
        return float((values.norm(dim=-1) if what == "centre" else values).mean())

    def change(i: int, what: str) -> Interval:
        return Interval.of([layer(run, -1, i, what) - layer(run, 0, i, what) for run in runs])

    def cells(run: Mapping[str, Any]) -> float:
        centres = [torch.tensor(rows["centre"]) for rows in run["epochs"][-1]]
        return statistics.mean(kernel_cells(c) - turned(c) for c in centres)

    start = [statistics.mean(layer(run, 0, i, "spread") for i in range(LAYERS)) for run in runs]
    higher = [layer(run, -1, LAYERS - 1, "centre") - layer(run, -1, 0, "centre") for run in runs]
    narrow = [layer(run, -1, LAYERS - 1, "spread") - layer(run, -1, 0, "spread") for run in runs]
    return [
        ("spread at the start, all layers", Interval.of(start), False),
        *((f"layer {i + 1}: spread, end - start", change(i, "spread"), True) for i in range(LAYERS)),
        *((f"layer {i + 1}: |centre|, end - start", change(i, "centre"), True) for i in range(LAYERS)),
        (f"|centre| of layer {LAYERS} - of layer 1, end", Interval.of(higher), True),
        (f"spread of layer {LAYERS} - of layer 1, end", Interval.of(narrow), True),
        ("kernel cells with a head - same, turned", Interval.of([cells(run) for run in runs]), True),
    ]


# ---- operators ----


def builders(n: int, heads: int) -> dict[str, Callable[[], Any]]:
    """A new builder for each layer, by name."""
    generator = torch.Generator().manual_seed(0)
    return {
        "softmax": lambda: softmax,
        "window 65": lambda: partial(window, width=65),
        "efficient": lambda: efficient,
        "factored 64, learned": lambda: LearnedProjection(factored, n, 64, heads=heads, shared=False),
        "projected 64, learned": lambda: LearnedProjection(projected, n, 64, heads=heads, shared=False),
        "nystrom 32": lambda: partial(nystrom, landmarks=32),
        "hashed, 2 rounds of 32": lambda: partial(hashed, rounds=2, chunk=32, generator=generator),
    }


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on maps (b, width, *grid)."""

    def __init__(self, width: int, heads: int, build: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2))
        self.attend = GridAttention(width, heads, build=build)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class OperatorNetwork(nn.Module):
    """Pixels and learned places, two blocks, the mean over quarters of the map, ten classes."""

    def __init__(self, build: Callable[[], Any], side: int = 28, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 3, padding=1)
        self.place = nn.Parameter(0.02 * torch.randn(width, side, side))
        self.blocks = nn.Sequential(*(Block(width, heads, build()) for _ in range(2)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.lift(x) + self.place))


def run_operator(data: str, name: str, seed: int, cache: Path, *, count: int, epochs: int) -> dict[str, float]:
    x, y, test_x, test_y = _split(*images(data, cache), count)
    torch.manual_seed(seed)
    model = OperatorNetwork(builders(28 * 28, 2)[name])
    seconds = train(model, x, y, epochs)
    return {"accuracy": accuracy(model, test_x, test_y), "seconds": seconds}


def _kept(store: Path, key: str, run: Callable[[], Any]) -> Any:
    known = read_lines(store)
    if key not in known:
        append_line(store, key, run())
        known = read_lines(store)
    return known[key]


def show_places(options: argparse.Namespace) -> None:
    for data, kind in itertools.product(options.data, ("quadratic", "content")):
        runs = []
        for seed in range(options.seeds):
            sizes = {"count": options.count, "epochs": options.epochs}
            key = json.dumps(["places", data, kind, seed, sizes])
            run = partial(run_places, data, kind, seed, options.cache, **sizes)
            runs.append(_kept(options.out / "image_heads.jsonl", key, run))
        rows = [[what, str(x), x.verdict if judged else ""] for what, x, judged in observations(runs)]
        right = Interval.of([100 * run["accuracy"] for run in runs])
        title = f"{data}, {kind}: {options.count} images, {options.epochs} epochs, {len(runs)} seeds, "
        print_table(f"{title}test accuracy {right.mean:.1f} ± {right.half:.1f} %", ["cells", "mean", "seen"], rows)
        if options.pictures is not None:
            draw(runs[0]["epochs"], options.pictures / f"image-heads-{data}-{kind}.png")


def draw(epochs: Sequence[Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Circles of one spread about every centre, layer by layer, before and after training."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    figure = Figure(figsize=(2.4 * LAYERS, 5.4), layout="compressed")
    axes = figure.subplots(2, LAYERS, sharex=True, sharey=True)
    for row, (when, layers) in enumerate((("start", epochs[0]), (f"epoch {len(epochs) - 1}", epochs[-1]))):
        for column, heads in enumerate(layers):
            ax = axes[row, column]
            for i, (centre, spread) in enumerate(zip(heads["centre"], heads["spread"], strict=True)):
                colour = f"C{i}"
                ax.add_patch(Circle((centre[1], centre[0]), spread, color=colour, alpha=0.25, lw=0))
                ax.plot(centre[1], centre[0], ".", color=colour, ms=5)
            ax.plot(0, 0, "k+", ms=10)
            ax.set(xlim=(-6.5, 6.5), ylim=(6.5, -6.5), aspect="equal")
            ax.set_title(f"layer {column + 1}, {when}", fontsize=10)
            ax.grid(alpha=0.2)
    figure.supxlabel("columns from the query, in cells")
    figure.supylabel("rows from the query, in cells")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def show_operators(options: argparse.Namespace) -> None:
    for data in options.data:
        results: dict[str, list[dict[str, float]]] = {}
        for seed, name in itertools.product(range(options.seeds), builders(28 * 28, 2)):
            sizes = {"count": options.count, "epochs": options.epochs}
            key = json.dumps(["operators", data, name, seed, sizes])
            run = partial(run_operator, data, name, seed, options.cache, **sizes)
            results.setdefault(name, []).append(_kept(options.out / "image_heads.jsonl", key, run))
        exact = results["softmax"]
        rows = []
        for name, runs in results.items():
            right = Interval.of([100 * run["accuracy"] for run in runs])
            off = Interval.of([100 * (x["accuracy"] - y["accuracy"]) for x, y in zip(runs, exact, strict=True)])
            slower = statistics.median(x["seconds"] / y["seconds"] for x, y in zip(runs, exact, strict=True))
            rows.append(
                [name, f"{right.mean:.1f} ± {right.half:.1f}", "" if name == "softmax" else str(off), f"{slower:.2f}"]
            )
        title = f"{data}, 784 pixels: {options.count} images, {options.epochs} epochs, {options.seeds} seeds"
        print_table(title, ["every head", "test accuracy, %", "less softmax", "time of a step"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("places", "operators"))
    parser.add_argument("--data", nargs="+", default=["fashion", "mnist"], choices=("fashion", "mnist"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--count", type=int, default=4000, help="training images")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="prepared images")
    parser.add_argument("--pictures", type=Path, metavar="DIR")
    parser.add_argument("-o", "--out", type=Path, default=Path("headwise-bench"), metavar="DIR")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    (show_places if options.what == "places" else show_operators)(options)


if __name__ == "__main__":
    main()
