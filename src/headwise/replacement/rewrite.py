"""`rewrite(model, plan)`: a new model whose attention heads are the operators a plan names, and a receipt.

    plan.sites       {"encoder.layer.0.attention.self": [Choice, ...], ...}, one choice a head
    plan.length      the length the plan was made for
    plan.model       {"class": "BertModel", "sites": {site: {"heads": 12, "width": 32, "causal": False}}}
    plan.parameters  {parameter_key(site, head, name): tensor}, for what was fitted

Models of transformers go through the library's attention interface (`models`), all others through an interception of
the one function they all call (`foreign`).  The given model is not touched.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import InputError, UnsupportedError
from headwise.models.receipt import Receipt
from headwise.replacement.choice import EXACT, KINDS, Choice
from headwise.replacement.install.mixed_heads import Heads, parameter_key


class Plan(Protocol):
    """What `rewrite` reads of a plan."""

    @property
    def sites(self) -> Mapping[str, Sequence[Choice]]: ...
    @property
    def length(self) -> int: ...
    @property
    def model(self) -> Mapping[str, Any]: ...
    @property
    def parameters(self) -> Mapping[str, Tensor]: ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A plan that knows the weights it was made for."""

    def check(self, model: nn.Module) -> None: ...


@final
@dataclass(frozen=True, eq=False)
class Renamed:
    """A plan for the body of a model, in the names of the whole."""

    sites: Mapping[str, Sequence[Choice]]
    length: int
    model: Mapping[str, Any]
    parameters: Mapping[str, Tensor]
    original: Any

    def check(self, model: nn.Module) -> None:
        if isinstance(self.original, Fingerprinted):
            self.original.check(model)


def _renamed(plan: Plan, model: nn.Module, prefix: str) -> Renamed:
    known = {prefix + site: facts for site, facts in plan.model.get("sites", {}).items()}
    described = {**plan.model, "class": type(model).__name__, "sites": known}
    sites = {prefix + site: choices for site, choices in plan.sites.items()}
    parameters = {prefix + key: x for key, x in plan.parameters.items()}
    return Renamed(sites, plan.length, described, parameters, plan)


def rewrite(model: nn.Module, plan: Plan, *, probe: Any = None) -> tuple[nn.Module, Receipt]:
    """A copy of `model` with the plan's operators in place of its heads, and what that did.

    `probe` is an input, a dict of keyword arguments or a tensor, on which old and new are compared; models of
    transformers find one of their own.  A plan made for the body of a model (LlamaModel) serves the whole model
    (LlamaForCausalLM) too.
    """
    if not _is_pretrained(model):
        from headwise.replacement.install.other_models import Rewritten

        _check_all(model, plan, model)
        new: nn.Module = Rewritten(copy.deepcopy(model), plan)
        return new, _receipt(model, new, plan, probe)

    from headwise.replacement.install.transformers_models import body_of, default_probe, install, reached

    body, prefix = body_of(model, plan.model.get("class"))
    plan = _renamed(plan, model, prefix) if prefix else plan
    _check_all(model, plan, body)
    new = install(copy.deepcopy(model), plan)
    probe = default_probe(model, plan.length) if probe is None else probe
    if isinstance(probe, Mapping):
        reached(new, dict(probe), plan)
    return new, _receipt(model, new, plan, probe)


def _check_all(model: nn.Module, plan: Plan, body: nn.Module) -> None:
    check(model, plan)
    # a body made without its pooler is not, weight for weight, the one that was planned for
    if isinstance(plan, Fingerprinted) and getattr(body, "pooler", body) is not None:
        plan.check(body)


def check(model: nn.Module, plan: Plan) -> None:
    """The plan was made for this model and asks for nothing a decoder cannot have, or a sentence that says what not."""
    name = type(model).__name__.removeprefix("Headwise")
    made_for = str(plan.model.get("class", name)).removeprefix("Headwise")
    if made_for != name:
        raise InputError(f"the plan was made for a {made_for}, but the model is a {name}; plan again for this one")
    if not plan.sites:
        raise InputError("the plan names no attention sites, so there is nothing to rewrite")
    modules = dict(model.named_modules())
    known: Mapping[str, Mapping[str, Any]] = plan.model.get("sites", {})
    for site, choices in plan.sites.items():
        if site.partition("@")[0] not in modules:
            raise InputError(f"the plan was made for another model: {name} has no module {site.partition('@')[0]!r}")
        if site not in known:
            raise InputError(f"the plan names {site!r}, but its description of the model has no such site")
        if known[site]["heads"] != len(choices):
            raise InputError(f"{site}: has {known[site]['heads']} heads, but the plan has {len(choices)} choices")
        if is_causal(modules[site.partition("@")[0]], known[site]):
            _all_causal(site, choices)
    positions = _positions(model)
    if positions is not None and plan.length > positions:
        raise InputError(f"the plan is for a length of {plan.length}, but {name} has {positions} positions")


