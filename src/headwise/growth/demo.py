"""What `headwise grow` runs: a small model on a built-in task, which widens its heads as it trains.

lookup   n pairs (key, value), then queries that name a key; the answer is its value.  A head tells `keys` apart by k
         numbers: if k is too small, answers blur.
average  the answer is the value of a token drawn at random from the sequence.  Uniform attention is optimal, any k is
         enough, and the remaining loss is chance.

`Reader` is a small encoder of MultiHead layers with a given key width; sequences are drawn afresh for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.growth.grower import Grower
from headwise.growth.growth_event import GrowthEvent, HeadScore
from headwise.nn.multihead import MultiHead
from headwise.random_state import seeded

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""(batch, generator) -> tokens (b, n, 2) of (key, value), and answers (b, n), -100 where there is no question."""


@final
@dataclass(frozen=True)
class Task:
    """How to draw a batch, and the number of symbols; a query token has the value symbol `values`."""

    name: str
    keys: int
    values: int
    draw: Draw


def lookup(keys: int = 64, values: int = 16, pairs: int = 16, queries: int = 8) -> Task:
    """Pairs with distinct keys, then queries for some of them."""
    if keys < pairs:
        raise InputError(f"lookup: {pairs} pairs need as many distinct keys, but there are {keys}")

    def draw(b: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(b, keys, generator=generator).argsort(1)[:, :pairs]
        value = torch.randint(values, (b, pairs), generator=generator)
        chosen = torch.rand(b, pairs, generator=generator).argsort(1)[:, :queries]
        tokens = torch.stack([key, value], -1)
        query = torch.stack([key.gather(1, chosen), torch.full_like(chosen, values)], -1)
        return torch.cat([tokens, query], 1), torch.cat([torch.full_like(value, -100), value.gather(1, chosen)], 1)

    return Task("lookup", keys, values, draw)


def average(keys: int = 64, values: int = 16, pairs: int = 16, queries: int = 8) -> Task:
    """Pairs, then queries whose answer is the value of any pair."""

    def draw(b: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.randint(keys, (b, pairs + queries), generator=generator)
        value = torch.randint(values, (b, pairs), generator=generator)
        chosen = torch.randint(pairs, (b, queries), generator=generator)
        query = torch.full((b, queries), values)
        tokens = torch.stack([key, torch.cat([value, query], 1)], -1)
        return tokens, torch.cat([torch.full_like(value, -100), value.gather(1, chosen)], 1)

    return Task("average", keys, values, draw)


TASKS = {"lookup": lookup, "average": average}


@final
class ReaderBlock(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)"""

    def __init__(self, width: int, heads: int, key_width: int | Sequence[int]) -> None:
        super().__init__()
        self.attend = MultiHead(width, heads, key_width=key_width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.mlp(self.between(x))


@final
class Reader(nn.Module):
    """Tokens (b, n, 2) -> logits (b, n, values).  No positions: sequences are sets of pairs."""

    def __init__(
        self, task: Task, *, width: int = 32, layers: int = 2, heads: int = 2, key_width: int | Sequence[int] = 4
    ) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(task.keys, width), nn.Embedding(task.values + 1, width)
        self.blocks = nn.ModuleList(ReaderBlock(width, heads, key_width) for _ in range(layers))
        self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, task.values)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.key(tokens[..., 0]) + self.value(tokens[..., 1])
        for block in self.blocks:
            x = block(x)
        return self.read(self.norm(x))

    def loss(self, tokens: Tensor, answers: Tensor) -> Tensor:
        """Mean cross-entropy over the query tokens."""
        return F.cross_entropy(self(tokens).flatten(0, 1), answers.flatten(), ignore_index=-100)


@final
@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a run after `step` steps; `event` is the outcome of `Grower.grow`, if it was called there."""

    step: int
    loss: float  # on data never trained on
    widths: dict[str, tuple[int, ...]]  # key widths of the heads, by layer
    scores: tuple[HeadScore, ...]  # empty where nothing was observed
    parameters: int
    event: GrowthEvent | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "widths": {layer: list(widths) for layer, widths in self.widths.items()},
            "scores": [asdict(score) for score in self.scores],
            "event": None if self.event is None else self.event.to_dict(),
        }


def train_and_grow(
    task: Task,
    *,
    steps: int = 600,
    every: int = 200,
    key_width: int = 2,
    layers: int = 1,
    heads: int = 2,
    batch: int = 32,
    observe: int = 24,
    rate: float = 3e-3,
    seed: int = 0,
) -> Iterator[Snapshot]:
    """Train, and after every `every` steps grow if it helps; yields a Snapshot every quarter of that, and at growth.

    The last `observe` steps before each growth are observed; the loss that decides is on other sequences.
    """
    sizes = {"steps": steps, "every": every, "key_width": key_width, "layers": layers, "heads": heads}
    for name, value in {**sizes, "batch": batch, "observe": observe}.items():
        if value < 1:
            raise InputError(f"grow: {name} must be at least 1, but is {value}")
    with seeded(seed):
        model = Reader(task, layers=layers, heads=heads, key_width=key_width)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    draws = torch.Generator().manual_seed(seed + 1)
    held_out = task.draw(256, torch.Generator().manual_seed(seed + 2))
    validation = task.draw(512, torch.Generator().manual_seed(seed + 3))
    grower = Grower(model, optimizer)
    grower.pause()

    def snapshot(step: int, scores: tuple[HeadScore, ...] = (), event: GrowthEvent | None = None) -> Snapshot:
        with torch.no_grad():
            loss = float(model.loss(*validation))
        widths = {name: layer.key_widths for name, layer in grower.layers.items()}
        return Snapshot(step, loss, widths, scores, sum(p.numel() for p in model.parameters()), event)

    try:
        yield snapshot(0)
        for step in range(1, steps + 1):
            watching = (step - 1) % every >= every - observe and step < steps
            grower.resume() if watching else grower.pause()
            optimizer.zero_grad()
            model.loss(*task.draw(batch, draws)).backward()
            if watching:
                grower.observe()
            optimizer.step()
            if step % every == 0 and step < steps:
                scores = tuple(grower.scores())
                event = grower.grow(loss=lambda: model.loss(*held_out))
                grower.reset()
                yield snapshot(step, scores, event)
            elif step % max(1, every // 4) == 0 or step == steps:
                yield snapshot(step)
    finally:
        grower.close()
