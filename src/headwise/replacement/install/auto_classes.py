"""Rewritten models for AutoConfig, AutoModel, AutoModelForCausalLM and so on.

A saved model has `"model_type": "headwise"` and `"original_model_type": "llama"` in its config.json: transformers alone
refuses it, after `import headwise` it is loaded as what it is.  In memory its config derives from the original class,
with the original `model_type`.
"""

from __future__ import annotations

import functools
from typing import Any

from headwise.errors import InputError
from headwise.models.gate import quiet, transformers_library

MODEL_TYPE, ORIGINAL = "headwise", "original_model_type"


def read_config(facts: dict[str, Any], **options: Any) -> Any:
    """The config of a rewritten model, from its config.json; its class is known to the auto classes afterwards."""
    from transformers import CONFIG_MAPPING

    facts = dict(facts)
    name = facts.pop(ORIGINAL, None)
    if not isinstance(facts.get("headwise"), dict) or not isinstance(name, str) or name not in CONFIG_MAPPING:
        raise InputError(
            f"config.json has model_type headwise, but its {ORIGINAL} is {name!r} and its plan is "
            f"{'there' if isinstance(facts.get('headwise'), dict) else 'missing'}; rewrite the original model again"
        )
    return rewritten_config(CONFIG_MAPPING[name]).from_dict({**facts, "model_type": name}, **options)


@functools.cache  # one subclass per class, so that isinstance works
def rewritten_config(base: Any) -> Any:
    """`base` that is saved with the model_type of rewritten models."""

    class Config(base):
        def to_dict(self) -> dict[str, Any]:
            facts = super().to_dict()
            return {**facts, "model_type": MODEL_TYPE, ORIGINAL: base.model_type}

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank, (base,), self.__dict__  # the class is generated, so it cannot be imported

    Config.__name__ = Config.__qualname__ = f"Headwise{base.__name__}"
    Config.__doc__ = f"{base.__name__} of a rewritten model."
    _register(base, Config)
    return Config


def _register(base: Any, config: Any) -> None:
    """Every auto class that has a model, or a tokenizer or processor, for `base` has one for `config`."""
    from headwise.replacement.install.transformers_models import rewritten_class

    transformers = transformers_library()
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    for name in dir(transformers):
        mapping = getattr(getattr(transformers, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is not None and base in mapping:
            found = mapping[base]
            mapping.register(config, rewritten_class(found[0] if isinstance(found, tuple) else found), exist_ok=True)
    with quiet():  # an image processor without torchvision says so
        for others in (IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING, TOKENIZER_MAPPING):
            if base in others:
                others.register(config, others[base], exist_ok=True)


def _blank(base: Any) -> Any:
    config = rewritten_config(base)
    return config.__new__(config)
