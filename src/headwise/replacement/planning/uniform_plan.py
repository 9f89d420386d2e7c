"""One choice for every head of a model: a plan without a search."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.errors import InputError
from headwise.models.fingerprint import weights_hash
from headwise.models.inputs import max_positions
from headwise.models.pretrained.derived_models import default_probe, is_pretrained
from headwise.models.run import as_it_was
from headwise.replacement.kinds import Choice
from headwise.replacement.planning.capture import find_sites
from headwise.replacement.plans import Plan

EVERYWHERE = "everywhere"
"""Key of the provenance of such a plan."""

SHORT = 16
"""Tokens of the input on which the attention of a model is found."""

UNKNOWN_LENGTH = 8192
"""Keys that a plan is for if neither the model nor the caller says how many there may be."""

TRIED = 512
"""Tokens of the shorter texts on which the two models are compared."""


def uniform_plan(
    model: nn.Module, choice: Choice, *, batch: Any = None, length: int | None = None, name: str | None = None
) -> Plan:
    """A plan that gives `choice` to every head of the self-attention of `model`; learned tensors are initial ones.

    batch    an input on which attention is found; for models of transformers a random one by default
    length   most keys that it is for, by default as many as the model has positions

    A layer that cannot be planned, such as cross-attention, stays as it is and is listed in `skipped`.
    """
    if batch is None and is_pretrained(model):
        batch = default_probe(model, SHORT)
    if batch is None:
        raise InputError(
            f"{type(model).__name__}: an input is needed to find its attention; pass probe=, or return "
            "(model, batches) from the factory"
        )
    with as_it_was(model), torch.no_grad():
        found = find_sites(model, batch)
    skipped = {site: each.skipped for site, each in found.items() if each.skipped is not None}
    sites = {site: each for site, each in found.items() if site not in skipped}
    if not sites:
        reasons = "; ".join(f"{site}: {why}" for site, why in list(skipped.items())[:3])
        raise InputError(f"no attention of {type(model).__name__} can be replaced ({reasons})")
    seen = max(site.length for site in sites.values())
    length = length or max_positions(model) or max(seen, UNKNOWN_LENGTH if _has_tokens(batch) else 0)
    fitted = {
        (site, head, choice): choice.initial(length, each.width)
        for site, each in sites.items()
        for head in range(each.heads)
        if choice.shapes(length, each.width)
    }
    facts = {
        site: {"heads": x.heads, "key_value_heads": x.key_value_heads, "width": x.width, "causal": x.causal}
        for site, x in sites.items()
    }
    cls = type(model).__name__
    return Plan(
        {"class": cls, "name": name or cls, "fingerprint": weights_hash(model), "sites": facts},
        length,
        {site: [choice] * each.heads for site, each in sites.items()},
        fitted,
        skipped=skipped,
        lengths=tuple(sorted({min(TRIED, length), length})),
        provenance={EVERYWHERE: str(choice)},
    )


def _has_tokens(batch: Any) -> bool:
    return isinstance(batch, dict) and "input_ids" in batch
