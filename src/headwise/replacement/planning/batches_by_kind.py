"""The batches of a plan by kind of text, their lengths, and the lengths at which drift is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.models.inputs import max_positions
from headwise.models.run import check_batch
from headwise.replacement.planning.capture import AttentionSite
from headwise.replacement.planning.drift import Answer

Batches = Mapping[str, Sequence[Any]]
"""{kind of text: batches}"""

PARTS = 5
"""Kinds that batches without names are dealt into."""


def by_kind(batches: Batches | Iterable[Any]) -> dict[str, list[Any]]:
    """At least two kinds of at least two batches each, or InputError."""
    if isinstance(batches, Mapping):
        kinds = {kind: list(given) for kind, given in batches.items()}
    else:
        given = list(batches)
        parts = min(PARTS, len(given) // 2)
        kinds = {f"part {i + 1}": given[i::parts] for i in range(parts)}
        if parts < 2:
            raise InputError(f"a plan needs at least 4 batches, two to choose and two to measure, but got {len(given)}")
    for kind, given in kinds.items():
        if len(given) < 2:
            raise InputError(f"{kind}: a plan needs two batches, one to choose and one to measure; got {len(given)}")
        for batch in given:
            check_batch(batch)
    if len(kinds) < 2:
        raise InputError(f"a plan needs at least two kinds of text, but got {', '.join(kinds) or 'none'}")
    return kinds


def length_of(batch: Any, default: int) -> int:
    """Tokens of the texts in a batch; `default` for images and recordings."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return default if ids is None else ids.shape[-1]


def measured_lengths(
    model: nn.Module,
    kinds: Mapping[str, Sequence[Any]],
    sites: Mapping[str, AttentionSite],
    answer: Answer,
    lengths: Sequence[int] | None,
) -> tuple[int, ...]:
    """The lengths at which drift is measured, ascending."""
    name, limit = type(model).__name__, max_positions(model)
    default = max(site.length for site in sites.values())
    found = {length_of(batch, default) for given in kinds.values() for batch in given}
    longest = max(found)
    if answer.by_position:
        found = {longest, *(longest // i for i in (2, 4))} if lengths is None else set(lengths)
        if max(found) > longest:
            raise InputError(f"drift is to be measured at {max(found)} tokens, but the longest text has {longest}")
    elif lengths is not None and set(lengths) != found:
        raise InputError(f"drift is to be measured at {sorted(lengths)}, but the texts have {sorted(found)} tokens")
    if limit is not None and limit < max(found):
        raise InputError(f"{name} has {limit} positions, but texts have {max(found)} tokens")
    if min(found) < 4:
        raise InputError(f"texts have {min(found)} tokens; plans are for lengths of at least 4")
    return tuple(sorted(found))
