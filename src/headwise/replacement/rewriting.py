"""`rewrite(model, plan)`: a copy of a model whose attention heads are the operators of a plan, and a receipt."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import InputError
from headwise.models.pretrained.derived_models import default_probe, is_pretrained
from headwise.models.receipt import Receipt, largest_change, parameter_count
from headwise.models.run import as_it_was, run_model
from headwise.replacement.install import other_models, transformers_models
from headwise.replacement.kinds import Choice
from headwise.replacement.planning.uniform_plan import EVERYWHERE, uniform_plan
from headwise.replacement.plans import Plan, each_head
from headwise.replacement.standard_kinds import SOFTMAX
from headwise.shapes import shown


def rewrite(model: nn.Module, plan: Plan | Choice, *, probe: Any = None) -> tuple[nn.Module, Receipt]:
    """A copy of `model` with the operators of `plan` in place of its heads, and a receipt of what changed.

    A `Choice` in place of a plan is given to every head of the model's self-attention.

    `probe` is an input (a tensor, or a dict of keyword arguments) on which the two models are compared; for models of
    transformers the default is a random one of the planned length.  A plan for the body of a model (LlamaModel) also
    works for the whole model (LlamaForCausalLM).

    Models of transformers are changed through the library's attention interface, all others by intercepting
    `scaled_dot_product_attention` while they run.  `model` itself is not changed.
    """
    if isinstance(plan, Choice):
        plan = uniform_plan(model, plan, batch=probe)
    if not isinstance(plan, Plan):
        raise InputError(
            f"rewrite: plan must be a Plan, or a Choice for all heads, but is {shown(plan)}; for builders use "
            "headwise.replace"
        )
    if not is_pretrained(model):
        plan.check(model)
        new: nn.Module = other_models.RewrittenModel(copy.deepcopy(model), plan)
        return new, _receipt(model, new, plan, probe)
    body, prefix = transformers_models.planned_part(model, plan)
    plan.check(body)
    plan = plan.renamed(lambda site: prefix + site)
    new = transformers_models.install(copy.deepcopy(model), plan)
    short = default_probe(model, min(plan.length, 16)) if probe is None else probe
    if isinstance(short, Mapping):
        transformers_models.check_reached(new, dict(short), plan)
    tokens = plan.lengths[0] if EVERYWHERE in plan.provenance else plan.length
    probe = default_probe(model, tokens) if probe is None else probe
    return new, _receipt(model, new, plan, probe)


def _receipt(old: nn.Module, new: nn.Module, plan: Plan, probe: Any) -> Receipt:
    notes = [f"attention costs are for one sequence of {plan.length}"]
    if EVERYWHERE in plan.provenance and plan.fitted:
        notes.append("learned tensors have their initial values: train the model, or let headwise plan fit them")
    notes += [f"{site} was left as it is: {why}" for site, why in plan.skipped.items()]
    change = scale = math.nan
    if probe is None:
        notes.append("no probe was given, so the change of the output was not measured")
    else:
        change, scale = largest_change(lambda: _outputs(old, probe), lambda: _outputs(new, probe))
        if not change and any(choice != SOFTMAX for _, _, choice in each_head(plan.sites)):
            notes.append(
                "the output did not change at all on the probe: it is shorter than every window, or than the keys "
                "below which the original attention runs"
            )
    parts = []
    for site, choices in plan.sites.items():
        facts = plan.model["sites"][site]
        causal = facts.get("causal", getattr(old.get_submodule(site.partition("@")[0]), "is_causal", False))
        size = plan.length, int(facts["width"]), bool(causal)
        before = SOFTMAX.cost(*size).times(len(choices))
        after = reduce(Cost.beside, (choice.cost(*size) for choice in choices), Cost(0, 0, 0))
        counts = ", ".join(f"{count} {choice}" for choice, count in Counter(choices).most_common())
        added = 0 if "@" in site else parameter_count(plan.mixed_heads(site))
        parts.append(Receipt(site, 0, added, before, after, math.nan, math.nan, notes=(counts,)))
    return Receipt(
        type(old).__name__,
        parameter_count(old),
        parameter_count(new),
        reduce(Cost.__add__, (part.cost_before for part in parts)),
        reduce(Cost.__add__, (part.cost_after for part in parts)),
        change,
        scale,
        parts=tuple(parts),
        notes=tuple(notes),
    )


def _outputs(model: nn.Module, probe: Any) -> list[Tensor]:
    """The floating-point tensors that a model returns, in eval mode and without gradients."""
    with as_it_was(model), torch.no_grad():
        output = run_model(model, probe)
    values = [output] if isinstance(output, Tensor) else output.values() if isinstance(output, Mapping) else output
    tensors = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        name = type(model).__name__
        raise InputError(f"{name} returned no floating-point tensor for the probe, so nothing to compare")
    return tensors
