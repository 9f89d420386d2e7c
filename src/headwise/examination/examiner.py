"""Examine a model over many batches: streaming, resumable, and over several processes with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headwise import outputs
from headwise.errors import InputError
from headwise.examination.advice import with_advice
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.measure.observe import ExaminedSite, Measurement, observe
from headwise.examination.record import SCHEMA, Examination
from headwise.examination.report.excerpt import make_excerpt
from headwise.examination.summary import summarise
from headwise.models.fingerprint import batch_hash, check_weights, run_key, versions, weights_hash
from headwise.models.intercept import uncompiled
from headwise.models.partial_files import load_partial, log_damaged, save_partial
from headwise.models.run import Batch, as_it_was, check_batch, first_sequence
from headwise.models.unseen import unseen_attention
from headwise.operators._kernels import limits

SPECTRA_EVERY = 8
"""A spectrum takes about ten forward passes at 512 tokens; on every eighth batch it takes about one per batch."""


def examine(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    name: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    token_names: Callable[[Batch], list[list[str]]] | None = None,
    spectra_every: int = SPECTRA_EVERY,
    block_bytes: int | None = None,
    seed: int = 0,
    partial_results: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Examination:
    """Measure every head of `model` over `batches`: keyword tensors, a sequence of tensors, or one tensor each.

    name             name of the model in the report; default: its class
    inputs           where the batches came from, for the report
    provenance       such as the command, for the report
    token_names      strings for the positions of each sequence of a batch, for the excerpt and to tell delimiters
    spectra_every    spectra are measured on batches 0, spectra_every, 2 spectra_every ...; 0: never
    block_bytes      memory that blocks of P may take; the default fits into the cache
    partial_results  a directory that keeps the result of each batch; an interrupted run resumes from it
    progress         called with the number of batches done

    If torch.distributed is initialised, the processes share the batches and each returns the whole result.
    """
    model = uncompiled(model)
    check_weights(model)
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    measured: dict[int, list[Measurement]] = {}
    excerpt: dict[str, Any] = {}
    unseen: list[dict[str, str]] = []
    # scores, exponentials, the padded block and temporaries: four floats for each entry of P
    entries = limits.CACHE_ENTRIES if block_bytes is None else max(1 << 12, block_bytes // 16)
    for batch in batches if isinstance(batches, Sequence) else ():
        check_batch(batch)
    weights = weights_hash(model)
    settings = {"seed": seed, "spectra_every": spectra_every, "entries": entries, "measures": list(MEASURES)}
    settings["names"] = token_names is not None
    if partial_results is not None:
        # of batches that are generated one by one, only those that were measured can be compared
        known = [batch_hash(batch) for batch in batches] if isinstance(batches, Sequence) else None
        outputs.partial_results(partial_results, run_key(weights, {**settings, "batches": known}))
    hashes: list[str] = []
    with as_it_was(model):
        for index, batch in enumerate(batches):
            check_batch(batch)
            hashes.append(batch_hash(batch))
            if index == 0 and rank == 0:
                excerpt = make_excerpt(model, batch, token_names)
                unseen = unseen_attention(model, first_sequence(model, batch))
            if index % processes == rank:
                file = None if partial_results is None else partial_results / f"batch-{index:06d}.pt"
                run = run_key(weights, {**settings, "batch": hashes[-1], "index": index})
                stored = None if file is None else load_measurements(file, run)
                measured[index] = stored or observe(
                    model,
                    batch,
                    with_spectra=spectra_every > 0 and index % spectra_every == 0,
                    entries=entries,
                    generator=torch.Generator().manual_seed(seed + index),
                    token_names=token_names,
                    with_repeated_tokens=index % (spectra_every or SPECTRA_EVERY) == 0,
                )
                if file is not None and stored is None:
                    save_measurements(measured[index], file, run)
            if progress is not None:
                progress(index + 1)
    if processes > 1:
        measured = _gather(measured)
    if not measured:
        raise InputError("no batches: give at least one text, image or recording")
    result = summarise(
        [x for index in sorted(measured) for x in measured[index]],
        model=_describe(model, name),
        inputs={"batches": len(measured), **(inputs or {})},
        provenance={
            "schema": SCHEMA,
            "run": run_key(weights, {**settings, "batches": hashes}),
            "weights": weights,
            "seed": seed,
            "spectra_every": spectra_every,
            **versions(),
            **(provenance or {}),
        },
        excerpt=excerpt,
    )
    return with_advice(replace(result, unseen=unseen, headline=[*result.headline, *_not_measured(unseen)]))


def _not_measured(unseen: list[dict[str, str]]) -> list[str]:
    """A sentence on attention that was not seen."""
    if not unseen:
        return []
    names = ", ".join(f"{x['name']} ({x['class']}: {x['why']})" for x in unseen[:3])
    more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
    return [f"Not measured: {names}{more}."]


def save_measurements(measurements: list[Measurement], path: Path, run: str) -> None:
    """Write the measurements of one batch; `run` identifies the model, the batch and the settings."""
    save_partial(path, run, [{**vars(x), "sites": [asdict(site) for site in x.sites]} for x in measurements])


def load_measurements(path: Path, run: str) -> list[Measurement] | None:
    """What `save_measurements` wrote; None if there is no file or it is damaged."""
    rows = load_partial(path, run)
    try:
        return rows and [
            Measurement(**{**row, "sites": [ExaminedSite(**site) for site in row["sites"]]}) for row in rows
        ]
    except (TypeError, KeyError) as error:
        log_damaged(path, str(error))
        return None


def _gather(measured: dict[int, list[Measurement]]) -> dict[int, list[Measurement]]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, measured)
    return {index: found for part in parts for index, found in part.items()}


def _describe(model: nn.Module, name: str | None) -> dict[str, Any]:
    weights = list(model.parameters())
    return {
        "name": name or type(model).__name__,
        "class": type(model).__name__,
        "parameters": sum(weight.numel() for weight in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch.") if weights else "none",
    }
