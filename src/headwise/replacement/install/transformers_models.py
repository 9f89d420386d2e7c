"""Models of transformers: MixedHeads as submodules of the attention modules, the plan in the config.

The class of a rewritten model derives from its original class, so `save_pretrained`, `from_pretrained`, `generate` and
everything else are those of transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.errors import UnsupportedError
from headwise.models.pretrained import attention_functions
from headwise.models.pretrained.derived_models import (
    PREFIX,
    Change,
    changed_modules,
    derive,
    derived_class,
    read_changed_config,
)
from headwise.models.run import OwnHook, as_it_was
from headwise.replacement.install import transformers_attention as interface
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.plans import INSTALLED_VERSION, Plan, installed_choices


@functools.cache
def _names_interface(cls: type) -> bool | None:
    """Whether the forward of this class calls transformers' attention interface; None if its source is not known."""
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError, AttributeError):
        return None
    return "attention_interface" in source or "ALL_ATTENTION_FUNCTIONS" in source


def calls_interface(module: nn.Module) -> bool:
    """Whether this is an attention module that calls transformers' attention interface."""
    return bool(_names_interface(type(module)))


def use_interface(model: Any) -> Callable[[], None]:
    """Make `model` compute attention by the interface, in place; returns the function that undoes it."""
    if not model._can_set_attn_implementation():
        raise _by_hand(model)
    interface.register()
    return attention_functions.use(model, interface.NAME)


def planned_part(model: Any, plan: Plan) -> tuple[nn.Module, str]:
    """The part of `model` that the plan was made for, the model itself or its body, and the prefix of its names."""
    body = model.base_model
    if body is model or plan.model.get("class") != type(body).__name__:
        return model, ""
    return body, f"{model.base_model_prefix}."


def install(model: Any, plan: Plan) -> nn.Module:
    """Put the MixedHeads of the plan into `model` in place, and make it a Headwise… subclass of its class."""
    _check_interface(model, plan)
    interface.register()
    sites = {}
    for site, choices in plan.sites.items():
        name, _, use = site.partition("@")
        if use:  # a module used several times in a pass
            if list(choices) != list(plan.sites.get(name, ())):
                raise UnsupportedError(
                    f"{site}: its module is used several times in a pass but holds one operator per head; give every "
                    f"use of {name} the same choices"
                )
            continue
        module, heads = model.get_submodule(name), plan.mixed_heads(site)
        if hasattr(module, interface.NAME):
            raise UnsupportedError(f"{name}: was rewritten already; rewrite the original model")
        heads.exact_below, heads.beyond = plan.exact_below.get(site, 0), plan.beyond
        like = next(module.parameters(), next(model.parameters()))
        module.add_module(interface.NAME, heads.to(device=like.device, dtype=model.dtype).train(model.training))
        sites[name] = {
            "width": heads.width,
            "heads": [choice.to_dict() for choice in choices],
            "exact_below": plan.exact_below.get(site, 0),
        }
    model.config.headwise = {
        "version": INSTALLED_VERSION,
        "length": plan.length,
        "beyond": plan.beyond,
        "sites": sites,
    }
    derive(model, REWRITTEN)
    attention_functions.use(model, interface.NAME)
    return model


def _install(model: Any) -> None:
    """MixedHeads where the plan in the config says."""
    plan = model.config.headwise
    sites = installed_choices(plan, "config.json: headwise")
    for site, module in changed_modules(model, REWRITTEN, sites):
        heads = MixedHeads(sites[site], plan["sites"][site]["width"], plan["length"])
        heads.exact_below, heads.beyond = plan["sites"][site]["exact_below"], plan["beyond"]
        module.add_module(interface.NAME, heads)


