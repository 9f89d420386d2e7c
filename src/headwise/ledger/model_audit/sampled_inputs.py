"""A batch for a model of transformers: tokens drawn from its vocabulary, random pixels, random features of sound."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.inputs import max_positions

SEQUENCES, LENGTH, LONGEST_WINDOW = 3, 32, 256
"""Sequences of a batch, their tokens, and the longest window for which sequences are made longer by themselves."""


def sampled_batch(model: nn.Module, *, length: int | None, window: int | None, seed: int) -> dict[str, Tensor]:
    """`SEQUENCES` inputs of the kind that the model takes; InputError if that cannot be told.

    length  tokens of a sequence; default: 32, or more if the model has a window that would otherwise not be seen
    """
    arguments = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    weight = next((x for x in model.parameters() if x.is_floating_point()), None)
    main = getattr(model, "main_input_name", "input_ids" if "input_ids" in arguments else None)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(SEQUENCES, *shape, generator=generator)
        return x if weight is None else x.to(weight.device, weight.dtype)

    batch: dict[str, Tensor] = {}
    if main == "input_ids":
        batch["input_ids"] = _tokens(model, _length(model, length, window), generator)
    elif main == "pixel_values":
        size = _field(model, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        batch["pixel_values"] = normal(_field(model, "num_channels", 3), height, width)
    elif main == "input_features" and _field(model, "max_source_positions", None) is not None:
        frames = 2 * _field(model, "max_source_positions", None)  # the first convolutions halve them, as in Whisper
        batch["input_features"] = normal(_field(model, "num_mel_bins", 80), frames)
    elif main == "input_values":
        batch["input_values"] = normal(16000)
    else:
        raise InputError(
            f"{type(model).__name__}: what it takes is not known; give a batch, as headwise.verify(model, [batch]) or "
            "from a factory that returns (model, [batch])"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" in arguments:
        longest = length or LENGTH if main == "input_ids" else min(length or LENGTH, _target_positions(model))
        batch["decoder_input_ids"] = _tokens(model, longest, generator)
    return batch


def vocabulary(model: nn.Module) -> Tensor:
    """Tokens that can be drawn: those of the embedding table, without the special ones that the config names."""
    fields = getattr(getattr(model, "config", None), "to_dict", dict)
    sizes = [_field(model, "vocab_size", None), getattr(_embedding(model), "num_embeddings", None)]
    known = [size for size in sizes if isinstance(size, int)]
    if not known:
        raise InputError(f"{type(model).__name__} has no vocabulary to draw tokens from; give a batch")
    special = set(_special(fields()))
    ordinary = [token for token in range(min(known)) if token not in special]
    if len(ordinary) < 2:
        raise InputError(
            f"{type(model).__name__} has {len(ordinary)} tokens that are not special; at least 2 are needed"
        )
    return torch.tensor(ordinary)


def pad_token(model: nn.Module) -> int:
    """The token that fills a sequence up: that of the config, else the end of a text, else 0."""
    ids = (_field(model, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((x for x in ids if isinstance(x, int) and x >= 0), 0)


def _tokens(model: nn.Module, length: int, generator: torch.Generator) -> Tensor:
    tokens = vocabulary(model)
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    return tokens[torch.randint(len(tokens), (SEQUENCES, length), generator=generator)].to(device)


def _length(model: nn.Module, length: int | None, window: int | None) -> int:
    positions = max_positions(model)
    if length is None:
        fits = window is not None and LENGTH // 2 < window <= LONGEST_WINDOW
        wanted = window + LENGTH // 2 if window is not None and fits else LENGTH
        return wanted if positions is None else min(wanted, positions)
    if positions is not None and length > positions:
        raise InputError(
            f"{type(model).__name__} has {positions} positions, but length is {length}; use at most {positions}"
        )
    return length


def _target_positions(model: nn.Module) -> int:
    return _field(model, "max_target_positions", None) or LENGTH


def _embedding(model: nn.Module) -> Any:
    try:
        return model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, RuntimeError, TypeError):
        return None


def _field(model: nn.Module, name: str, default: Any) -> Any:
    """A field of the config, or of the first of its parts that has it."""
    config = getattr(model, "config", None)
    parts = [config, *(x for x in vars(config).values() if hasattr(x, "to_dict"))] if config is not None else []
    return next((x for x in (getattr(part, name, None) for part in parts) if x is not None), default)


def _special(config: Mapping[str, Any]) -> Iterator[int]:
    """Every token that a config gives a meaning: pad_token_id, image_token_index, … of the model and of its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special({str(key): x for key, x in value.items()})
        elif str(name).endswith(("token_id", "token_index", "token_ids")):
            yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, int))