def is_causal(module: nn.Module, described: Mapping[str, Any]) -> bool:
    return bool(described.get("causal", getattr(module, "is_causal", False)))


def site_heads(plan: Plan, site: str) -> Heads:
    """The replacement for one site, with the plan's fitted tensors in it."""
    heads = Heads(plan.sites[site], int(plan.model["sites"][site]["width"]), plan.length)
    for head, choice in enumerate(plan.sites[site]):
        names = heads.head_parameters(head)
        given = {name: plan.parameters.get(parameter_key(site, head, name)) for name in names}
        heads.load_head(head, {name: x for name, x in given.items() if x is not None})
        missing = [name for name, x in given.items() if x is None]
        if missing and len(missing) < len(given):
            raise InputError(f"{site}: head {head} is {choice}, but the plan lacks its fitted {', '.join(missing)}")
    return heads


def one_choice_a_module(plan: Plan) -> Iterator[tuple[str, Heads]]:
    """Module names and their Heads; a module used several times in a pass (site@2, ...) has the same in every use."""
    for site in plan.sites:
        name, _, use = site.partition("@")
        if not use:
            yield name, site_heads(plan, site)
            continue
        if list(plan.sites[site]) != list(plan.sites.get(name, ())):
            raise UnsupportedError(
                f"{site}: its module is used several times in a pass and can hold one operator a head; give every use "
                f"of {name} the same choices"
            )


def _all_causal(site: str, choices: Sequence[Choice]) -> None:
    for head, choice in enumerate(choices):
        reason = choice.of.why_not_causal(choice)
        if reason is not None:
            fit = ", ".join(name for name, kind in KINDS.items() if kind.causal)
            raise UnsupportedError(f"{site}: head {head} is causal, but {reason}; use one of {fit}")


def _positions(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _is_pretrained(model: nn.Module) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def _receipt(old: nn.Module, new: nn.Module, plan: Plan, probe: Any) -> Receipt:
    change, scale, notes = math.nan, math.nan, []
    if probe is None:
        notes.append("no probe was given, so the change of the output was not measured")
    else:
        outputs = list(zip(_outputs(new, probe), _outputs(old, probe), strict=True))
        change = max((a - b).abs().max().item() for a, b in outputs)
        scale = max(b.abs().max().item() for _, b in outputs)
    modules = dict(old.named_modules())
    parts = []
    for site, choices in plan.sites.items():
        known = plan.model["sites"][site]
        causal = is_causal(modules[site.partition("@")[0]], known)
        n, d = plan.length, int(known["width"])
        costs = [EXACT.of.cost(EXACT, n, d, causal).times(len(choices)), _beside(choices, n, d, causal)]
        counts = sorted({str(c): list(choices).count(c) for c in choices}.items(), key=lambda pair: -pair[1])
        notes_here = (", ".join(f"{count} {name}" for name, count in counts),)
        own = 0 if "@" in site else sum(p.numel() for p in site_heads(plan, site).parameters())
        parts.append(Receipt(site, 0, own, costs[0], costs[1], math.nan, math.nan, notes=notes_here))
    before, after = _sum([part.cost_before for part in parts]), _sum([part.cost_after for part in parts])
    small, large = (sum(p.numel() for p in model.parameters()) for model in (old, new))
    notes.insert(0, f"attention costs are for one sequence of {plan.length}")
    what = type(old).__name__
    return Receipt(what, small, large, before, after, change, scale, parts=tuple(parts), notes=tuple(notes))


def _beside(choices: Sequence[Choice], n: int, d: int, causal: bool) -> Cost:
    total = Cost(0, 0, 0)
    for choice in choices:
        total = total.beside(choice.of.cost(choice, n, d, causal))
    return total


def _sum(costs: list[Cost]) -> Cost:
    total = Cost(0, 0, 0)
    for cost in costs:
        total = total + cost
    return total


def _outputs(model: nn.Module, probe: Any) -> list[Tensor]:
    """The floating tensors a model answers with, in eval mode and without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            out = model(**probe) if isinstance(probe, Mapping) else model(probe)
    finally:
        model.train(was_training)
    if isinstance(out, Tensor):
        return [out]
    values = out.values() if isinstance(out, Mapping) else out
    found = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    if not found:
        raise InputError(f"{type(model).__name__} answered the probe with no floating tensor to compare")
    return found
