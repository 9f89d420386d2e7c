"""Which layers of a model can grow, and their parameters in the optimizers it is trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.growth.layers.growing_layer import GrowingLayer, MultiHeadLayer
from headwise.growth.layers.transformers_layer import TransformersLayer
from headwise.growth.optimizer_state import holders
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.resized_models import resized
from headwise.models.widths.widened_attention import NAME
from headwise.nn.multihead import MultiHead


def growing_layers(model: nn.Module, probe: dict[str, Any] | None = None) -> dict[str, GrowingLayer]:
    """Every trainable MultiHead, and every attention module of a transformers model, by name."""
    found: dict[str, GrowingLayer] = {
        name.removeprefix("_orig_mod."): MultiHeadLayer(module)
        for name, module in model.named_modules()
        if isinstance(module, MultiHead) and module.query.weight.requires_grad and module.key.weight.requires_grad
    }
    if not found and is_pretrained(model):
        for name, module in resized(model, probe).items():
            dimensions = getattr(module, NAME)
            assert isinstance(dimensions, HeadDimensions)
            if any(p.requires_grad for part, p in module.named_parameters() if not part.startswith(NAME)):
                found[name] = TransformersLayer(module, dimensions)
    if not found:
        raise InputError(
            "Grower: the model has no trainable MultiHead layer and is no trainable model of transformers; convert its "
            "attention with MultiHead.from_torch or headwise.models.adopt first"
        )
    return found


def register_parameters(name: str, layer: GrowingLayer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that each parameter of a layer is in one optimizer; parameters without rows yet join that of the module."""
    neighbour = next((p for p in layer.module.parameters() if p.requires_grad and holders(optimizers, p)), None)
    for (part, kind), parameter in layer.parameters().items():
        held = holders(optimizers, parameter)
        if len(held) > 1:
            raise InputError(
                f"Grower: {len(held)} optimizers hold {name}.{part}.{kind}; a parameter must be trained by one of them"
            )
        if held or not parameter.requires_grad:
            continue
        if parameter.numel() or neighbour is None:
            raise InputError(
                f"Grower: the optimizer does not hold {name}.{part}.{kind}, so a grown one would never be trained; "
                "make the optimizer from model.parameters(), or freeze the layer to leave it out"
            )
        optimizer = holders(optimizers, neighbour)[0]
        group = next(g for g in optimizer.param_groups if any(neighbour is p for p in g["params"]))
        group["params"].append(parameter)


def check_unsharded(model: nn.Module) -> None:
    """Raise UnsupportedError for FSDP: rows of a shard cannot be added on one process alone."""
    sharded = next((name for name, p in model.named_parameters() if type(p.data).__name__ == "DTensor"), None)
    wrapped = any(type(m).__name__ in ("FullyShardedDataParallel", "FSDPModule") for m in model.modules())
    if sharded is not None or wrapped:
        raise UnsupportedError(
            f"Grower: the model is sharded by FSDP ({sharded or 'FullyShardedDataParallel'}), whose shards cannot "
            "change their shape; grow before fully_shard, or train with DistributedDataParallel"
        )
