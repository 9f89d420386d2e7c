"""||P' v - P v|| / ||P v||: how far each operator is from exact softmax attention on given q and k, against its cost.

Efficient and factored attention are other operators, not approximations; their distance says how much a model trained
with softmax would notice, not how good they are to train with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from headwise.bench.cases import ENTRIES
from headwise.errors import HeadwiseError
from headwise.operators.softmax import softmax


@dataclass(frozen=True)
class Fidelity:
    name: str
    error: float  # relative, over all heads
    worst: float  # of any one head
    cost: float  # multiply-adds relative to exact attention's
    causal: bool

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def random_heads(n: int, *, heads: int = 8, width: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k and v (1, heads, n, width)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, width, generator=generator) for _ in range(3))
    return q, k, v


def fidelity(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Fidelity], dict[str, str]]:
    """Every operator of the table against exact attention, and why the others cannot take these tensors."""
    rows, refused = [], {}
    n, d = k.shape[-2], v.shape[-1]
    exact = {causal: softmax(q, k, causal=causal) for causal in (False, True)}
    targets = {causal: op(v) for causal, op in exact.items()}
    for name, entry in ENTRIES.items():
        if name == "exact":
            continue
        try:
            operator = entry.build(n)(q, k)
            causal = bool({claim.name for claim in operator.claims} & {"CAUSAL"})
            out, target = operator(v), targets[causal]
        except HeadwiseError as error:
            refused[name] = str(error)
            continue
        wrong, size = (out - target).norm(dim=(-2, -1)), target.norm(dim=(-2, -1))
        cost = operator.cost(d).multiply_adds / exact[causal].cost(d).multiply_adds
        rows.append(Fidelity(name, (wrong.norm() / size.norm()).item(), (wrong / size).max().item(), cost, causal))
    return sorted(rows, key=lambda row: row.cost), refused


def fidelity_over(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> tuple[list[Fidelity], dict[str, str]]:
    """The same over several layers of a model: errors as means over layers, the worst head of all of them."""
    found: dict[str, list[Fidelity]] = {}
    refused: dict[str, str] = {}
    for q, k, v in layers:
        rows, why = fidelity(q, k, v)
        refused.update(why)
        for row in rows:
            found.setdefault(row.name, []).append(row)
    means = [
        Fidelity(
            name,
            sum(row.error for row in rows) / len(rows),
            max(row.worst for row in rows),
            sum(row.cost for row in rows) / len(rows),
            rows[0].causal,
        )
        for name, rows in found.items()
    ]
    return sorted(means, key=lambda row: row.cost), refused
