"""Models of transformers: MixedHeads as submodules of the attention modules, the plan in the config.

The class of a rewritten model derives from its original class, so `save_pretrained`, `from_pretrained`, `generate` and
everything else are those of transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.models.gate import Trust, forget_names_in_files, pretrained_model
from headwise.models.run import OwnHook, as_it_was
from headwise.replacement.install import transformers_attention as interface
from headwise.replacement.install.auto_classes import rewritten_config
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.plans import INSTALLED_VERSION, Plan, installed_choices

PREFIX = "Headwise"


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is a PreTrainedModel, without importing transformers."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


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
    before = model.config._attn_implementation
    interface.register()
    model.set_attn_implementation(interface.NAME)
    return lambda: model.set_attn_implementation(before)


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
    forget_names_in_files(model)
    model.config.__class__ = rewritten_config(type(model.config))
    model.__class__ = rewritten_class(type(model))
    model.set_attn_implementation(interface.NAME)
    return model


@functools.cache  # one subclass per class, so that isinstance works
def rewritten_class(base: type) -> type:
    """`base` with MixedHeads where the plan in its config says; `generate` refuses caches its heads cannot use."""

    class Rewritten(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            plan = getattr(config, "headwise", None)
            if plan is None:
                raise InputError(f"{type(self).__name__}: its config holds no plan; load {base.__name__} instead")
            super().__init__(config, *args, **kwargs)
            interface.register()
            modules = dict(self.named_modules())
            for site, choices in installed_choices(plan, "config.json: headwise").items():
                # the body of a model that was saved with its head lacks the first part of the name
                name = site if site in modules else site.removeprefix(f"{self.base_model_prefix}.")
                if name not in modules:
                    raise InputError(f"config.json: headwise: {base.__name__} has no module {site!r}")
                heads = MixedHeads(choices, plan["sites"][site]["width"], plan["length"])
                heads.exact_below, heads.beyond = plan["sites"][site]["exact_below"], plan["beyond"]
                modules[name].add_module(interface.NAME, heads)
            self.set_attn_implementation(interface.NAME)

        @classmethod
        def from_pretrained(cls, source: str | Path, *args: Any, **options: Any) -> Any:
            """As in transformers, but raises InputError unless the files hold exactly the tensors of the model."""
            with_info = options.pop("output_loading_info", False)
            trust = Trust(trust_remote_code=bool(options.pop("trust_remote_code", False)))
            if args:
                raise UnsupportedError(f"{cls.__name__}.from_pretrained takes no arguments for the model's class")
            place = Path(source) if Path(source).is_dir() else str(source)
            model, info = pretrained_model(super(), place, trust, **options)
            if cls.__name__ not in (model.config.architectures or ()):  # the body of a model saved with its head
                body = f"{model.base_model_prefix}."
                info = {**info, "unexpected_keys": {key for key in info["unexpected_keys"] if key.startswith(body)}}
            check_complete(str(source), info)
            return (model, info) if with_info else model

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            _check_cache(self, kwargs)
            return super().generate(*args, **kwargs)

        def _prepare_cache_for_generation(self, settings: Any, inputs: dict, *others: Any) -> None:
            """A HeadCache where transformers makes a DynamicCache."""
            given = inputs.get("past_key_values")
            super()._prepare_cache_for_generation(settings, inputs, *others)
            if given is None and inputs.get("past_key_values") is not None:
                inputs["past_key_values"] = _head_cache(self, inputs["past_key_values"], longest=others[-1])
                if settings.is_assistant:
                    inputs["past_key_values"].activate_past_recording()

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank, (base,), self.__dict__  # the class is generated, so it cannot be imported

    if not hasattr(base, "generate"):
        del Rewritten.generate, Rewritten._prepare_cache_for_generation
    Rewritten.__name__ = Rewritten.__qualname__ = f"{PREFIX}{base.__name__}"
    Rewritten.__doc__ = f"{base.__name__} with some heads replaced by headwise."
    return Rewritten


def check_complete(source: str, info: Mapping[str, Collection[str]]) -> None:
    """Raise InputError unless the files hold exactly the tensors of the model; `info` as transformers reports it."""
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "holds unknown")):
        names = sorted(info[key])
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            raise InputError(
                f"{source} {what} tensors, {len(names)} in all: {shown}; its files do not belong together, so rewrite "
                "the original model again"
            )


def _blank(base: type) -> Any:
    cls: Any = rewritten_class(base)
    return cls.__new__(cls)


def default_probe(model: Any, length: int) -> dict[str, Any] | None:
    """A random input, `length` tokens or an image; None for models with other inputs."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    like = next(model.parameters())
    if model.main_input_name == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        ids = torch.randint(config.vocab_size, (1, length), generator=generator).to(like.device)
        if getattr(config, "is_encoder_decoder", False):
            return {"input_ids": ids, "decoder_input_ids": ids[:, :-1]}
        last = {"logits_to_keep": 64} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        return {"input_ids": ids, **last}
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = (1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {"pixel_values": torch.randn(size, generator=generator).to(like)}
    return None


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
