"""The rows of the complexity table: how each operator is built for n positions, and what its source claims of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.operators import (
    AttentionOperator,
    efficient,
    factored,
    fixed,
    hashed,
    nystrom,
    projected,
    softmax,
    strided,
    window,
)
from headwise.operators.linear.projections import count_sketch, dense, pooling

Build = Callable[[Tensor, Tensor], AttentionOperator]
RANK = 256
"""Slots of projections and landmarks, as the packages compared with have it."""


@dataclass(frozen=True)
class Entry:
    """`build(n)` gives `(q, k) -> operator`; `claim` and `exponent` are the source's; `longest` n within minutes."""

    name: str
    build: Callable[[int], Build]
    claim: str
    exponent: float
    longest: int = 65536


def _dense(n: int, r: int = RANK) -> Tensor:
    r = min(r, n)
    return torch.randn(r, n, generator=torch.Generator().manual_seed(0)) / r**0.5


def _drawn(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def factored_with(kind: str, r: int, n: int) -> Build:
    """`factored` with r slots by one kind of projection, for the dependence on r."""
    if kind == "pooling":
        return partial(factored, e=pooling(n, max(1, n // r)))
    if kind == "CountSketch":
        return partial(factored, e=count_sketch(n, min(r, n), generator=_drawn(n)))
    if kind == "dense":
        return partial(factored, e=dense(_dense(n, r)))
    raise InputError(f"bench: projections are pooling, CountSketch and dense, but asked for {kind!r}")


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("exact", lambda n: softmax, "O(n^2)", 2.0, 16384),
        Entry("window 128", lambda n: partial(window, width=128), "O(n w)", 1.0),
        Entry("strided", lambda n: partial(strided, causal=True), "O(n sqrt n)", 1.5),
        Entry("fixed", lambda n: partial(fixed, causal=True), "O(n sqrt n)", 1.5),
        Entry("hashed", lambda n: lambda q, k: hashed(q, k, generator=_drawn(n)), "O(n log n)", 1.0),
        Entry("projected 256", lambda n: partial(projected, e=dense(_dense(n))), "O(n k)", 1.0),
        Entry("efficient", lambda n: efficient, "O(n d^2)", 1.0),
        Entry("efficient causal", lambda n: partial(efficient, causal=True), "O(n d^2)", 1.0),
        Entry("factored pooling", partial(factored_with, "pooling", RANK), "O(n d^2)", 1.0),
        Entry("factored CountSketch", partial(factored_with, "CountSketch", RANK), "O(n d^2)", 1.0),
        Entry("factored dense", partial(factored_with, "dense", RANK), "O(n d^2)", 1.0),
        Entry("nystrom 256", lambda n: partial(nystrom, landmarks=min(n, RANK)), "O(n)", 1.0),
    )
}
RECURRENT = "recurrent"
"""The first row of the table has no operator: it is the layer itself."""


def entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise InputError(f"bench: no operator {name!r}; there are {', '.join([*ENTRIES, RECURRENT])}")
    return ENTRIES[name]
