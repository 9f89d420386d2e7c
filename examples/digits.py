"""Does attention learn to convolve?  A network of quadratic heads and a CNN of the same size on handwritten digits.

    python examples/digits.py [--quick] [--out docs/images]

1. A CNN and a network of quadratic-attention layers (nine heads that start at random places) are trained alike on
   scikit-learn's 8 x 8 digits; prints the accuracy of both and where the centres moved.
2. The trained CNN is converted exactly (same outputs), then softly (alpha = 6) and fine-tuned with its centres free.
3. Do the centres form a kernel?  Each head's distance from the nearest cell, and how many of the nine cells of a 3 x 3
   kernel have a head within half a cell.

Takes under three minutes on two cores; --quick takes seconds and only shows that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from headwise.convolution import ReceptiveFieldRecorder, convert, model_receptive_fields, soft
from headwise.nn.kernel_attention import ConvolutionGeometry, QuadraticAttention
from headwise.operators.relative.quadratic import log_width

WIDTH, CLASSES, BATCH = 16, 10, 64
KERNEL_CELLS = list(itertools.product((-1, 0, 1), repeat=2))


def data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def network(layers: list[nn.Module]) -> nn.Sequential:
    body = [part for layer in layers for part in (layer, nn.BatchNorm2d(WIDTH), nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, CLASSES))


def cnn() -> nn.Sequential:
    return network([nn.Conv2d(inputs, WIDTH, 3, padding=1) for inputs in (1, WIDTH, WIDTH)])


def attention() -> nn.Sequential:
    """One head per kernel cell of the CNN, with as many weights; centres are drawn around the query, alpha = 1."""
    layers: list[nn.Module] = []
    for inputs in (1, WIDTH, WIDTH):
        geometry = ConvolutionGeometry(inputs, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
        heads = torch.empty(9, WIDTH, inputs).uniform_(-1, 1) / (9 * inputs) ** 0.5
        weight = heads.permute(1, 2, 0).unflatten(-1, (3, 3)).contiguous()
        centres = 1 + torch.randn(9, 2)  # the query is at (1, 1) of the padded map
        bias, widths = torch.zeros(WIDTH), log_width(1.0)
        layers.append(QuadraticAttention(geometry, weight, bias, centres=centres, log_widths=widths))
    return network(layers)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float, after=lambda epoch: None) -> None:
    moving = [p for name, p in model.named_parameters() if name.endswith(("centres", "log_widths"))]
    rest = [p for name, p in model.named_parameters() if not name.endswith(("centres", "log_widths"))]
    # centres have to move by whole cells: give them a larger rate than weights
    optimizer = torch.optim.Adam([{"params": rest, "lr": rate}, {"params": moving, "lr": 5 * rate}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    after(0)
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
        after(epoch)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model.eval()(x).argmax(-1) == y).float().mean().item()


def kernels(recorder: ReceptiveFieldRecorder, epoch: int) -> None:
    """Print the distance of the centres from whole cells and from the cells of a 3 x 3 kernel."""
    for name, fields in recorder.record[epoch].items():
        centres = torch.tensor([f.centre for f in fields])
        width = torch.tensor([[f.spread[0][0], f.spread[1][1]] for f in fields]).mean().sqrt()
        to_cell = (centres - centres.round()).abs().amax(-1).mean()
        near = torch.cdist(torch.tensor(KERNEL_CELLS, dtype=centres.dtype), centres).amin(1) < 0.5
        print(
            f"    layer {name}: {int(near.sum())} of 9 cells of a 3 x 3 kernel have a head within half a cell; "
            f"mean distance to a whole cell {to_cell:.2f} (0.33 for random places), mean width {width:.2f}, "
            f"furthest head {centres.norm(dim=-1).amax():.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="directory for pictures of the heads")
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args()
    epochs = 1 if options.quick else options.epochs
    start = time.perf_counter()
    x, y, test_x, test_y = data()
    if options.quick:
        x, y = x[:256], y[:256]

    torch.manual_seed(0)
    plain = cnn()
    train(plain, x, y, epochs, 3e-3)
    count = sum(p.numel() for p in plain.parameters())
    print(f"CNN: {count} parameters, test accuracy {accuracy(plain, test_x, test_y):.3f}")

    torch.manual_seed(0)
    heads = attention()
    recorder = ReceptiveFieldRecorder(lambda: model_receptive_fields(heads.eval(), x[:1]))
    train(heads, x, y, epochs, 3e-3, recorder)
    count = sum(p.numel() for p in heads.parameters())
    print(f"attention from random centres: {count} parameters, test accuracy {accuracy(heads, test_x, test_y):.3f}")
    print("  at the start")
    kernels(recorder, 0)
    print("  at the end")
    kernels(recorder, epochs)

    exact, receipt = convert(plain.eval(), probe=test_x)
    print(f"CNN converted exactly: {receipt}, test accuracy {accuracy(exact, test_x, test_y):.3f}")
    tuned, receipt = convert(plain.eval(), soft(6.0), probe=test_x)
    print(f"CNN converted softly, alpha = 6: {receipt}, test accuracy {accuracy(tuned, test_x, test_y):.3f}")
    follow = ReceptiveFieldRecorder(lambda: model_receptive_fields(tuned.eval(), x[:1]))
    train(tuned, x, y, max(1, epochs // 3), 3e-4, follow)
    print(f"  and fine-tuned: test accuracy {accuracy(tuned, test_x, test_y):.3f}")
    kernels(follow, max(follow.record))

    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for i, layer in enumerate(recorder.record[0]):
            recorder.png(layer, options.out / f"digits-heads-{i + 1}.png")
        recorder.gif(next(iter(recorder.record[0])), options.out / "digits-heads-1.gif")
        for i, layer in enumerate(follow.record[0]):
            follow.png(layer, options.out / f"digits-tuned-{i + 1}.png", panels=2)
        print(f"pictures in {options.out}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
