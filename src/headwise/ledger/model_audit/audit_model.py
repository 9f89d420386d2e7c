"""Every promise, tried on one model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, InputError
from headwise.ledger.model_audit.attention_forms import FORMS, ROWS, check_forms, check_rows
from headwise.ledger.model_audit.audited_model import AuditedModel, NotTriedError, untried
from headwise.ledger.model_audit.cached_decoding import AFTER_PADDING, BY_CHUNK, BY_TOKEN, check_cache
from headwise.ledger.model_audit.causality import (
    GRADIENT,
    PERTURBATION,
    REACH,
    attends_causally,
    check_gradient,
    check_perturbation,
)
from headwise.ledger.model_audit.declared import declared_causal, widest_window
from headwise.ledger.model_audit.layer_reach import WINDOWS, check_windows
from headwise.ledger.model_audit.measurements import (
    BRAIN,
    COLLAPSE,
    HALF,
    HEADROOM,
    PERMUTATION,
    TRANSLATION,
    check_collapse,
    check_half,
    check_headroom,
    check_permutation,
    check_translation,
)
from headwise.ledger.model_audit.promise import ModelAudit, Promise, Standing
from headwise.ledger.model_audit.repeated_runs import (
    BATCH,
    DETERMINISTIC,
    LEFT,
    RIGHT,
    check_batch_equals_single,
    check_deterministic,
    check_finite,
    check_padding,
)
from headwise.ledger.model_audit.sampled_inputs import SEQUENCES, sampled_batch
from headwise.models.run import as_it_was
from headwise.models.tokenized import tokenized
from headwise.progress import Progress, reported

Check = Callable[[AuditedModel], Promise | Iterable[Promise]]

CHECKS: tuple[tuple[tuple[str, ...], Check, bool], ...] = (
    ((PERTURBATION,), check_perturbation, True),
    ((GRADIENT, REACH), check_gradient, True),
    ((WINDOWS,), check_windows, True),
    ((ROWS,), check_rows, True),
    ((FORMS,), check_forms, False),
    ((BATCH,), check_batch_equals_single, False),
    ((RIGHT, LEFT), check_padding, False),
    ((BY_TOKEN, BY_CHUNK, AFTER_PADDING), check_cache, False),
    ((HEADROOM,), check_headroom, True),
    ((HALF, BRAIN), check_half, False),
    ((PERMUTATION,), check_permutation, False),
    ((TRANSLATION,), check_translation, False),
    ((COLLAPSE,), check_collapse, True),
)
"""The names of the promises, how they are tried, and whether that can be judged if the model draws random numbers."""

STEPS = len(CHECKS) + 1
"""Of `audit_model`: whether the answer is finite, and the others."""


def audit_model(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    texts: Sequence[str] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    causal: bool | None = None,
    name: str | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> ModelAudit:
    """Try every promise on a model, which is afterwards as it was.

    batches   what the model takes: a tensor, a tuple, or a dict of keyword arguments, without padding; the sequences
              of all of them make one batch.  Default: tokens drawn from the vocabulary of the model, or random images
    texts     instead of batches, with their tokenizer; all are cut to the length of the shortest
    length    tokens of a sequence, if they are drawn or cut
    causal    whether no output may depend on a later token; default: what the config says, or, without one, whether
              all attention of the model is causal
    progress  True for bars on standard error, or a function of (what, done, total)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch module")
    batch, inputs = _inputs(model, batches, texts, tokenizer, length, seed)
    causal = declared_causal(model) if causal is None else causal
    with reported(progress) as report, as_it_was(model), _quiet():
        causal = attends_causally(model, batch) if causal is None else causal
        audited = AuditedModel(model, batch, causal=causal, seed=seed)
        promises: list[Promise] = []
        for done, found in enumerate(_verdicts(audited), start=1):
            promises += found
            report("trying promises", done, STEPS)
    return ModelAudit(
        name or type(model).__name__,
        _kind(audited),
        str(audited.dtype).removeprefix("torch."),
        f"{audited.sequences} {inputs}",
        seed,
        tuple(promises),
    )


def _verdicts(audited: AuditedModel) -> Iterator[list[Promise]]:
    """The verdicts of one step after the other."""
    finite = check_finite(audited)
    if finite.standing is Standing.VIOLATED:
        yield [finite]
        for names, _, _ in CHECKS:
            yield [untried(name, NotTriedError("the output is not finite")) for name in names]
        return
    (steady,) = _tried(audited, (DETERMINISTIC,), check_deterministic)
    yield [finite, steady]
    for names, check, survives_randomness in CHECKS:
        if steady.standing is Standing.VIOLATED and not survives_randomness:
            yield [untried(name, NotTriedError("two runs on the same input differ")) for name in names]
            continue
        yield _tried(audited, names, check)


def _tried(audited: AuditedModel, names: Sequence[str], check: Check) -> list[Promise]:
    try:
        found = check(audited)
        return [found] if isinstance(found, Promise) else list(found)
    except HeadwiseError as error:
        return [untried(name, error) for name in names]


def _inputs(
    model: nn.Module,
    batches: Iterable[Any] | None,
    texts: Sequence[str] | None,
    tokenizer: Any,
    length: int | None,
    seed: int,
) -> tuple[Any, str]:
    """One batch, and what it is in words."""
    if batches is not None and texts is not None:
        raise InputError("give batches or texts, not both")
    if length is not None and batches is not None:
        raise InputError("length has no effect on batches; leave it out")
    if texts is not None:
        made = tokenized(model, texts, tokenizer, length=length).batches
        shortest = min(batch["input_ids"].shape[1] for batch in made)
        return _joined(
            [{key: x[:, :shortest] for key, x in batch.items()} for batch in made]
        ), f"texts of {shortest} tokens"
    if batches is None:
        window = widest_window(getattr(model, "config", None))
        batch = sampled_batch(model, length=length, window=window, seed=seed)
        tokens = next((x.shape[1] for key, x in batch.items() if key.endswith("input_ids")), None)
        return batch, "random images or recordings" if tokens is None else f"sequences of {tokens} random tokens"
    if isinstance(batches, (Tensor, Mapping)):
        raise InputError("batches must be a list of batches, also if there is only one")
    return _joined(list(batches)), "sequences of the given batches"


def _joined(batches: list[Any]) -> Any:
    """The sequences of the first batches as one batch, as far as they fit together."""
    if not batches:
        raise InputError("there are no batches; give at least one")
    batch = batches[0]
    if not isinstance(batch, Mapping) or len(batches) == 1:
        return batch
    alike = [
        other
        for other in batches[:SEQUENCES]
        if isinstance(other, Mapping)
        and {k: x.shape[1:] for k, x in other.items()} == {k: x.shape[1:] for k, x in batch.items()}
    ]
    return {key: torch.cat([other[key] for other in alike]) for key in batch}


def _kind(audited: AuditedModel) -> str:
    if audited.has_decoder:
        return "encoder–decoder"
    if audited.causal:
        return "decoder"
    return "encoder" if audited.causal is False and audited.is_text else "model"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that transformers logs and torch warns of when a model is used in an unusual way."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
