"""Decoding with a cache gives what one run over the whole sequence gives.

token by token    one position at a time
in chunks         a long prompt in parts, as servers feed it
after padding     a padded prompt, then one token at a time, as generate() decodes a batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.ledger.model_audit.audited_model import AuditedModel, DoesNotApplyError, NotTriedError, untried
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.ledger.model_audit.repeated_runs import LEFT, PADDING, padded_batch, padding_on
from headwise.models.gate import transformers_library

BY_TOKEN, BY_CHUNK, AFTER_PADDING = "cache, token by token", "cache, in chunks", "cache, after left padding"
CACHES = ("past_key_values", "cache_params", "state")
"""Names that models give their cache, as an argument and in what they return."""


def check_cache(audited: AuditedModel) -> Iterator[Promise]:
    """Three ways to decode with a cache."""
    yield _compared(audited, BY_TOKEN, [1] * audited.length)
    yield _compared(audited, BY_CHUNK, _chunks(audited.length))
    try:
        _cache_name(audited)
    except HeadwiseError as error:
        yield untried(AFTER_PADDING, error)
        return
    left = padding_on(audited, LEFT)
    if audited.has_decoder or left.standing is Standing.NOT_APPLICABLE:
        yield untried(AFTER_PADDING, DoesNotApplyError("there is no prompt to pad"))
    elif left.standing is Standing.NOT_TRIED:
        yield untried(AFTER_PADDING, NotTriedError("left padding could not be tried without a cache either"))
    elif left.standing is not Standing.KEPT:
        yield untried(AFTER_PADDING, NotTriedError("left padding changes the output without a cache, too"))
    else:
        yield _compared(audited, AFTER_PADDING, None, use_positions="position_ids" in left.sentence)


def _compared(audited: AuditedModel, name: str, sizes: Sequence[int] | None, *, use_positions: bool = False) -> Promise:
    def decoded(use_positions: bool) -> Tensor:
        if sizes is None:
            return _decoded_after_padding(audited, use_positions)
        return _decoded(audited, sizes, use_positions)

    try:
        out = decoded(use_positions)
        if out.shape != audited.reference.shape:
            shapes = f"{tuple(out.shape)} instead of {tuple(audited.reference.shape)}"
            return Promise(name, Standing.VIOLATED, f"Decoding with a cache gives outputs of shape {shapes}.")
        distance, (b, i) = audited.worst(out, audited.reference)
        violated = "Decoding with a cache gives something else than one run over the whole sequence."
        if distance > audited.threshold and audited.takes("position_ids") and not use_positions:
            given = audited.distance(decoded(use_positions=True), audited.reference)
            violated += "  With position_ids it gives the same." if given <= audited.threshold else ""
        where = f"sequence {b}, position {i}"
        return audited.verdict(name, distance, where, kept="Decoding gives what one run gives.", violated=violated)
    except HeadwiseError as error:
        return untried(name, error)


def _chunks(n: int) -> list[int]:
    """Unequal parts of n, some longer and some shorter than a short window: 7, 2, 11, …"""
    sizes, left = [], n
    for size in (7, 2, 11, 1, 5) * n:
        sizes.append(min(size, left))
        left -= sizes[-1]
        if left == 0:
            break
    return sizes


def _decoded(audited: AuditedModel, sizes: Sequence[int], use_positions: bool) -> Tensor:
    """The outputs of all parts of the sequence, each given with the cache of those before it."""
    cache = _cache_name(audited)
    ids, fixed = audited.positions(), _fixed(audited)
    past: dict[str, Any] = {}
    outputs, start = [], 0
    for part in ids.split(list(sizes), dim=1):
        given = {**fixed, str(audited.tokens): part}
        if use_positions:
            given["position_ids"] = torch.arange(start, start + part.shape[1], device=ids.device).expand_as(part)
        out, past = _step(audited, given, cache, past)
        outputs.append(out)
        start += part.shape[1]
    return torch.cat(outputs, 1)


def _decoded_after_padding(audited: AuditedModel, use_positions: bool) -> Tensor:
    """The padded first half at once, then token by token, with a mask that grows and positions that go on."""
    cache = _cache_name(audited)
    whole = padded_batch(audited, LEFT, positions=True)
    mask, positions, ids = whole["attention_mask"], whole["position_ids"], whole[str(audited.tokens)]
    start, past, outputs = PADDING + audited.length // 2, {}, []
    for begin, end in [(0, start), *((t, t + 1) for t in range(start, ids.shape[1]))]:
        part = {str(audited.tokens): ids[:, begin:end]}
        if begin == 0 or cache == CACHES[0]:  # a recurrent state has no place for padding
            part["attention_mask"] = mask[:, :end]
        if use_positions:
            part["position_ids"] = positions[:, begin:end]
        out, past = _step(audited, part, cache, past)
        outputs.append(out)
    return torch.cat(outputs, 1)[:, PADDING:]


def _step(
    audited: AuditedModel, part: dict[str, Any], cache: str, past: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    with torch.no_grad():
        raw = audited.call(part, use_cache=True, **past)
    found = getattr(raw, cache, None)
    if found is None:
        raise NotTriedError(f"it returns no {cache}, though it takes one")
    return audited.output_of(raw), {cache: found}


def _cache_name(audited: AuditedModel) -> str:
    name = next((name for name in CACHES if audited.takes(name)), None)
    if name is None or not audited.takes("use_cache"):
        raise DoesNotApplyError("it takes no cache")
    if not audited.causal:
        said = (
            "it is not causal" if audited.causal is False else "nothing says that it is causal (--causal yes, causal=)"
        )
        raise DoesNotApplyError(said)
    if not audited.is_text:
        raise DoesNotApplyError("it takes no tokens")
    if set(audited.batch) - {"input_ids", "decoder_input_ids"} and not audited.has_decoder:
        raise NotTriedError(
            f"the batch also has {', '.join(sorted(set(audited.batch) - {'input_ids'}))}, of which no part is known"
        )
    return name


def _fixed(audited: AuditedModel) -> dict[str, Any]:
    """What every part is given: the output of the encoder, if there is one."""
    if not audited.has_decoder:
        return {}
    states = getattr(audited.raw, "encoder_last_hidden_state", None)
    if states is None or not audited.takes("encoder_outputs"):
        raise NotTriedError("its encoder cannot be run apart from its decoder")
    return {"encoder_outputs": transformers_library().modeling_outputs.BaseModelOutput(last_hidden_state=states)}
