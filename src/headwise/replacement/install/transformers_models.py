"""Models of transformers: Heads as submodules of the attention modules, the plan in the config, weights in one file.

The rewritten model's class is its own class with a few lines more, so that `save_pretrained`, `from_pretrained`,
`generate` and everything else are the library's.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.replacement.choice import Choice
from headwise.replacement.install import transformers_attention as attention
from headwise.replacement.install.mixed_heads import Heads
from headwise.replacement.rewrite import Plan, one_choice_a_module

PREFIX = "Headwise"
VERSION = 1


def install(model: Any, plan: Plan) -> nn.Module:
    """Put the plan's Heads into `model`, which becomes a Headwise… of its class; `model` itself is changed."""
    _uses_the_interface(model, plan)
    attention.register()
    sites = {}
    for name, heads in one_choice_a_module(plan):
        module = model.get_submodule(name)
        if hasattr(module, attention.NAME):
            raise UnsupportedError(f"{name}: was rewritten already; rewrite the original model")
        like = next(module.parameters(), next(model.parameters()))
        module.add_module(attention.NAME, heads.to(device=like.device, dtype=model.dtype).train(model.training))
        sites[name] = {"width": heads.width, "heads": [choice.to_dict() for choice in heads.choices]}
    model.config.headwise = {"version": VERSION, "length": plan.length, "sites": sites}
    model.__class__ = rewritten_class(type(model))
    model.set_attn_implementation(attention.NAME)
    return model


def body_of(model: Any, made_for: str | None) -> tuple[nn.Module, str]:
    """The part of `model` that a plan was made for, and the prefix of its names: the model itself, or its body."""
    body = model.base_model
    if body is model or made_for != type(body).__name__:
        return model, ""
    return body, f"{model.base_model_prefix}."


@functools.cache  # one class a class, so that isinstance means something
def rewritten_class(base: type) -> type:
    """`base` with Heads where its config's plan says, and a refusal of caches its heads cannot use."""

    class Rewritten(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            plan = getattr(config, "headwise", None)
            if plan is None:
                raise InputError(f"{type(self).__name__}: its config holds no plan; load {base.__name__} instead")
            super().__init__(config, *args, **kwargs)
            attention.register()
            for name, site in plan["sites"].items():
                choices = [Choice.from_dict(d) for d in site["heads"]]
                heads = Heads(choices, site["width"], plan["length"])
                self.get_submodule(name).add_module(attention.NAME, heads)
            self.set_attn_implementation(attention.NAME)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            refuse_cache(self, kwargs)
            return super().generate(*args, **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank, (base,), self.__dict__  # the class is made, not imported

    if not hasattr(base, "generate"):
        del Rewritten.generate
    Rewritten.__name__ = Rewritten.__qualname__ = f"{PREFIX}{base.__name__}"
    Rewritten.__doc__ = f"{base.__name__} with some heads replaced by headwise."
    return Rewritten


def _blank(base: type) -> Any:
    cls: Any = rewritten_class(base)
    return cls.__new__(cls)


def reached(model: Any, probe: dict[str, torch.Tensor], plan: Plan) -> None:
    """Every site is really asked for attention on a probe: some families take any implementation and call none."""
    from transformers import AttentionInterface

    asked: set[nn.Module] = set()

    def listening(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        asked.add(module)
        return attention.attention(module, *args, **kwargs)

    AttentionInterface.register(attention.NAME, listening)
    try:
        with torch.no_grad():
            model(**probe)
    finally:
        attention.register()
    for site in plan.sites:
        if model.get_submodule(site.partition("@")[0]) not in asked:
            raise UnsupportedError(
                f"{site}: {type(model).__name__.removeprefix(PREFIX)} never asked transformers' attention interface "
                "here on a probe, so its heads cannot be replaced"
            )


def refuse_cache(model: Any, options: dict[str, Any]) -> None:
    """Before decoding: a head that cannot answer new queries from cached keys, if generate is going to cache them."""
    settings = options.get("generation_config") or model.generation_config

    def setting(name: str) -> Any:
        return options[name] if options.get(name) is not None else getattr(settings, name, None)

    if setting("use_cache") is False:
        return
    kind = setting("cache_implementation")
    fixed = isinstance(kind, str) and ("static" in kind or "hybrid" in kind)
    fixed = fixed or "Static" in type(options.get("past_key_values")).__name__
    for name, module in model.named_modules():
        heads = getattr(module, attention.NAME, None)
        if heads is None or not getattr(module, "is_causal", True):
            continue
        for head, choice in enumerate(heads.choices):
            if not choice.of.cached:
                raise UnsupportedError(
                    f"generate: head {head} of {name} is {choice}, which cannot answer new queries from cached keys; "
                    "pass use_cache=False"
                )
            if fixed and choice.kind != "exact":
                raise UnsupportedError(
                    f"generate: head {head} of {name} is {choice}, which needs to know the last key, but a static "
                    "cache has room beyond it; pass cache_implementation=None, or use_cache=False"
                )


def _uses_the_interface(model: Any, plan: Plan) -> None:
    """Families that compute attention by hand accept any implementation's name and never call it."""
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"{name} computes attention by hand instead of through transformers' attention interface, so its heads "
            "cannot be replaced"
        )
    for site in plan.sites:
        module = model.get_submodule(site.partition("@")[0])
        try:
            source = inspect.getsource(type(module).forward)
        except (OSError, TypeError):
            continue
        if "attention_interface" not in source and "ALL_ATTENTION_FUNCTIONS" not in source:
            raise UnsupportedError(
                f"{site}: {type(module).__name__} of {name} does not call transformers' attention interface, so its "
                "heads cannot be replaced"
            )


def default_probe(model: Any, length: int) -> dict[str, torch.Tensor] | None:
    """A small input the model can take: random tokens or a random picture; None for any other kind."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    like = next(model.parameters())
    if model.main_input_name == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        ids = torch.randint(config.vocab_size, (2, min(length, 64)), generator=generator).to(like.device)
        both = getattr(config, "is_encoder_decoder", False)
        return {"input_ids": ids, "decoder_input_ids": ids[:, :-1]} if both else {"input_ids": ids}
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = (1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {"pixel_values": torch.randn(size, generator=generator).to(like)}
    return None
