"""The operators that are measured: how each is built for n positions, and the complexity its paper claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

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
from headwise.operators.linear.projections import Projection, count_sketch, dense, pooling

Build = Callable[[Tensor, Tensor], AttentionOperator]

RANK = 256
"""Slots of projections and landmarks: the default of the other packages that `peers` compares with."""


@final
@dataclass(frozen=True)
class OperatorCase:
    """`build(n)` makes `(q, k) -> operator`; `longest` is the largest n that takes minutes, not hours."""

    name: str
    build: Callable[[int], Build]
    claim: str
    exponent: float  # of n, as claimed
    longest: int = 65536


def _generator(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def factored_with(kind: str, r: int, n: int) -> Build:
    """`factored` with r slots by one kind of projection, to measure the dependence on r."""
    if kind == "pooling":
        return partial(factored, e=pooling(n, max(1, n // r)))
    if kind == "CountSketch":
        return partial(factored, e=count_sketch(n, min(r, n), generator=_generator(n)))
    if kind == "dense":
        return partial(factored, e=_dense(n, r))
    raise InputError(f"bench: there is no projection {kind!r}; there are pooling, CountSketch and dense")


def _dense(n: int, r: int = RANK) -> Projection:
    r = min(r, n)
    return dense(torch.randn(r, n, generator=_generator(0)) / r**0.5)


CASES = {
    case.name: case
    for case in (
        OperatorCase("softmax", lambda n: softmax, "O(n^2)", 2.0, 16384),
        OperatorCase("window 128", lambda n: partial(window, width=128), "O(n w)", 1.0),
        OperatorCase("strided", lambda n: partial(strided, causal=True), "O(n sqrt n)", 1.5),
        OperatorCase("fixed", lambda n: partial(fixed, causal=True), "O(n sqrt n)", 1.5),
        OperatorCase("hashed", lambda n: lambda q, k: hashed(q, k, generator=_generator(n)), "O(n log n)", 1.0),
        OperatorCase("projected 256", lambda n: partial(projected, e=_dense(n)), "O(n k)", 1.0),
        OperatorCase("efficient", lambda n: efficient, "O(n d^2)", 1.0),
        OperatorCase("efficient causal", lambda n: partial(efficient, causal=True), "O(n d^2)", 1.0),
        OperatorCase("factored pooling", partial(factored_with, "pooling", RANK), "O(n d^2)", 1.0),
        OperatorCase("factored CountSketch", partial(factored_with, "CountSketch", RANK), "O(n d^2)", 1.0),
        OperatorCase("factored dense", partial(factored_with, "dense", RANK), "O(n d^2)", 1.0),
        OperatorCase("nystrom 256", lambda n: partial(nystrom, landmarks=min(n, RANK)), "O(n)", 1.0),
    )
}

RECURRENT = "recurrent"
"""The first row of the table has no operator: it is a recurrent layer."""
