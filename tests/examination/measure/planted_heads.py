"""Models whose one head attends as planned: q and k, or a mask, are made from the tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 400
PERIOD, NEWLINE = 0, 1
"""Tokens that are delimiters."""

Scores = Callable[[Tensor], Tensor]
"""ids (n,) -> scores (n, n) of the head; -inf where it may not attend"""


class Planted(nn.Module):
    """One attention head whose scores are `scores(ids)`; they are given to the attention function as q k^T, k = 1."""

    def __init__(self, scores: Scores, width: int = 16, mask: Callable[[int], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.scores, self.mask = scores, mask

    def forward(self, input_ids: Tensor) -> Tensor:
        n = input_ids.shape[1]
        q = torch.stack([self.scores(row) for row in input_ids]).unsqueeze(1)
        k = torch.eye(n).expand(len(input_ids), 1, n, n)
        v = self.embedding(input_ids).unsqueeze(1)
        mask = None if self.mask is None else self.mask(n)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).squeeze(1)


def text(n: int = 128, seed: int = 0) -> Tensor:
    """Tokens as frequent as words are (Zipf), every eighth a delimiter."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, VOCABULARY - 1).float()
    ids = 2 + torch.multinomial(weights, n, replacement=True, generator=generator)
    ids[7::8] = torch.tensor([PERIOD, NEWLINE]).repeat(n)[: len(ids[7::8])]
    return ids.unsqueeze(0)


def names(batch: dict[str, Tensor]) -> list[list[str]]:
    return [[{PERIOD: ".", NEWLINE: "Ċ"}.get(i, f"word{i}") for i in row.tolist()] for row in batch["input_ids"]]


SHARP = 12.0


def _on(chosen: Tensor, *, else_first: bool = True) -> Tensor:
    """Scores of a head that attends to the chosen keys (n, n), and to the first key where there is none."""
    scores = SHARP * chosen.float()
    if else_first:
        scores[:, 0] += SHARP / 2
    return scores


def induction(ids: Tensor) -> Tensor:
    n = len(ids)
    before = torch.cat([ids.new_full((1,), -1), ids[:-1]])
    return _on((before[None] == ids[:, None]) & torch.ones(n, n, dtype=torch.bool).tril())


def duplicate(ids: Tensor) -> Tensor:
    return _on((ids[None] == ids[:, None]) & ~torch.eye(len(ids), dtype=torch.bool))


def previous_of_duplicate(ids: Tensor) -> Tensor:
    after = torch.cat([ids[1:], ids.new_full((1,), -1)])
    return _on((after[None] == ids[:, None]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril(-2))


def delimiter(ids: Tensor) -> Tensor:
    return _on((ids <= NEWLINE).expand(len(ids), -1), else_first=False)


def sink(ids: Tensor) -> Tensor:
    return _on(torch.zeros(len(ids), len(ids)))


def previous(ids: Tensor) -> Tensor:
    return _on(torch.eye(len(ids)).roll(-1, dims=1), else_first=False)


def uniform(ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), len(ids))


def toeplitz(ids: Tensor) -> Tensor:
    offset = torch.arange(len(ids))[None] - torch.arange(len(ids))[:, None]
    return -offset.abs() / 40


def local(ids: Tensor) -> Tensor:
    """By content, among the keys within 8."""
    n = len(ids)
    near = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs() <= 8
    return torch.where(near, 3 * torch.randn(n, n, generator=torch.Generator().manual_seed(0)), -20.0)


def retrieval(ids: Tensor) -> Tensor:
    """One key a query, at random among those farther than n/4."""
    n = len(ids)
    far = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs() > n / 4
    chosen = torch.rand(n, n, generator=torch.Generator().manual_seed(0)).masked_fill(~far, -1).argmax(-1)
    return 20 * F.one_hot(chosen, n).float()


def low_rank(ids: Tensor) -> Tensor:
    """Four topics of tokens; each query attends to twelve keys of its topic, the same for all of them."""
    n = len(ids)
    generator = torch.Generator().manual_seed(0)
    topic = torch.randint(4, (n,), generator=generator)
    chosen = torch.rand(4, n, generator=generator).argsort(-1) < 12
    return 20 * chosen[topic].float()


def dense(ids: Tensor) -> Tensor:
    return 4 * torch.randn(len(ids), len(ids), generator=torch.Generator().manual_seed(0))


def broad(ids: Tensor) -> Tensor:
    return 1.3 * torch.randn(len(ids), len(ids), generator=torch.Generator().manual_seed(0))


def window(width: int) -> Callable[[int], Tensor]:
    return lambda n: (torch.arange(n)[None] - torch.arange(n)[:, None]).abs() <= width
