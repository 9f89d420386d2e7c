"""Attention of linear cost on images: a small network over 784 pixels trained with each operator in every head.

    python -m benchmarks.image_operators [--images fashion] [--seeds 5] [--train 2000] [--epochs 4] [-o DIR]

Two blocks of two heads of 8 over the pixels of Fashion-MNIST or MNIST, learned places added, trained alike: Adam, a
cosine schedule, batches of 100.  Accuracy is on the first 2000 test images, with a 95 % interval (Student's t) over
seeds; "less softmax" is the difference to softmax with the same seed; the time of a step is processor time over
that of softmax, the median over seeds.  Runs are kept in DIR line by line, so an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import Tensor, nn

from benchmarks import image_data
from headwise.cli.tables import print_table
from headwise.nn import GridAttention, LearnedProjection
from headwise.operators import efficient, factored, hashed, nystrom, projected, softmax, window
from headwise.outputs import append_line, read_lines

TESTED = 2000


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


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> float:
    """Processor seconds of a step, the optimizer's work included."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    seconds, steps = 0.0, 0
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(x)).split(100):
            start = time.process_time()
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            seconds, steps = seconds + time.process_time() - start, steps + 1
        schedule.step()
    return seconds / steps


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = sum(int((model(part).argmax(-1) == z).sum()) for part, z in zip(x.split(200), y.split(200), strict=True))
    return right / len(x)


def run(options: argparse.Namespace, name: str, seed: int) -> dict[str, float]:
    x, y, test_x, test_y = image_data.load(options.images, options.data)
    torch.manual_seed(seed)
    chosen = torch.randperm(len(x))[: options.train]
    model = OperatorNetwork(builders(28 * 28, 2)[name])
    seconds = train(model, x[chosen], y[chosen], options.epochs)
    return {"accuracy": accuracy(model, test_x[:TESTED], test_y[:TESTED]), "seconds": seconds}


def interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and half of the 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:{sign}.1f} (one seed)"
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):{sign}.1f} ± {half:.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", default="fashion", choices=("fashion", "mnist"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--data", type=Path, default=image_data.CACHE, metavar="DIR", help="prepared images")
    parser.add_argument("-o", "--out", type=Path, default=Path("headwise-bench"), metavar="DIR")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    store, results = options.out / "image_operators.jsonl", {}
    for seed, name in itertools.product(range(options.seeds), builders(28 * 28, 2)):
        key = json.dumps([options.images, name, seed, options.train, options.epochs])
        if key not in read_lines(store):
            append_line(store, key, run(options, name, seed))
        results.setdefault(name, []).append(read_lines(store)[key])
    exact, rows = results["softmax"], []
    for name, runs in results.items():
        off = [100 * (x["accuracy"] - y["accuracy"]) for x, y in zip(runs, exact, strict=True)]
        ratio = statistics.median(x["seconds"] / y["seconds"] for x, y in zip(runs, exact, strict=True))
        right = interval([100 * x["accuracy"] for x in runs])
        rows.append([name, right, "" if name == "softmax" else interval(off, "+"), f"{ratio:.2f}"])
    title = f"{options.images}, 784 pixels: {options.train} images, {options.epochs} epochs, {options.seeds} seeds"
    print_table(title, ["every head", "accuracy, %", "less softmax", "time of a step"], rows)


if __name__ == "__main__":
    main()
