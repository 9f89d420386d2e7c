"""Subclasses of transformers' classes for models that headwise changed, in memory, in files and for the auto classes.

The class of a changed model derives from its class, so `save_pretrained`, `generate` and everything else are those of
transformers.  Its config.json has the model type of the change and `"original_model_type": "llama"`: transformers alone
refuses it, after `import headwise` AutoConfig, AutoModel and so on load it as what it is.  In memory its config derives
from the original class, with the original `model_type`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.models.gate import Trust, forget_names_in_files, pretrained_model, quiet, transformers_library
from headwise.models.pretrained.attention_functions import use
from headwise.output_directory import check_unchanged

ORIGINAL, IMPLEMENTATION = "original_model_type", "attn_implementation"
REFUSED = "load this with AutoModel after import headwise"
PREFIX = "Headwise"


@final
@dataclass(frozen=True)
class Change:
    """What is done to models.

    name      of the model type, of the key in config.json that says what was changed, and of the attention function
    facts     what is under that key, for messages
    again     what to do if the files are damaged
    register  makes the attention function known to transformers
    install   changes a new model by its config
    mixins    further base classes, given the original class
    """

    name: str
    facts: str
    again: str
    register: Callable[[], None]
    install: Callable[[Any], None]
    mixins: Callable[[type], tuple[type, ...]]


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is a PreTrainedModel, without importing transformers."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def derive(model: Any, change: Change) -> None:
    """Make `model`, which was changed in place, an instance of the derived class."""
    forget_names_in_files(model)
    model.config.__class__ = derived_config(change, type(model.config))
    model.__class__ = derived_class(change, type(model))
    # where its constructor says which outputs, such as hidden_states, are recorded on demand, by the name of the class
    recorded = getattr(sys.modules["transformers.modeling_utils"], "_CAN_RECORD_REGISTRY", {})
    recorded[str(type(model))] = getattr(model, "_can_record_outputs", None)


@functools.cache  # one subclass per class, so that isinstance works
def derived_class(change: Change, base: type) -> type:
    """`base` changed as its config says."""

    class Derived(*change.mixins(base), base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(getattr(config, change.name, None), Mapping):
                raise InputError(
                    f"{type(self).__name__}: its config holds no {change.facts}; load {base.__name__} instead"
                )
            change.register()
            super().__init__(config, *args, **kwargs)
            change.install(self)
            use(self, change.name)

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
            options[IMPLEMENTATION] = "eager"  # until __init__ sets the function of the change
            model, info = pretrained_model(super(), place, trust, **options)
            if cls.__name__ not in (model.config.architectures or ()):  # the body of a model saved with its head
                body = f"{model.base_model_prefix}."
                info = {**info, "unexpected_keys": {key for key in info["unexpected_keys"] if key.startswith(body)}}
            check_complete(str(source), info, change)
            return (model, info) if with_info else model

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank_model, (change, base), self.__dict__  # the class is generated, so it cannot be imported

    Derived.__name__ = Derived.__qualname__ = f"{PREFIX}{base.__name__}"
    Derived.__doc__ = f"{base.__name__}, changed by the {change.facts} in its config."
    return Derived


def changed_modules(model: Any, change: Change, sites: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Each of the sites in config.json and its module, or InputError."""
    modules = dict(model.named_modules())
    for site in sites:
        # the body of a model that was saved with its head lacks the first part of the name
        name = site if site in modules else site.removeprefix(f"{model.base_model_prefix}.")
        if name not in modules:
            original = type(model).__name__.removeprefix(PREFIX)
            raise InputError(f"config.json: {change.name}: {original} has no module {site!r}")
        yield site, modules[name]


def check_complete(source: str, info: Mapping[str, Collection[str]], change: Change) -> None:
    """Raise InputError unless the files hold exactly the tensors of the model; `info` as transformers reports it."""
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "holds unknown")):
        names = sorted(info[key])
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            raise InputError(
                f"{source} {what} tensors, {len(names)} in all: {shown}; its files do not belong together, so "
                f"{change.again}"
            )


def read_changed_config(change: Change, facts: dict[str, Any], **options: Any) -> Any:
    """The config of a changed model, from its config.json; its class is known to the auto classes afterwards."""
    from transformers import CONFIG_MAPPING

    facts = {key: value for key, value in facts.items() if key != IMPLEMENTATION}
    name = facts.pop(ORIGINAL, None)
    if not isinstance(facts.get(change.name), dict) or not isinstance(name, str) or name not in CONFIG_MAPPING:
        there = "there" if isinstance(facts.get(change.name), dict) else "missing"
        raise InputError(
            f"config.json has model_type {change.name}, but its {ORIGINAL} is {name!r} and its {change.facts} "
            f"({change.name}): {there}; {change.again}"
        )
    return derived_config(change, CONFIG_MAPPING[name]).from_dict({**facts, "model_type": name}, **options)


@functools.cache  # one subclass per class, so that isinstance works
def derived_config(change: Change, base: Any) -> Any:
    """`base` that is saved with the model type of the change."""

    class Config(base):
        def to_dict(self) -> dict[str, Any]:
            # stock classes refuse it, whatever model type they are told and whatever is registered
            return {
                **super().to_dict(),
                "model_type": change.name,
                ORIGINAL: base.model_type,
                IMPLEMENTATION: REFUSED,
            }

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank_config, (change, base), self.__dict__  # the class is generated, so it cannot be imported

    Config.__name__ = Config.__qualname__ = f"{PREFIX}{base.__name__}"
    Config.__doc__ = f"{base.__name__} with {change.facts} of headwise."
    _register_auto_classes(change, base, Config)
    return Config


def _register_auto_classes(change: Change, base: Any, config: Any) -> None:
    """Every auto class that has a model, or a tokenizer or processor, for `base` has one for `config`."""
    transformers = transformers_library()
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    for name in dir(transformers):
        mapping = getattr(getattr(transformers, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is not None and base in mapping:
            found = mapping[base]
            first = found[0] if isinstance(found, tuple) else found
            mapping.register(config, derived_class(change, first), exist_ok=True)
    with quiet():  # an image processor without torchvision says so
        for others in (IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING, TOKENIZER_MAPPING):
            if base in others:
                others.register(config, others[base], exist_ok=True)


def _blank_model(change: Change, base: type) -> Any:
    cls: Any = derived_class(change, base)
    return cls.__new__(cls)


def _blank_config(change: Change, base: Any) -> Any:
    config = derived_config(change, base)
    return config.__new__(config)


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
