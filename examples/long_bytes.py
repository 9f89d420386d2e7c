"""Train a byte model on texts of 4096 bytes, then replace its heads: how much faster it gets, and what loss it adds.

    python examples/long_bytes.py            a few minutes on two cores
    python examples/long_bytes.py --toy      a few seconds, to check that it runs

Two layers of causal attention with rotary positions learn to predict Moby Dick byte by byte at full length.  A plan
then chooses an operator for every head by measured loss, and both models run on text that neither training nor the plan
used.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.replacement import Choice, rewrite

TEXT = Path(headwise.__file__).parent / "models" / "data" / "moby-dick.txt"


@dataclass
class Output:
    logits: Tensor  # (b, n, 256)


class Layer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x); queries and keys rotated by their positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.between(x))


class ByteModel(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return Output(self.lm_head(self.norm(x)))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): pairs of columns rotate by angles proportional to the position."""
    n, d = x.shape[-2:]
    angles = torch.arange(n)[:, None] / 10000 ** (torch.arange(d // 2) / (d // 2))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def train(model: ByteModel, text: Tensor, length: int, seconds: float) -> float:
    """Train on random excerpts for `seconds`; returns the mean of the last losses."""
    generator = torch.Generator().manual_seed(0)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses, start = [], time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or not losses:
        # mostly short excerpts, which are cheap, and every fourth at full length
        size = length if len(losses) % 4 == 3 else min(length, 512)
        at = torch.randint(len(text) - size - 1, (max(1, 1024 // size),), generator=generator)
        batch = torch.stack([text[i : i + size + 1] for i in at])
        for group in adam.param_groups:
            group["lr"] = 3e-3 * max(0.05, 1 - spent / seconds)
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return statistics.mean(losses[-20:])


def loss_of(model: nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def time_models(models: list[nn.Module], ids: Tensor, repeats: int = 5) -> list[float]:
    """Median seconds of a forward pass; the models alternate so that other load affects both."""
    times: list[list[float]] = [[] for _ in models]
    with torch.no_grad():
        for _ in range(repeats + 1):
            for model, own in zip(models, times, strict=True):
                start = time.perf_counter()
                model(input_ids=ids)
                own.append(time.perf_counter() - start)
    return [statistics.median(own[1:]) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="short texts and few steps")
    parser.add_argument("--seconds", type=float, default=90.0, help="training time (default: %(default)g)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        help="nats per byte (default: %(default)g)",
    )
    options = parser.parse_args()
    length, seconds = (256, 2.0) if options.toy else (4096, options.seconds)
    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    held = 7 * length  # seven texts that are not trained on
    model = ByteModel()
    print(f"trained on {len(text) - held} bytes to a loss of {train(model, text[:-held], length, seconds):.3f}")
    model.eval()

    texts = [{"input_ids": x[None]} for x in text[-held:].view(7, length)]
    few = [Choice("window", {"width": w, "leading": 1}) for w in (17, 65, 257) if 2 * w <= length]
    plan = headwise.plan(model, texts[:6], tolerance=options.tolerance, choices=few, beyond="exact")
    new, receipt = rewrite(model, plan)
    print(receipt)
    for site, choices in plan.sites.items():
        print(f"  {site}: {', '.join(map(str, choices))}")

    fresh = [texts[6]["input_ids"]]  # neither trained on nor planned by
    losses = [statistics.mean(loss_of(m, ids) for ids in fresh) for m in (model, new)]
    change = losses[1] - losses[0]
    print(f"loss on fresh text: {losses[0]:.4f} before, {losses[1]:.4f} after ({change:+.4f} nats per byte)")
    for n in (length, 2 * length):
        old, now = time_models([model, new], text[None, :n])
        print(f"n = {n}: {old:.3f} s before, {now:.3f} s after, {old / now:.1f} times as fast")


if __name__ == "__main__":
    main()
