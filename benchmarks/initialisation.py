"""Does attention that starts with a structure learn more from few images?  MNIST, Fashion-MNIST, or digits.

    python -m benchmarks.initialisation --images mnist --seeds 6

A small vision transformer (49 patches, three layers of four heads) is trained from the default weights, from
`mimetic_`, from `impulse_` (heads that shift by one patch), and from both; the same images, batches and other weights
for one seed.  Prints test accuracy after every few epochs, and the differences from the default with 95 % t intervals
over the seeds.  `--images digits` needs no download (scikit-learn's 8 x 8 digits, 16 patches).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from benchmarks import image_data
from headwise.nn import Encoder, MultiHead, PatchEmbedding, impulse_, mimetic_
from headwise.operators.relative.encodings import cells, sinusoidal

WIDTH, HEADS, DEPTH, BATCH, RATE = 64, 4, 3, 50, 1e-3
Start = Callable[[MultiHead, tuple[int, int], torch.Generator], None]


class Classifier(nn.Module):
    """Patches, an encoder, and a linear map of the mean token."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.embed = PatchEmbedding(1, (patch, patch), WIDTH)
        self.encoder = Encoder(WIDTH, HEADS, DEPTH)
        self.classify = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.encoder(self.embed(x)).mean(-2))


def impulses(layer: MultiHead, grid: tuple[int, int], generator: torch.Generator) -> None:
    positions = layer_norm(sinusoidal(cells(grid), WIDTH), (WIDTH,))
    impulse_(layer, positions, grid, generator=generator)


def mimetic(layer: MultiHead, grid: tuple[int, int], generator: torch.Generator) -> None:
    mimetic_(layer, generator=generator)


def both(layer: MultiHead, grid: tuple[int, int], generator: torch.Generator) -> None:
    """Values and output mimetic, queries and keys impulses."""
    mimetic(layer, grid, generator)
    impulses(layer, grid, generator)


STARTS: dict[str, Start] = {"default": lambda *_: None, "mimetic": mimetic, "impulse": impulses, "both": both}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1000]], y[order[:1000]], x[order[1000:]], y[order[1000:]]


def run(name: str, seed: int, data: tuple[Tensor, Tensor, Tensor, Tensor], options: argparse.Namespace) -> list[float]:
    """Test accuracy at each of the epochs that are recorded."""
    x, y, test_x, test_y = data
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)[: options.train]
    x, y = x[chosen], y[chosen]
    patch = 4 if x.shape[-1] == 28 else 2
    side = x.shape[-1] // patch
    torch.manual_seed(seed)
    model = Classifier(patch)
    for layer in model.modules():
        if isinstance(layer, MultiHead):
            STARTS[name](layer, (side, side), torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    found = []
    for epoch in range(1, options.epochs + 1):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        if epoch in options.record:
            with torch.no_grad():
                answers = torch.cat([model(part).argmax(-1) for part in test_x.split(500)])
            found.append((answers == test_y).float().mean().item())
    return found


def interval(values: list[float]) -> str:
    """Mean and half of the 95 % t interval, in points of a hundred."""
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{100 * fmean(values):+6.2f} ± {100 * half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=["mnist", "fashion", "digits"], default="mnist")
    parser.add_argument("--train", type=int, default=1000, help="training images, drawn anew for each seed")
    parser.add_argument("--test", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--data", type=Path, default=image_data.CACHE)
    options = parser.parse_args()
    options.record = sorted(
        {max(1, options.epochs // 8), options.epochs // 4, options.epochs // 2, options.epochs} - {0}
    )
    x, y, test_x, test_y = digits() if options.images == "digits" else image_data.load(options.images, options.data)
    order = torch.randperm(len(test_x), generator=torch.Generator().manual_seed(0))[: options.test]
    data = (x, y, test_x[order], test_y[order])
    start = time.process_time()
    found: dict[str, list[list[float]]] = {name: [] for name in STARTS}
    for seed in range(options.seeds):
        for name in STARTS:
            found[name].append(run(name, seed, data, options))
            shown = " ".join(f"{100 * value:.1f}" for value in found[name][-1])
            print(f"seed {seed} {name:8s} {shown}   ({time.process_time() - start:.0f} s)", flush=True)
    print(
        f"\n{options.images}: {options.train} training images, {len(order)} test images, {options.seeds} seeds; test "
        f"accuracy in % after {options.record} epochs, below it the difference from the default (95 % t interval)"
    )
    for name, runs in found.items():
        columns = list(zip(*runs, strict=True))
        print(f"{name:8s} " + "   ".join(f"{100 * fmean(column):6.2f}" + " " * 7 for column in columns))
        if name != "default":
            pairs = zip(columns, zip(*found["default"], strict=True), strict=True)
            differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
            print("         " + "   ".join(interval(values) for values in differences))


if __name__ == "__main__":
    main()
