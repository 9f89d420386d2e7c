"""A plan by whole layers as a model that needs nothing of headwise: `layer_types` and `sliding_window` in its config.

    Qwen2ForCausalLM    a family with sliding layers: the same class
    LlamaForCausalLM    MinistralForCausalLM, which computes the same and has sliding layers

Every layer is full attention, or a window of the same width for all its heads.  That the new model gives the output of
the rewritten one is checked on a probe that is longer than the window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.gate import transformers_library
from headwise.models.run import as_it_was
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.install.transformers_attention import NAME

TWINS = {"llama": ("Llama", "Ministral"), "mistral": ("Mistral", "Ministral")}
"""Families without sliding layers that have a twin with them: model_type -> the two names in classes."""

LARGEST_DIFFERENCE = 1e-5
"""Of the largest output: rounding of float32 through all layers."""


def stock_model(model: Any, new: Any) -> nn.Module:
    """`model` with the windows of its rewritten copy `new` as sliding layers of an architecture of transformers.

    Raises UnsupportedError if the plan is not by whole layers, or if no class of transformers computes it.
    """
    config, name = model.config, type(model).__name__
    width, types = _layers(new)
    transformers = transformers_library()
    old, twin = TWINS.get(config.model_type, ("", ""))
    config_class, model_class = type(config), type(model)
    if not (hasattr(config, "layer_types") and hasattr(config, "sliding_window")):
        names = (f"{twin}Config", name.replace(old, twin)) if twin else ("", "")
        config_class, model_class = (getattr(transformers, each, None) for each in names)
    if config_class is None or model_class is None:
        raise UnsupportedError(
            f"no class of transformers is {name} with sliding layers; leave out --stock, and load the model with "
            "headwise installed"
        )
    known = config_class().to_dict()
    facts = {key: value for key, value in config.to_dict().items() if key in known and key != "model_type"}
    facts |= {"layer_types": types, "sliding_window": width, "architectures": [model_class.__name__]}
    facts |= {"use_sliding_window": True} if "use_sliding_window" in known else {}
    stock = model_class(config_class.from_dict(facts)).to(device=model.device, dtype=model.dtype).eval()
    missing, unexpected = stock.load_state_dict(model.state_dict(), strict=False)
    for tensor in (*missing, *unexpected):
        raise UnsupportedError(f"{model_class.__name__} and {name} differ in the tensor {tensor}; leave out --stock")
    if hasattr(model, "generation_config"):
        stock.generation_config = model.generation_config
    _check_equal(stock, new, width)
    return stock


def _layers(new: Any) -> tuple[int, list[str]]:
    """The width of the windows, and the type of each layer."""
    config = new.config
    widths: dict[int, int] = {}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        widths = {i: config.sliding_window for i, name in enumerate(types) if name == "sliding_attention"}
    for name, module in new.named_modules():
        heads = getattr(module, NAME, None)
        if not isinstance(heads, MixedHeads) or heads.replaced is None:
            continue
        kinds = list(dict.fromkeys(heads.choices))
        if len(kinds) > 1:
            raise UnsupportedError(
                f"--stock needs one operator for all heads of a layer, but {name} has {kinds[0]} and {kinds[1]}"
            )
        if kinds[0].kind != "window" or kinds[0].options["leading"] or not getattr(module, "is_causal", False):
            raise UnsupportedError(
                f"--stock knows softmax and causal windows without leading keys, but {name} has {kinds[0]}, which no "
                "architecture of transformers has"
            )
        widths[module.layer_idx] = kinds[0].options["width"]
    if len(set(widths.values())) != 1:
        found = ", ".join(map(str, sorted(set(widths.values())))) or "none"
        raise UnsupportedError(f"--stock needs windows of one width, but the widths are: {found}")
    types = ["sliding_attention" if layer in widths else "full_attention" for layer in range(config.num_hidden_layers)]
    return next(iter(widths.values())), types


def _check_equal(stock: Any, new: Any, width: int) -> None:
    """Raise UnsupportedError unless both give the same output beyond the window."""
    positions = getattr(new.config, "max_position_embeddings", None) or width + 33
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(new.config.vocab_size, (1, min(width + 33, positions)), generator=generator)
    with as_it_was(stock), as_it_was(new), torch.no_grad():
        outputs: list[Tensor] = [model(input_ids=ids.to(model.device), use_cache=False)[0] for model in (stock, new)]
    change = (outputs[0] - outputs[1]).abs().max().item() / max(outputs[1].abs().max().item(), 1e-30)
    if not change <= LARGEST_DIFFERENCE:
        raise UnsupportedError(
            f"{type(stock).__name__} does not compute this plan: its output differs by {change:.1e} of the largest on "
            f"{ids.shape[1]} tokens; leave out --stock"
        )
