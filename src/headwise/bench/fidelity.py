"""||P' v - P v|| / ||P v||: the distance of each operator from softmax attention on given q, k and v, and its cost.

Efficient and factored attention are not approximations of softmax: their distance says how much the output of a model
trained with softmax would change, not how well a model trains with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

import torch
from torch import Tensor

from headwise.bench.cases import CASES
from headwise.errors import HeadwiseError
from headwise.operators import Claim, softmax


@final
@dataclass(frozen=True)
class Fidelity:
    """The distance of one operator from softmax attention, and its cost."""

    name: str
    error: float  # relative, over all heads
    worst: float  # of any one head
    cost: float  # multiply-adds relative to those of softmax attention
    causal: bool


def random_heads(n: int, *, heads: int = 8, width: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k and v (1, heads, n, width)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, width, generator=generator) for _ in range(3))
    return q, k, v


def measure_fidelity(layers: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Fidelity], dict[str, str]]:
    """Every operator against softmax attention on the (q, k, v) of each layer, the cheapest first.

    Errors and costs are means over layers.  Also returned are the messages of operators that do not take the tensors.
    """
    by_name: dict[str, list[Fidelity]] = {}
    refused: dict[str, str] = {}
    for q, k, v in layers:
        for row in _one_layer(q, k, v, refused):
            by_name.setdefault(row.name, []).append(row)
    means = [
        Fidelity(
            name,
            fmean(row.error for row in rows),
            max(row.worst for row in rows),
            fmean(row.cost for row in rows),
            rows[0].causal,
        )
        for name, rows in by_name.items()
    ]
    return sorted(means, key=lambda row: row.cost), refused


def _one_layer(q: Tensor, k: Tensor, v: Tensor, refused: dict[str, str]) -> Iterator[Fidelity]:
    n, d = k.shape[-2], v.shape[-1]
    exact = {causal: softmax(q, k, causal=causal) for causal in (False, True)}
    references = {causal: op(v) for causal, op in exact.items()}
    for name, case in CASES.items():
        if name == "softmax":
            continue
        try:
            operator = case.build(n)(q, k)
            out = operator(v)
        except HeadwiseError as refusal:
            refused[name] = str(refusal)
            continue
        causal = Claim.CAUSAL in operator.claims
        reference = references[causal]
        error, size = (out - reference).norm(dim=(-2, -1)), reference.norm(dim=(-2, -1))
        cost = operator.cost(d).multiply_adds / exact[causal].cost(d).multiply_adds
        yield Fidelity(name, (error.norm() / size.norm()).item(), (error / size).max().item(), cost, causal)
