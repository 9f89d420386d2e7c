"""Where do attention heads go while a network learns images?  Question 2 of Dordevic's notes, with numbers.

    python -m benchmarks.heads_on_images --images fashion --kind places --out out/heads
    python -m benchmarks.heads_on_images --images fashion --kind content --out out/heads --train 600 --epochs 6

Three RelativeAttention layers of nine quadratic heads (centres drawn around the query, alpha = 1) on images of 14 x 14
cells, by places alone or by places and content, five seeds.  After every epoch, for each layer: how far the centres are
from the query, how wide the heads are, how many cells a head and all heads together cover (exp of the entropy of their
weights), how many of the nine cells of a 3 x 3 kernel have a head within half a cell, how far centres are from whole
cells.  Centres and widths are those of the weights of the middle query, over 50 test images.

Every seed is saved in --out when it is done, and not repeated; the table and the picture are made of what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import fmean, stdev

import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from benchmarks import image_data
from headwise.nn import RelativeAttention

WIDTH, HEADS, LAYERS, SIDE, BATCH, RATE = 16, 9, 3, 14, 25, 3e-3
KERNEL = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=2)), dtype=torch.float64)
MEASURES = {
    "distance": "distance of centres from the query",
    "width": "width of heads",
    "cells": "cells covered by a head",
    "together": "cells covered by all heads",
    "kernel": "cells of a 3 x 3 kernel with a head",
    "whole": "distance of centres from whole cells",
}


def network(content: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (1, *(WIDTH,) * (LAYERS - 1)):
        attention = RelativeAttention(width, HEADS, out_width=WIDTH, content=content, key_width=8)
        layers += [attention, nn.BatchNorm2d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 10))


@torch.no_grad()
def measure(model: nn.Sequential, x: Tensor) -> list[dict[str, object]]:
    """The measures of every layer, and the centres and widths of its heads, at the middle query of all images x."""
    at = torch.stack(torch.meshgrid(*(torch.arange(SIDE).double() - SIDE // 2,) * 2, indexing="ij"), -1).reshape(-1, 2)
    middle, found = SIDE // 2 * SIDE + SIDE // 2, []
    model.eval()
    for part in model:
        if isinstance(part, RelativeAttention):
            pick = torch.zeros(SIDE * SIDE, 1)
            pick[middle] = 1
            weights = part.operator(x).adjoint(pick).squeeze(-1).double().reshape(-1, HEADS, SIDE * SIDE)
            centres = weights @ at  # (images, heads, 2)
            spread = (weights.unsqueeze(-1) * (at - centres.unsqueeze(-2)).square()).sum(-2).mean(-1).sqrt()
            entropy = lambda w: -(w * w.clamp(min=1e-300).log()).sum(-1)  # noqa: E731
            near = torch.cdist(KERNEL.expand(len(centres), -1, -1), centres).amin(-1) < 0.5
            values = {
                "distance": centres.norm(dim=-1),
                "width": spread,
                "cells": entropy(weights).exp(),
                "together": entropy(weights.mean(-2)).exp(),
                "kernel": near.double().sum(-1),
                "whole": (centres - centres.round()).abs().amax(-1),
            }
            heads = {"centres": centres.mean(0).tolist(), "widths": spread.mean(0).tolist()}
            found.append({name: value.mean().item() for name, value in values.items()} | heads)
        x = part(x)
    model.train()
    return found


def run(kind: str, seed: int, data: tuple[Tensor, Tensor, Tensor, Tensor], options: argparse.Namespace) -> dict:
    x, y, test_x, test_y = data
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)[: options.train]
    x, y = x[chosen], y[chosen]
    torch.manual_seed(seed)
    model = network(kind == "content")
    moving = [p for name, p in model.named_parameters() if name.endswith(("centres", "log_widths"))]
    rest = [p for name, p in model.named_parameters() if not name.endswith(("centres", "log_widths"))]
    # centres have to move by whole cells: they have a larger rate than weights
    optimizer = torch.optim.Adam([{"params": rest, "lr": RATE}, {"params": moving, "lr": 5 * RATE}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    history = [measure(model, test_x[:50])]
    for epoch in range(options.epochs):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
        history.append(measure(model, test_x[:50]))
        print(f"  {kind} seed {seed} epoch {epoch + 1} of {options.epochs}", flush=True)
    with torch.no_grad():
        answers = torch.cat([model.eval()(part).argmax(-1) for part in test_x.split(100)])
    accuracy = (answers == test_y).double().mean().item()
    return {"accuracy": accuracy, "history": history, "train": options.train, "epochs": options.epochs}


def interval(values: list[float]) -> str:
    """Mean and half of the 95 % t interval."""
    if len(values) < 2:
        return f"{values[0]:6.2f} (one seed)"
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):6.2f} ± {half:4.2f}"


def table(images: str, kind: str, runs: list[dict]) -> None:
    first = runs[0]
    print(
        f"\n{images}, {kind}: {len(runs)} seeds, {first['train']} training images, {first['epochs']} epochs; test "
        f"accuracy in % {interval([100 * run['accuracy'] for run in runs])}\n"
        "before -> after, and the change, by layer (95 % t)"
    )
    for name, words in MEASURES.items():
        for layer in range(LAYERS):
            before, after = ([run["history"][i][layer][name] for run in runs] for i in (0, -1))
            change = [b - a for a, b in zip(before, after, strict=True)]
            start = f"{words if not layer else '':36s} {layer + 1}  {fmean(before):6.2f}"
            print(f"{start} -> {interval(after)}   {interval(change)}")


def picture(images: str, kind: str, runs: list[dict], file: Path) -> None:
    """Centres and widths of every head, first seed before and after, one panel a layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Circle

    figure, panels = pyplot.subplots(2, LAYERS, figsize=(3 * LAYERS, 6.4), sharex=True, sharey=True)
    for row, (epoch, words) in enumerate(((0, "before"), (-1, "after training"))):
        for layer, panel in enumerate(panels[row]):
            heads = runs[0]["history"][epoch][layer]
            for (y, x), width in zip(heads["centres"], heads["widths"], strict=True):
                panel.add_patch(Circle((x, y), width, alpha=0.25, color=f"C{layer}", linewidth=0))
                panel.plot(x, y, ".", color=f"C{layer}")
            panel.plot(0, 0, "k+", markersize=10)
            panel.set(xlim=(-6, 6), ylim=(6, -6), aspect="equal", title=f"layer {layer + 1}, {words}")
            panel.set_xticks(range(-6, 7, 2))
            panel.set_yticks(range(-6, 7, 2))
            panel.grid(alpha=0.3)
    figure.suptitle(f"{images}, {kind}: centres (dots) and one width around them (discs), in cells; + is the query")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=["mnist", "fashion"], default="fashion")
    parser.add_argument("--kind", choices=["places", "content"], default="places")
    parser.add_argument("--train", type=int, default=2000, help="training images, drawn anew for each seed")
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=image_data.CACHE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    x, y, test_x, test_y = image_data.load(options.images, options.data)
    order = torch.randperm(len(test_x), generator=torch.Generator().manual_seed(0))[: options.test]
    keep = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:20_000]
    data = (avg_pool2d(x[keep], 2), y[keep], avg_pool2d(test_x[order], 2), test_y[order])
    runs, start = [], time.process_time()
    for seed in range(options.seeds):
        file = options.out / f"{options.images}-{options.kind}-{options.train}-{options.epochs}-{seed}.json"
        if not file.exists():
            result = run(options.kind, seed, data, options)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(result))
            part.replace(file)
        runs.append(json.loads(file.read_text()))
        print(f"seed {seed}: accuracy {runs[-1]['accuracy']:.3f} ({time.process_time() - start:.0f} s)", flush=True)
    table(options.images, options.kind, runs)
    picture(options.images, options.kind, runs, options.out / f"{options.images}-{options.kind}.png")


if __name__ == "__main__":
    main()
