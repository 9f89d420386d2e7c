"""||P' v - P v|| / ||P v||: the distance of each operator from softmax attention on given q, k and v, and its cost.

Efficient and factored attention are not approximations of softmax: their distance says how much the output of a model
trained with softmax would change, not how well a model trains with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import final

import torch
from torch import Tensor

from headwise.bench.cases import CASES
from headwise.bench.kept import Kept
from headwise.errors import HeadwiseError
from headwise.operators import Claim, softmax
from headwise.progress import Progress, reported


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


def measure_fidelity(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    kept: Kept | None = None,
    progress: Progress | bool | None = None,
) -> tuple[list[Fidelity], dict[str, str]]:
    """Every operator against softmax attention on the (q, k, v) of each layer, the cheapest first.

    Errors and costs are means over layers.  Also returned are the messages of operators that do not take the tensors.

    kept  every operator on every layer is added to it, and those that it has are not measured again
    """
    kept = Kept(None, {}) if kept is None else kept
    with reported(progress) as report:
        for done, layer in enumerate(layers, start=1):
            _one_layer(layer, kept)
            report("measuring", done, len(layers))
    return measured_fidelity(layers, kept)


def measured_fidelity(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]], kept: Kept
) -> tuple[list[Fidelity], dict[str, str]]:
    """What has been measured so far: means over the layers that an operator has been tried on."""
    by_name: dict[str, list[Fidelity]] = {}
    refused: dict[str, str] = {}
    for layer in layers:
        digest = _digest(layer)
        for name in CASES:
            result = kept.get({"layer": digest, "operator": name})
            if isinstance(result, str):
                refused[name] = result
            elif isinstance(result, dict) and {*result} == {field.name for field in fields(Fidelity)}:
                by_name.setdefault(name, []).append(Fidelity(**result))
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


def _digest(layer: Sequence[Tensor]) -> str:
    """SHA-256 of q, k and v."""
    digest = hashlib.sha256()
    for x in layer:
        digest.update(f"{x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _one_layer(layer: tuple[Tensor, Tensor, Tensor], kept: Kept) -> None:
    """Add what the layer lacks: numbers of a `Fidelity`, or the message of an operator that refuses the tensors."""
    q, k, v = layer
    n, d = k.shape[-2], v.shape[-1]
    jobs = {name: {"layer": _digest(layer), "operator": name} for name in CASES if name != "softmax"}
    missing = [name for name, job in jobs.items() if kept.get(job) is None]
    exact = {causal: softmax(q, k, causal=causal) for causal in (False, True)} if missing else {}
    references = {causal: op(v) for causal, op in exact.items()}
    for name in missing:
        try:
            operator = CASES[name].build(n)(q, k)
            out = operator(v)
        except HeadwiseError as refusal:
            kept.add(jobs[name], str(refusal))
            continue
        causal = Claim.CAUSAL in operator.claims
        reference = references[causal]
        error, size = (out - reference).norm(dim=(-2, -1)), reference.norm(dim=(-2, -1))
        cost = operator.cost(d).multiply_adds / exact[causal].cost(d).multiply_adds
        row = Fidelity(name, (error.norm() / size.norm()).item(), (error / size).max().item(), cost, causal)
        kept.add(jobs[name], asdict(row))
