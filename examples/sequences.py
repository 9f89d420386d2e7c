"""One small encoder with every operator: handwritten digits as sequences of pixels, and tones from raw audio frames.

    python examples/sequences.py digits [--quick] [--operators efficient window …]
    python examples/sequences.py tones  [--quick]

digits: scikit-learn's 8 x 8 images, read pixel by pixel (64 tokens), ten classes.
tones:  synthetic waves of four shapes (sine, square, sawtooth, noise) at a random pitch, phase and loudness, 4096
        samples each in frames of 32 (128 tokens); the class is the shape, and no spectrogram is computed.

Also runs a recurrent baseline.  Takes minutes on two cores; --quick takes seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from headwise.nn import Encoder, LearnedConvolution, LearnedProjection, PatchEmbedding, Recurrent, frame_embedding
from headwise.operators import efficient, factored, fixed, hashed, nystrom, projected, softmax, strided, window

WIDTH, HEADS, DEPTH = 32, 4, 2


def encoders(n: int) -> dict[str, Callable[[], Encoder]]:
    """An encoder per operator, of equal size except for learned projections."""
    builds = {
        "softmax": lambda: softmax,
        "window": lambda: partial(window, width=17),
        "strided": lambda: strided,
        "fixed": lambda: fixed,
        "hashed": lambda: partial(hashed, chunk=8, rounds=2),
        "projected": lambda: LearnedProjection(projected, n, 16),
        "efficient": lambda: efficient,
        "factored": lambda: LearnedConvolution(factored, 4),
        "nystrom": lambda: partial(nystrom, landmarks=16),
    }
    made: dict[str, Callable[[], Encoder]] = {
        name: lambda build=build: Encoder(WIDTH, HEADS, DEPTH, build=build()) for name, build in builds.items()
    }
    made["softmax, reversible"] = lambda: Encoder(WIDTH, HEADS, DEPTH, reversible=True)
    made["recurrent"] = lambda: Encoder(WIDTH, HEADS, DEPTH, layer=lambda: Recurrent(WIDTH))
    return made


class Classifier(nn.Module):
    """A linear classifier of the mean of the encoder's tokens."""

    def __init__(self, embed: nn.Module, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.embed, self.encoder, self.read = embed, encoder, nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.encoder(self.embed(x)).mean(-2))


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def tones(count: int = 1600, samples: int = 4096) -> tuple[Tensor, Tensor]:
    """Four wave forms at 80 to 800 cycles in `samples`, plus noise at -20 dB."""
    g = torch.Generator().manual_seed(0)
    shape = torch.randint(4, (count,), generator=g)
    cycles = 80 * 10 ** torch.rand(count, 1, generator=g)
    phase = torch.rand(count, 1, generator=g) + cycles * torch.linspace(0, 1, samples)
    waves = torch.stack(
        [
            (2 * math.pi * phase).sin() * math.sqrt(2),
            (2 * math.pi * phase).sin().sign(),
            math.sqrt(3) * (2 * (phase % 1) - 1),
            torch.randn(count, samples, generator=g),
        ]
    )
    x = waves[shape, torch.arange(count)] + 0.1 * torch.randn(count, samples, generator=g)
    loudness = 0.5 + torch.rand(count, 1, generator=g)  # every wave has the same power before this
    return (loudness * x).unsqueeze(1), shape


def train(model: nn.Module, x: Tensor, y: Tensor, held_out: int, epochs: int) -> float:
    """Train, and return the accuracy on the last `held_out` examples."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    train_x, train_y, test_x, test_y = x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:]
    batches = -(-len(train_x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * batches)
    for _ in range(epochs):
        for rows in torch.randperm(len(train_x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return (model(test_x).argmax(-1) == test_y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("digits", "tones"))
    parser.add_argument("--operators", nargs="+", metavar="NAME", help="operators to run (default: all)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="few examples, one epoch")
    options = parser.parse_args()
    x, y = digits() if options.task == "digits" else tones(128 if options.quick else 1600)
    if options.quick:
        x, y, options.epochs = x[:128], y[:128], 1
    embed: Callable[[], nn.Module] = (
        (lambda: PatchEmbedding(1, (1, 1), WIDTH)) if options.task == "digits" else (lambda: frame_embedding(32, WIDTH))
    )
    tokens = embed()(x[:1]).shape[-2]
    made = encoders(tokens)
    print(f"{options.task}: {len(x)} sequences of {tokens} tokens, {options.epochs} epochs")
    for name in options.operators or made:
        torch.manual_seed(0)
        model = Classifier(embed(), made[name](), int(y.max()) + 1)
        start = time.perf_counter()
        accuracy = train(model, x, y, held_out=len(x) // 5, epochs=options.epochs)
        size = sum(p.numel() for p in model.parameters())
        print(
            f"  {name:<20} {accuracy:6.1%} correct  {size:6d} parameters  {time.perf_counter() - start:5.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
