"""Two small tasks to grow on: one where the key width is the bottleneck, one where it is not.

lookup   n pairs (key, value), then queries that name a key; answer its value.  A head tells `keys` apart through k
         numbers: too few, and answers blur.
average  answer the value of a token drawn at random from the sequence.  Looking everywhere alike is optimal, any k will
         do, and what is left of the loss is chance.

`Reader` is a small encoder of MultiHead layers whose key width is given; sequences are drawn afresh for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.nn.multihead import MultiHead

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""(batch, generator) -> tokens (b, n, 2) of (key, value), and answers (b, n), -100 where nothing is asked."""


@final
@dataclass(frozen=True)
class Task:
    """What to draw and how many symbols there are; `ask` is the value symbol of a token that asks."""

    name: str
    keys: int
    values: int
    draw: Draw

    @property
    def ask(self) -> int:
        return self.values


def lookup(keys: int = 64, values: int = 16, pairs: int = 16, queries: int = 8) -> Task:
    """Pairs with distinct keys, then queries for some of them."""

    def draw(b: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(b, keys, generator=generator).argsort(1)[:, :pairs]
        value = torch.randint(values, (b, pairs), generator=generator)
        asked = torch.rand(b, pairs, generator=generator).argsort(1)[:, :queries]
        tokens = torch.stack([key, value], -1)
        ask = torch.stack([key.gather(1, asked), torch.full_like(asked, values)], -1)
        silent = torch.full_like(value, -100)
        return torch.cat([tokens, ask], 1), torch.cat([silent, value.gather(1, asked)], 1)

    return Task("lookup", keys, values, draw)


def average(keys: int = 64, values: int = 16, pairs: int = 16, queries: int = 8) -> Task:
    """Pairs, then queries whose answer is the value of any pair."""

    def draw(b: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.randint(keys, (b, pairs + queries), generator=generator)
        value = torch.randint(values, (b, pairs), generator=generator)
        chance = torch.randint(pairs, (b, queries), generator=generator)
        ask = torch.full((b, queries), values)
        tokens = torch.stack([key, torch.cat([value, ask], 1)], -1)
        return tokens, torch.cat([torch.full_like(value, -100), value.gather(1, chance)], 1)

    return Task("average", keys, values, draw)


@final
class Block(nn.Module):
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
        self.blocks = nn.ModuleList(Block(width, heads, key_width) for _ in range(layers))
        self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, task.values)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.key(tokens[..., 0]) + self.value(tokens[..., 1])
        for block in self.blocks:
            x = block(x)
        return self.read(self.norm(x))

    def loss(self, tokens: Tensor, answers: Tensor) -> Tensor:
        """Mean cross-entropy over the tokens that ask."""
        return F.cross_entropy(self(tokens).flatten(0, 1), answers.flatten(), ignore_index=-100)
