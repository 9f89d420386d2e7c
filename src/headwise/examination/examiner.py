"""Examine a model over texts or batches: streaming, resumable, and over several processes with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise import outputs
from headwise.distributed.collectives import Ranks, largest
from headwise.distributed.dealing import same_on_all
from headwise.errors import InputError
from headwise.examination.advice import with_advice
from headwise.examination.measure.depth import with_depth
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.measure.importance import with_importance
from headwise.examination.measure.observe import ExaminedSite, Measurement, observe
from headwise.examination.measure.text_shard import beginning, check_shared_run, check_tokens
from headwise.examination.record import SCHEMA, Examination
from headwise.examination.report.excerpt import make_excerpt
from headwise.examination.summary import summarise
from headwise.models.fingerprint import batch_hash, check_weights, run_key, versions, weights_hash
from headwise.models.inputs import words_of
from headwise.models.intercept import uncompiled
from headwise.models.partial_files import load_partial, log_damaged, save_partial
from headwise.models.run import Batch, as_it_was, check_batch, first_sequence
from headwise.models.tokenized import tokenized
from headwise.models.unseen import check_own_attention, unseen_attention
from headwise.operators._kernels import limits, native
from headwise.progress import Progress, reported

EXCERPT = 512
"""Tokens of the pictures of a text that processes share, on which the first runs the whole model."""

SPECTRA_EVERY = 8
"""A spectrum takes about ten forward passes at 512 tokens; on every eighth batch it takes about one per batch."""


def examine(
    model: nn.Module,
    batches: Iterable[Batch] | None = None,
    *,
    texts: Sequence[str] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    batch_size: int = 1,
    name: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    token_names: Callable[[Batch], list[list[str]]] | None = None,
    excerpt: str | Batch | None = None,
    ablations: bool = False,
    importance: bool = False,
    lengths: Sequence[int] = (),
    spectra_every: int = SPECTRA_EVERY,
    block_bytes: int | None = None,
    seed: int = 0,
    partial_results: Path | None = None,
    progress: Progress | bool | None = None,
    sequence_parallel: bool = False,
) -> Examination:
    """Measure every head of `model` over `texts`, or over `batches` of what it takes.

        headwise.examine(model, texts=["Call me Ishmael. …"], tokenizer=tokenizer)
        headwise.examine(model, [{"pixel_values": images}, …])

    batches          a dict of keyword tensors, a sequence of tensors, or one tensor each
    texts            strings, which `tokenizer` (of transformers) turns into batches
    length           tokens to which texts are cut; default: the number of positions of the model
    batch_size       texts in one batch; shorter ones are padded, and padding is left out of every measure
    name             name of the model in the report; default: its class
    inputs           where the batches came from, for the report
    provenance       such as the command, for the report
    token_names      strings for the positions of each sequence of a batch, for the excerpt and to tell delimiters
    excerpt          what the pictures of attention show: a text (with `tokenizer`) or a batch; default: the first input
    ablations        also measure collapse curves and path lengths on the first input, in float64 (see `with_depth`)
    importance       also measure how much the answer changes without each head (see `with_importance`)
    lengths          also judge the kinds on the texts cut to each of these lengths (see `with_lengths`)
    spectra_every    spectra are measured on batches 0, spectra_every, 2 spectra_every ...; 0: never
    block_bytes      memory that blocks of P may take; the default fits into the cache
    partial_results  a directory that keeps the result of each batch; an interrupted run resumes from it
    progress         True for bars on standard error, or a function of (what, done, total)
    sequence_parallel  processes share the tokens of each text instead of the texts (see `TextShard`)

    If torch.distributed is initialised, the processes share the batches and each returns the whole result.
    """
    check_model(model)
    model = uncompiled(model)
    cut: dict[int, list[Batch]] = {}
    if texts is not None or batches is None:
        if batches is not None or texts is None:
            given = "both" if batches is not None else "neither"
            raise InputError(f"give either batches or texts=[…] with tokenizer=…, but {given} was given")
        made = tokenized(model, texts, tokenizer, length=length, batch_size=batch_size)
        batches, token_names = made.batches, token_names or made.token_names
        inputs = {**made.description, **(inputs or {})}
        cut = {n: list(tokenized(model, texts, tokenizer, length=n, batch_size=batch_size).batches) for n in lengths}
    elif lengths:
        raise InputError("lengths cuts texts=[…]; for batches call headwise.examination.with_lengths")
    elif length is not None or batch_size != 1 or (tokenizer is not None and not isinstance(excerpt, str)):
        raise InputError("tokenizer, length and batch_size are for texts=[…]; batches are taken as they are")
    check_batches(batches)
    if importance and not isinstance(batches, Sequence):
        batches = list(batches)  # they are needed twice
    check_own_attention(model)
    check_weights(model)
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if sequence_parallel and (ablations or importance or lengths):
        raise InputError(
            "ablations, importance and lengths run the model on a whole text, which sequence_parallel shares between "
            "processes; leave them out, or measure them on shorter texts"
        )
    everybody = Ranks.of(None).introduced() if sequence_parallel or processes > 1 else None
    ranks = everybody if sequence_parallel else None
    shown = excerpt_batch(model, excerpt, tokenizer)
    measured: dict[int, list[Measurement]] = {}
    pictures: dict[str, Any] = {}
    first: Batch | None = None
    unseen: list[dict[str, str]] = []
    # scores, exponentials, the padded block and temporaries: four floats for each entry of P
    entries = limits.CACHE_ENTRIES if block_bytes is None else max(1 << 12, block_bytes // 16)
    weights = weights_hash(model)
    settings = {"seed": seed, "spectra_every": spectra_every, "entries": entries, "measures": list(MEASURES)}
    settings["names"] = token_names is not None
    if partial_results is not None or everybody is not None:
        # of batches that are generated one by one, only those that were measured can be compared
        known = [batch_hash(batch) for batch in batches] if isinstance(batches, Sequence) else None
        key = run_key(weights, {**settings, "batches": known})
        same_on_all({"sequence_parallel": sequence_parallel, "weights": weights, "batches and settings": key})
        if partial_results is not None:
            outputs.partial_results(partial_results, key)
    if ranks is not None and isinstance(batches, Sequence):
        for index, batch in enumerate(batches):
            check_tokens(model, batch, ranks.size, f"text {index}: " if len(batches) > 1 else "")
    hashes: list[str] = []
    total = len(batches) if isinstance(batches, Sequence) else None
    with reported(progress) as report, as_it_was(model):
        report("measuring heads", 0, total)
        for index, batch in enumerate(batches):
            check_batch(batch)
            if everybody is not None:
                everybody.check()
            hashes.append(batch_hash(batch))
            if index == 0:
                first = batch
            if index == 0 and ranks is not None:
                check_shared_run(model, batch, ranks)
                shown = beginning(batch, EXCERPT) if shown is None else shown
            if index == 0 and rank == 0:
                pictures = make_excerpt(model, batch if shown is None else shown, token_names, own=shown is not None)
                whole = batch if ranks is None or shown is None else shown
                unseen = unseen_attention(model, first_sequence(model, whole))
            if index % processes == rank or ranks is not None:
                file = None if partial_results is None else partial_results / f"batch-{index:06d}.pt"
                run = run_key(weights, {**settings, "batch": hashes[-1], "index": index})
                stored = None if file is None else load_measurements(file, run)
                stored = stored if ranks is None or all_have(stored, ranks) else None
                measured[index] = stored or observe(
                    model,
                    batch,
                    with_spectra=spectra_every > 0 and index % spectra_every == 0,
                    entries=entries,
                    generator=torch.Generator().manual_seed(seed + index),
                    token_names=token_names,
                    with_repeated_tokens=index % (spectra_every or SPECTRA_EVERY) == 0,
                    ranks=ranks,
                )
                if file is not None and stored is None and (ranks is None or rank == 0):
                    save_measurements(measured[index], file, run)
            report("measuring heads", index + 1, total)
    if everybody is not None and ranks is None:
        measured = _gather(measured, everybody)
    if first is None:
        raise InputError("no batches: give at least one text, image or recording")
    examination = summarise(
        [x for index in sorted(measured) for x in measured[index]],
        model=_describe(model, name),
        inputs={"batches": len(measured), "words": words_of(first), **(inputs or {})},
        provenance={
            "schema": SCHEMA,
            "run": run_key(weights, {**settings, "batches": hashes}),
            "weights": weights,
            "seed": seed,
            "spectra_every": spectra_every,
            "kernels": "compiled" if native.LIBRARY.state == "ready" else "torch",
            **versions(),
            **(provenance or {}),
        },
        excerpt=pictures,
    )
    examination = with_advice(replace(examination, unseen=unseen))
    if importance and isinstance(batches, Sequence):
        examination = with_importance(examination, model, batches, progress=progress)
    if cut:
        from headwise.examination.lengths import with_lengths  # which examines

        examination = with_lengths(examination, model, cut, token_names=token_names, progress=progress)
    return with_depth(examination, model, first, progress=progress) if ablations else examination


def excerpt_batch(model: nn.Module, excerpt: str | Batch | None, tokenizer: Any) -> Batch | None:
    """The batch of which pictures are made, if it is not the first of those that are examined."""
    if isinstance(excerpt, str):
        if tokenizer is None:
            raise InputError("an excerpt that is a text needs tokenizer=…; without one, give it as a batch")
        return tokenized(model, [excerpt], tokenizer).batches[0]
    if excerpt is not None:
        check_batch(excerpt)
    return excerpt


def check_model(model: Any) -> None:
    """Raise InputError unless it is a module."""
    if isinstance(model, str):
        raise InputError(
            f"model is the string {model[:60]!r}; load it first: headwise.models.load_model({model[:60]!r}).model"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch module")


def check_batches(batches: Any) -> None:
    """Raise InputError unless it is a collection of batches; batches that are generated are checked one by one."""
    if isinstance(batches, Mapping | Tensor | str):
        raise InputError(f"batches is one {type(batches).__name__}; give a list of batches, also if there is only one")
    if not isinstance(batches, Iterable):
        raise InputError(f"batches is a {type(batches).__name__}; give a list of batches")
    for batch in batches if isinstance(batches, Sequence) else ():
        if isinstance(batch, str):
            raise InputError("batches holds strings; give texts as texts=[…], with tokenizer=…")
        check_batch(batch)


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


def all_have(stored: object, ranks: Ranks) -> bool:
    """Whether no process lacks it: a result that only some have is measured again, by all."""
    missing = torch.tensor([float(stored is None)], device=ranks.device)
    return largest(missing, ranks).item() == 0


def _gather(measured: dict[int, list[Measurement]], ranks: Ranks) -> dict[int, list[Measurement]]:
    parts: list[Any] = [None] * ranks.size
    ranks.call(dist.all_gather_object, parts, measured)
    return {index: found for part in parts for index, found in part.items()}


def _describe(model: nn.Module, name: str | None) -> dict[str, Any]:
    weights = list(model.parameters())
    return {
        "name": name or type(model).__name__,
        "class": type(model).__name__,
        "parameters": sum(weight.numel() for weight in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch.") if weights else "none",
    }
