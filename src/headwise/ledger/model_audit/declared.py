"""What the config of a model of transformers declares: whether it is causal, and how far each layer sees.

sliding window w, causal          keys i - w + 1 ... i
sliding window w, both sides      keys i - w ... i + w
chunks of c                       keys of the chunk of i up to i
full                              keys 0 ... i, or all
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.models.gate import transformers_library


def declared_causal(model: nn.Module) -> bool | None:
    """Whether a model of transformers is meant to be causal; None for other models, and where nothing says so."""
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if config is None or not isinstance(family, str):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return True  # its decoder
    if getattr(config, "attn_type", None) == "bi":  # XLNet
        return False
    explicit = (getattr(config, name, None) for name in ("is_causal", "causal"))
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional is True or bidirectional == "all":
        return False
    said = next((x for x in explicit if isinstance(x, bool)), None)
    if said is not None:
        return said
    auto = transformers_library().models.auto.modeling_auto
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:  # families that can be either
        return getattr(config, "is_decoder", None) is True
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if {family, getattr(text, "model_type", family)} & set(causal) or type(model).__name__ in causal.values():
        return True
    if getattr(config, "is_decoder", None) is True:
        return True
    flags: set[Any] = {getattr(part, "is_causal", None) for part in model.modules()} & {True, False}
    return flags.pop() if len(flags) == 1 else None  # of its attention modules


@dataclass(frozen=True)
class DeclaredReach:
    """What a config says about one layer: kind is sliding, chunked, full or unknown."""

    kind: str
    width: int = 0

    def keys(self, i: int, n: int, causal: bool) -> range:
        """The positions that the output at i may depend on."""
        last = i if causal else n - 1
        if self.kind == "sliding":
            return (
                range(max(0, i - self.width + 1), i + 1)
                if causal
                else range(max(0, i - self.width), min(n, i + self.width + 1))
            )
        return range(i // self.width * self.width, last + 1) if self.kind == "chunked" else range(last + 1)


def declared_reaches(config: Any) -> list[DeclaredReach]:
    """What a config of transformers says about each layer; empty if it declares no window."""
    text = getattr(config, "get_text_config", None)
    config = text() if callable(text) else config
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "num_layers", None)
    window, chunk = (_size(config, name) for name in ("sliding_window", "attention_chunk_size"))
    local = getattr(config, "attention_layers", None)  # GPT-Neo: "global" or "local"
    if isinstance(local, (list, tuple)) and "local" in local:
        width = getattr(config, "window_size", 0)
        return [DeclaredReach("sliding", width) if kind == "local" else DeclaredReach("full") for kind in local]
    types = getattr(config, "layer_types", None)
    if isinstance(types, (list, tuple)):
        known = {
            "sliding_attention": DeclaredReach("sliding", window) if window else None,
            "chunked_attention": DeclaredReach("chunked", chunk) if chunk else None,
            "full_attention": DeclaredReach("full"),
        }
        found = [known.get(kind) or DeclaredReach("unknown") for kind in types]
        return found if any(reach.width for reach in found) else []
    if not window or getattr(config, "use_sliding_window", True) is False or not isinstance(layers, int):
        return []
    return [DeclaredReach("sliding", window)] * layers


def widest_window(config: Any) -> int | None:
    """The largest window or chunk of a config."""
    return max((reach.width for reach in declared_reaches(config) if reach.width), default=None)


def _size(config: Any, name: str) -> int:
    """A field of a config; 0 if there is none, or no positive number."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0
