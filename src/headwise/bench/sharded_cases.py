"""What is timed on several processes: attention by slices of a sequence, the bytes it should send, and its work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor

from headwise.distributed import Slices, sequence_parallel, traffic
from headwise.distributed.traffic import head_traffic
from headwise.operators import efficient, fixed, near_far, nystrom, projected, softmax, uniform, window
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.projections import dense

HEADS, WIDTH = 4, 64


@final
@dataclass(frozen=True)
class ShardedCase:
    """One step on n tokens, shared by the processes.

    prepare     (slices, rank) -> a forward pass on the slice of a rank, and the tensors that get gradients
    received    (n, ranks) -> bytes that a rank receives in a forward pass
    work        n -> multiply-adds of a forward pass
    """

    n: int
    prepare: Callable[[Slices, int], tuple[Callable[[], Tensor], Sequence[Tensor]]]
    received: Callable[[int, int], float]
    work: Callable[[int], float]
    zigzag: bool = False
    most_ranks: int | None = None  # None: any number

    def slices(self, n: int, ranks: int) -> Slices:
        return Slices.even(n, ranks, zigzag=self.zigzag)


def attention_case(
    build: Callable[..., AttentionOperator],
    n: int,
    *,
    causal: bool = False,
    zigzag: bool = False,
    exchange: Literal["cheapest", "heads", "ring"] = "cheapest",
) -> ShardedCase:
    """HEADS heads of WIDTH in float32."""
    masks = {"causal": True} if causal else {}

    def whole(n: int) -> AttentionOperator:
        q = torch.empty(HEADS, n, WIDTH, device="meta")
        return build(q, q, **masks)

    def prepare(held: Slices, rank: int) -> tuple[Callable[[], Tensor], Sequence[Tensor]]:
        q, k, v = (torch.randn(1, HEADS, held.lengths[rank], WIDTH, requires_grad=True) for _ in range(3))
        sharded = sequence_parallel(build, zigzag=zigzag, exchange=exchange)
        return lambda: sharded(q, k, **masks)(v), (q, k, v)

    def received(n: int, ranks: int) -> float:
        count = head_traffic if exchange == "heads" else traffic
        return float(4 * HEADS * count(whole(n), WIDTH, ranks).received(ranks))

    def work(n: int) -> float:
        cost = whole(n).cost(WIDTH).multiply_adds
        return cost / 2 if build is softmax and causal else cost  # pairs that hide one another are skipped

    most = HEADS if exchange == "heads" else None
    return ShardedCase(n, prepare, received, work, zigzag, most)


def _near_far(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
    r = torch.linspace(-1, 1, 8 * WIDTH, dtype=q.dtype).reshape(8, WIDTH)
    return near_far(q, k, r, r, torch.zeros(8, dtype=q.dtype), block=64, **masks)


def _projected(q: Tensor, k: Tensor) -> AttentionOperator:
    n = k.shape[-2]
    if n > 10**5:  # the model asks for the sizes of long sequences, not for values
        return projected(q, k, dense(torch.empty(128, n, dtype=q.dtype, device="meta")))
    return projected(q, k, dense(torch.arange(128 * n).remainder(7).reshape(128, n).to(q.dtype) / n))


def _fixed(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
    return fixed(q, k, 1 << round(math.log2(k.shape[-2]) / 2), **masks)


def _uniform(q: Tensor, k: Tensor) -> AttentionOperator:
    return uniform(q.shape[-2], k.shape[-2])


def sharded_cases() -> dict[str, ShardedCase]:
    """Attention whose exchange, work or memory differs in kind."""
    return {
        "softmax, ring, zig-zag": attention_case(softmax, 4096, causal=True, zigzag=True, exchange="ring"),
        "softmax, ring": attention_case(softmax, 4096, exchange="ring"),
        "softmax, heads": attention_case(softmax, 4096, exchange="heads"),
        "window 129": attention_case(partial(window, width=129), 8192, causal=True),
        "fixed": attention_case(_fixed, 8192, causal=True),
        "near_far 64": attention_case(_near_far, 8192, causal=True),
        "efficient": attention_case(efficient, 8192),
        "efficient, causal": attention_case(efficient, 8192, causal=True),
        "projected 128": attention_case(_projected, 8192),
        "nystrom 64": attention_case(partial(nystrom, landmarks=64), 8192),
        "uniform": attention_case(_uniform, 8192),
    }
