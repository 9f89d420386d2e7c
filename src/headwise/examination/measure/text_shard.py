"""One text over several processes: each runs the model on its tokens, and measures some heads on all of them.

    positions of all heads  --q, k, v-->  all positions of some heads  --P V-->  positions of all heads

Between attention calls a process holds N / P tokens; at a call it trades them for all tokens of h / P heads (the head
exchange of Jacobs et al. 2023, DeepSpeed Ulysses), measures these as it would measure a whole text, and trades the
outputs back.  So every number is that of one process, and every tensor of the forward pass shrinks as 1 / P.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.distributed.collectives import Ranks
from headwise.distributed.exchanges import by_heads, by_positions
from headwise.distributed.slices import Slices
from headwise.errors import HeadwiseError, InputError, UnsupportedError
from headwise.models.intercept import AttentionCall, intercept
from headwise.models.run import Batch, run_model
from headwise.operators.masks import Mask

T = TypeVar("T")

CHECKED_TOKENS = 32
"""Tokens for each process of the text on which the shared run is compared with a run of one process."""

LEAST_TOKENS = 2
"""For each process: of a single token transformers does not say whether its attention is causal."""

AGREEMENT = 1e-3
"""Largest difference of queries, keys and values, relative to their largest entry, that is rounding."""


class TextShard:
    """The part of one text that this process has, and how calls on it become calls on all of it."""

    def __init__(self, model: nn.Module, batch: Batch, ranks: Ranks) -> None:
        self.ranks = ranks
        self.batch = _tokens_only(model, batch, ranks.size)
        self.slices = Slices.even(next(iter(self.batch.values())).shape[1], ranks.size)
        self._heads = 0  # of the call that `whole` was given last

    @property
    def own(self) -> dict[str, Tensor]:
        """What the model is run on here: the tokens of this process, with their positions in the text."""
        start, stop = self.slices.segments(self.ranks.rank)[0]
        positions = torch.arange(start, stop).unsqueeze(0)
        device = next(iter(self.batch.values())).device
        return {**{name: x[:, start:stop] for name, x in self.batch.items()}, "position_ids": positions.to(device)}

    def whole(self, call: AttentionCall) -> AttentionCall:
        """The same call on all positions, with the heads of this process."""
        h, m, n = call.q.shape[1], call.q.shape[-2], call.k.shape[-2]
        if call.kind != "self" or call.windows != 1 or not m == n == self.slices.lengths[self.ranks.rank]:
            raise UnsupportedError(
                f"{call.site}: {m} queries and {n} keys, but this process has {self.slices.lengths[self.ranks.rank]} "
                "tokens of the text; only self-attention over a text of tokens can be shared"
            )
        if call.mask.visible is not None or call.mask.attn_bias is not None:
            raise UnsupportedError(
                f"{call.site}: a mask or a bias between pairs of tokens (a window, relative positions) is cut with the "
                "text; only unmasked and causal attention can be shared: examine it with one process"
            )
        if h < self.ranks.size:
            raise InputError(f"{call.site}: {h} heads for {self.ranks.size} processes; start at most {h} processes")
        self._heads = h
        q, k, v = (by_heads(x, -3, self.slices, self.ranks) for x in (call.q, call.k, call.v))
        mask = Mask(self.slices.n, self.slices.n, causal=call.mask.causal)
        return replace(call, q=q, k=k, v=v, mask=mask)

    @property
    def heads(self) -> slice:
        """The heads of this process in the last call."""
        before = Slices.even(self._heads, self.ranks.size).segments(self.ranks.rank)[0]
        return slice(*before)

    def rows(self, output: Tensor) -> Tensor:
        """P V of some heads (heads, N, d) -> the rows of this process with all heads (h, n, d)."""
        return by_positions(output, -3, self._heads, self.slices, self.ranks)

    def from_all(self, value: T) -> list[T]:
        """`value` of every process."""
        values: list[Any] = [None] * self.ranks.size
        self.ranks.call(dist.all_gather_object, values, value)
        return values


def check_shared_run(model: nn.Module, batch: Batch, ranks: Ranks) -> None:
    """UnsupportedError unless queries, keys and values of a shared run on a few tokens are those of one process.

    They are not if the model mixes tokens outside of attention (a convolution), or counts positions in its own way.
    """
    short = beginning(_tokens_only(model, batch, ranks.size), CHECKED_TOKENS * ranks.size)
    shard = TextShard(model, short, ranks)
    alone: list[AttentionCall] = []
    shared: list[AttentionCall] = []
    found: list[tuple[float, str]] = [(0.0, "")]

    def see(call: AttentionCall) -> None:
        shared.append(shard.whole(call))
        one, mine = alone[len(shared) - 1], shared[-1]
        for x, y in ((one.q, mine.q), (one.k, mine.k), (one.v, mine.v)):
            x = x[:, shard.heads]
            found.append((((y - x).abs().max() / x.abs().max().clamp(min=1e-30)).item(), call.site))

    def answer(site: str, attention: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        call = shared[-1]
        attended = attention(call.q, call.k, call.v, is_causal=call.mask.causal, scale=call.scale)
        query = args[0] if args else kwargs["query"]
        return shard.rows(attended).reshape(*query.shape[:-1], -1)

    with torch.no_grad():
        with intercept(model, alone.append):
            run_model(model, short)
        with intercept(model, see, answer=answer):
            run_model(model, shard.own)
    off, site = max(max(part) for part in shard.from_all(found))
    if not off <= AGREEMENT:
        raise UnsupportedError(
            f"{site}: on {shard.slices.n} tokens, queries, keys or values of a text shared by {ranks.size} processes "
            f"differ by {off:.1e} of their largest from those of one process: the model mixes tokens outside of "
            "attention, or counts positions in its own way; examine it with one process"
        )


def check_tokens(model: nn.Module, batch: Batch, processes: int, which: str) -> None:
    """HeadwiseError, which begins with `which`, unless the processes can share the batch."""
    try:
        _tokens_only(model, batch, processes)
    except HeadwiseError as error:
        raise type(error)(f"{which}{error}") from error


def beginning(batch: Batch, tokens: int) -> dict[str, Tensor]:
    """The first tokens of a text, a dict of tensors (1, N)."""
    assert isinstance(batch, Mapping)
    return {name: x[:, :tokens] for name, x in batch.items() if isinstance(x, Tensor)}


def _tokens_only(model: nn.Module, batch: Batch, processes: int) -> dict[str, Tensor]:
    """The tensors (1, N) of a batch of one text without padding, for a model that takes positions."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise UnsupportedError("only texts of tokens can be shared by several processes, as a dict with input_ids")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{type(model).__name__} takes no position_ids, so that a process cannot say where its tokens stand in the "
            "text; examine it with one process, or let the processes share the texts"
        )
    tokens = {name: x for name, x in batch.items() if isinstance(x, Tensor) and name != "position_ids"}
    mask, shape = tokens.pop("attention_mask", None), tuple(batch["input_ids"].shape)
    if shape[0] != 1 or any(tuple(x.shape) != shape for x in tokens.values()):
        shapes = {name: tuple(x.shape) for name, x in tokens.items()}
        raise UnsupportedError(f"one text at a time can be shared by several processes, but the batch has {shapes}")
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError("the text has padding, which several processes cannot share; leave it away")
    if shape[1] < LEAST_TOKENS * processes:
        raise InputError(
            f"a text of {shape[1]} tokens cannot be shared by {processes} processes, which need {LEAST_TOKENS} tokens "
            "each; start fewer, leave the text out, or let the processes share the texts"
        )
    return tokens
