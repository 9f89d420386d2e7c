"""Examine a model over many batches: streaming, resumable, and over several processes with the same result."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.examination.measure.observe import Measurement, Site, observe, sequence
from headwise.examination.measure.streaming import CHUNK
from headwise.examination.record import SCHEMA, Examination
from headwise.examination.report import excerpt
from headwise.examination.summary import summarise
from headwise.models.fingerprint import check_weights, versions
from headwise.models.intercept import Call, intercept, nothing_seen
from headwise.models.run import run_model

Batch = Mapping[str, Tensor] | Sequence[Tensor] | Tensor

SPECTRA_EVERY = 8
"""A spectrum costs some ten times a forward pass at 512 tokens; on every eighth batch it costs about as much as one."""


def examine(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    name: str | None = None,
    data: Mapping[str, Any] | None = None,
    made: Mapping[str, Any] | None = None,
    tokens: Callable[[Batch], list[list[str]]] | None = None,
    spectra_every: int = SPECTRA_EVERY,
    memory: int | None = None,
    seed: int = 0,
    work: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Examination:
    """Measure every head of `model` over `batches` (what the model takes: keyword tensors, a tuple, or one tensor).

    tokens         what to show for each position of a batch, for the excerpt in the report
    spectra_every  spectra are measured on the first batch and every so many after it
    memory         bytes that blocks of P may take; the default keeps them in the cache
    work           a directory where each batch's result is kept as soon as it is there; what it holds is not repeated
    progress       called with the number of batches done

    With torch.distributed initialised, batches are dealt out over the processes and every one returns the whole result.
    """
    check_weights(model)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    training = model.training
    model.eval()
    mine: dict[int, list[Measurement]] = {}
    shown: dict[str, Any] = {}
    try:
        for index, batch in enumerate(batches):
            if index == 0 and rank == 0:
                shown = _excerpt(model, batch, tokens)
            if index % world == rank:
                mine[index] = _one(model, batch, index, spectra_every, memory, seed, work)
            if progress is not None:
                progress(index + 1)
    finally:
        model.train(training)
    done = _gather(mine) if world > 1 else mine
    if not done:
        raise InputError("no batches: give at least one text, image or recording")
    measurements = [x for index in sorted(done) for x in done[index]]
    result = summarise(
        measurements,
        model=_describe(model, name),
        data={"batches": len(done), **(data or {})},
        made={"schema": SCHEMA, "seed": seed, "spectra_every": spectra_every, **versions(), **(made or {})},
    )
    return Examination(**{**_fields(result), "excerpt": shown})


def _one(
    model: nn.Module,
    batch: Batch,
    index: int,
    spectra_every: int,
    memory: int | None,
    seed: int,
    work: Path | None,
) -> list[Measurement]:
    kept = None if work is None else work / f"batch-{index:06d}.pt"
    if kept is not None and kept.exists():
        return load(kept)
    found = observe(
        model,
        batch,
        with_spectra=spectra_every > 0 and index % spectra_every == 0,
        # scores, exponentials, the padded block and what autograd-free torch keeps in flight: four floats an entry
        entries=CHUNK if memory is None else max(1 << 12, memory // 16),
        generator=torch.Generator().manual_seed(seed + index),
    )
    if kept is not None:
        save(found, kept)
    return found


def save(measurements: list[Measurement], path: Path) -> None:
    """Written beside and renamed, so that a reader never sees half a file."""
    rows = [{**vars(x), "sites": [asdict(site) for site in x.sites]} for x in measurements]
    beside = path.with_suffix(f".{os.getpid()}.part")
    torch.save(rows, beside)
    beside.replace(path)


def load(path: Path) -> list[Measurement]:
    """What `save` wrote; tensors and plain values only."""
    rows = torch.load(path, weights_only=True)
    return [Measurement(**{**row, "sites": [Site(**site) for site in row["sites"]]}) for row in rows]


def _gather(mine: dict[int, list[Measurement]]) -> dict[int, list[Measurement]]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {index: found for part in parts for index, found in part.items()}


def _excerpt(model: nn.Module, batch: Batch, tokens: Callable[[Batch], list[list[str]]] | None) -> dict[str, Any]:
    """Maps of every head on the first sequence of the first batch."""
    first = _first(batch)
    names: list[str] = []
    lengths: list[tuple[int, int]] = []
    means: list[Tensor] = []

    def see(call: Call) -> None:
        scores, _ = sequence(call, 0)
        names.append(call.name)
        lengths.append((scores.shape[-2], scores.shape[-1]))
        means.append(excerpt.cell_means(scores))

    with torch.no_grad(), intercept(model, see):
        run_model(model, first)
    if not names:
        raise nothing_seen(model)
    sites = [
        {
            "site": name,
            "queries": m,
            "keys": n,
            "rows": image.shape[-2],
            "columns": image.shape[-1],
            "top": [float(f"{x:.4g}") for x in top.tolist()],
            "maps": [base64.b64encode(head.contiguous().numpy().tobytes()).decode() for head in image],
        }
        for name, (m, n), (image, top) in zip(names, lengths, excerpt.images(means), strict=True)
    ]
    words = tokens(first)[0] if tokens is not None else []
    return {"tokens": words, "sites": sites}


def _first(batch: Batch) -> Batch:
    if isinstance(batch, Mapping):
        return {key: value[:1] if isinstance(value, Tensor) and value.dim() else value for key, value in batch.items()}
    return batch[:1] if isinstance(batch, Tensor) else [value[:1] for value in batch]


def _describe(model: nn.Module, name: str | None) -> dict[str, Any]:
    weights = list(model.parameters())
    return {
        "name": name or type(model).__name__,
        "class": type(model).__name__,
        "parameters": sum(weight.numel() for weight in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch.") if weights else "none",
    }


def _fields(x: Examination) -> dict[str, Any]:
    return {name: getattr(x, name) for name in x.__dataclass_fields__}