class _Generates:
    """`generate` of a rewritten model, which refuses caches its heads cannot use."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_cache(self, kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self: Any, settings: Any, inputs: dict, *others: Any) -> None:
        """A HeadCache where transformers makes a DynamicCache."""
        given = inputs.get("past_key_values")
        super()._prepare_cache_for_generation(settings, inputs, *others)  # type: ignore[misc]
        if given is None and inputs.get("past_key_values") is not None:
            inputs["past_key_values"] = _head_cache(self, inputs["past_key_values"], longest=others[-1])
            if settings.is_assistant:
                inputs["past_key_values"].activate_past_recording()


def _mixins(base: type) -> tuple[type, ...]:
    return (_Generates,) if hasattr(base, "generate") else ()


REWRITTEN = Change(interface.NAME, "plan", "rewrite the original model again", interface.register, _install, _mixins)
read_config = partial(read_changed_config, REWRITTEN)
rewritten_class = partial(derived_class, REWRITTEN)


def check_reached(model: Any, probe: dict[str, Any], plan: Plan) -> None:
    """Raise UnsupportedError unless every site runs on `probe` and, where heads are replaced, calls the interface."""
    called: set[nn.Module] = set()
    sites = {site: model.get_submodule(site.partition("@")[0]) for site in plan.sites}
    for site, module in sites.items():
        heads = getattr(module, interface.NAME)
        sites[site] = module if heads.replaced is None else heads
    with as_it_was(model), torch.no_grad(), ExitStack() as hooks:
        for module in set(sites.values()):
            hooks.enter_context(module.register_forward_pre_hook(OwnHook(lambda module, args: called.add(module))))
            if isinstance(module, MixedHeads):
                hooks.enter_context(module.at_any_length())
        model(**probe)
    for site, module in sites.items():
        if module not in called:
            raise UnsupportedError(
                f"{site}: {type(model).__name__.removeprefix(PREFIX)} did not call transformers' attention interface "
                "here on a probe, so its heads cannot be replaced"
            )


def _check_interface(model: Any, plan: Plan) -> None:
    """Raise UnsupportedError for families that accept any attention implementation but compute attention themselves."""
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise _by_hand(model)
    for site in plan.sites:
        module = model.get_submodule(site.partition("@")[0])
        if _names_interface(type(module)) is False:
            raise UnsupportedError(
                f"{site}: {type(module).__name__} of {name} does not call transformers' attention interface, so its "
                "heads cannot be replaced"
            )


def _by_hand(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} computes attention by hand instead of through transformers' attention interface, so "
        "its heads cannot be replaced"
    )


def _head_cache(model: Any, usual: Any, longest: int) -> Any:
    """A HeadCache in place of a DynamicCache; `longest` is the number of keys that may come."""
    from transformers import DynamicCache, EncoderDecoderCache

    from headwise.replacement.install.head_cache import HeadCache

    if isinstance(usual, EncoderDecoderCache):
        usual.self_attention_cache = _head_cache(model, usual.self_attention_cache, longest)
    if type(usual) is not DynamicCache or usual.offloading:
        return usual
    plan = model.config.headwise
    return HeadCache(model, keep_all=longest > plan["length"] and plan["beyond"] == "exact")


def _check_cache(model: Any, options: dict[str, Any]) -> None:
    """Raise UnsupportedError before decoding if `generate` is going to use a cache that some head cannot use."""
    settings = options.get("generation_config") or model.generation_config

    def setting(name: str) -> Any:
        return options[name] if options.get(name) is not None else getattr(settings, name, None)

    if setting("use_cache") is False:
        return
    cache = setting("cache_implementation")
    static = isinstance(cache, str) and ("static" in cache or "hybrid" in cache)
    static = static or "Static" in type(options.get("past_key_values")).__name__
    for name, module in model.named_modules():
        heads = getattr(module, interface.NAME, None)
        if heads is None or not getattr(module, "is_causal", True):
            continue
        for head, choice in enumerate(heads.choices):
            if not choice.definition.cached:
                raise UnsupportedError(
                    f"generate: head {head} of {name} is {choice}, which cannot compute new queries from cached keys; "
                    "pass use_cache=False"
                )
            if static and choice.kind != "softmax":
                raise UnsupportedError(
                    f"generate: head {head} of {name} is {choice}, which needs to know the last key, but a static "
                    "cache has unused entries after it; pass cache_implementation=None, or use_cache=False"
                )
