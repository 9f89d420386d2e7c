"""Models of transformers whose heads have other query/key widths, in memory and on disk.

A resized model is an instance of a subclass of its class, so `save_pretrained`, `generate` and everything else are
those of transformers.  Its config.json holds the widths, `"model_type": "headwise_widths"`, `"original_model_type":
"llama"` and `"attn_implementation": "headwise_widths"`.  Without headwise the auto classes do not know the first and
stock classes not the last, so each of them refuses the files instead of loading a model that computes something else;
after `import headwise` the auto classes load it as what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.models.gate import Trust, forget_names_in_files, pretrained_model, quiet, transformers_library
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.widened_attention import NAME, attach, attention_sites, register
from headwise.output_directory import check_unchanged

MODEL_TYPE, ORIGINAL, IMPLEMENTATION = "headwise_widths", "original_model_type", "attn_implementation"
PREFIX = "Headwise"


def resizable(model: nn.Module) -> bool:
    """Whether `model` is a PreTrainedModel, without importing transformers."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def resized(model: Any, probe: dict[str, Any] | None = None) -> dict[str, nn.Module]:
    """The attention modules of a transformers model by name, each with HeadDimensions that change nothing yet.

    The model becomes an instance of a subclass of its class.  A model that has them already is left as it is.
    """
    known = {name: module for name, module in model.named_modules() if getattr(module, NAME, None) is not None}
    if known:
        return known
    if getattr(model.config, "headwise", None) is not None:
        raise UnsupportedError(f"{type(model).__name__} was rewritten; resize heads before rewriting them")
    sites = attention_sites(model, probe)
    for site in sites:
        attach(site.module, HeadDimensions(site.heads, site.key_heads, site.key_width, site.inputs))
    if sites:
        forget_names_in_files(model)
        model.config.__class__ = resized_config(type(model.config))
        model.__class__ = resized_class(type(model))
    return {site.name: site.module for site in sites}


def widths(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What config.json says of each attention module; empty if no head has another width."""
    found = {name: getattr(module, NAME, None) for name, module in model.named_modules()}
    all_of_them = {name: x for name, x in found.items() if isinstance(x, HeadDimensions)}
    changed = any(any(x.added) or x.kept is not None for x in all_of_them.values())
    return {name: x.config() for name, x in all_of_them.items()} if changed else {}


@functools.cache  # one subclass per class, so that isinstance works
def resized_class(base: type) -> type:
    """`base` with HeadDimensions where its config says."""

    class Resized(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            sites = getattr(config, NAME, None)
            if not isinstance(sites, Mapping):
                raise InputError(f"{type(self).__name__}: its config holds no widths; load {base.__name__} instead")
            register()
            super().__init__(config, *args, **kwargs)
            modules = dict(self.named_modules())
            for site, sizes in sites.items():
                # the body of a model that was saved with its head lacks the first part of the name
                name = site if site in modules else site.removeprefix(f"{self.base_model_prefix}.")
                if name not in modules:
                    raise InputError(f"config.json: {NAME}: {base.__name__} has no module {site!r}")
                try:
                    dimensions = HeadDimensions(**sizes)
                except (TypeError, ValueError, IndexError, RuntimeError) as error:
                    raise InputError(f"config.json: {NAME}: {site}: {sizes} are not sizes of heads") from error
                attach(modules[name], dimensions)
            self.set_attn_implementation(NAME)

        def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            """As in transformers; a model in which no head has another width is saved as what it was."""
            self.config.headwise_widths = widths(self)
            if self.config.headwise_widths:
                return super().save_pretrained(*args, **kwargs)
            state = {name: x for name, x in self.state_dict().items() if f".{NAME}." not in name}
            config_class, model_class = type(self.config), type(self)
            self.config.__class__, self.__class__ = config_class.__mro__[1], base
            del self.config.headwise_widths
            try:
                return self.save_pretrained(*args, **{"state_dict": state, **kwargs})
            finally:
                self.config.__class__, self.__class__ = config_class, model_class

        @classmethod
        def from_pretrained(cls, source: str | Path, *args: Any, **options: Any) -> Any:
            """As in transformers, but raises InputError unless the files hold exactly the tensors of the model."""
            with_info = options.pop("output_loading_info", False)
            trust = Trust(trust_remote_code=bool(options.pop("trust_remote_code", False)))
            if args:
                raise UnsupportedError(f"{cls.__name__}.from_pretrained takes no arguments for the model's class")
            place = Path(source) if Path(source).is_dir() else str(source)
            if isinstance(place, Path):
                check_unchanged(place, ".safetensors")
            model, info = pretrained_model(super(), place, trust, **options)
            if cls.__name__ not in (model.config.architectures or ()):  # the body of a model saved with its head
                body = f"{model.base_model_prefix}."
                info = {**info, "unexpected_keys": {key for key in info["unexpected_keys"] if key.startswith(body)}}
            _check_complete(str(source), info)
            return (model, info) if with_info else model

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank_model, (base,), self.__dict__  # the class is generated, so it cannot be imported

    Resized.__name__ = Resized.__qualname__ = f"{PREFIX}{base.__name__}"
    Resized.__doc__ = f"{base.__name__} with other query/key widths."
    return Resized


def _check_complete(source: str, info: Mapping[str, Collection[str]]) -> None:
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "holds unknown")):
        names = sorted(info[key])
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            raise InputError(f"{source} {what} tensors, {len(names)} in all: {shown}; save the resized model again")


def read_config(facts: dict[str, Any], **options: Any) -> Any:
    """The config of a resized model, from its config.json; its class is known to the auto classes afterwards."""
    from transformers import CONFIG_MAPPING

    facts = {key: value for key, value in facts.items() if key != IMPLEMENTATION}
    name = facts.pop(ORIGINAL, None)
    if not isinstance(facts.get(NAME), dict) or not isinstance(name, str) or name not in CONFIG_MAPPING:
        raise InputError(
            f"config.json has model_type {MODEL_TYPE}, but its {ORIGINAL} is {name!r} and {NAME} is "
            f"{'there' if isinstance(facts.get(NAME), dict) else 'missing'}; save the resized model again"
        )
    return resized_config(CONFIG_MAPPING[name]).from_dict({**facts, "model_type": name}, **options)


@functools.cache  # one subclass per class, so that isinstance works
def resized_config(base: Any) -> Any:
    """`base` that is saved with the model_type and attention implementation of resized models."""

    class Config(base):
        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "model_type": MODEL_TYPE, ORIGINAL: base.model_type, IMPLEMENTATION: NAME}

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank_config, (base,), self.__dict__  # the class is generated, so it cannot be imported

    Config.__name__ = Config.__qualname__ = f"{PREFIX}{base.__name__}"
    Config.__doc__ = f"{base.__name__} of a resized model."
    _register_auto_classes(base, Config)
    return Config


def _register_auto_classes(base: Any, config: Any) -> None:
    """Every auto class that has a model, or a tokenizer or processor, for `base` has one for `config`."""
    transformers = transformers_library()
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    for name in dir(transformers):
        mapping = getattr(getattr(transformers, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is not None and base in mapping:
            found = mapping[base]
            mapping.register(config, resized_class(found[0] if isinstance(found, tuple) else found), exist_ok=True)
    with quiet():  # an image processor without torchvision says so
        for others in (IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING, TOKENIZER_MAPPING):
            if base in others:
                others.register(config, others[base], exist_ok=True)


def _blank_model(base: type) -> Any:
    cls: Any = resized_class(base)
    return cls.__new__(cls)


def _blank_config(base: Any) -> Any:
    config = resized_config(base)
    return config.__new__(config)
