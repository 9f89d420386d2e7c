"""Factories such as `python:tests.faults.small_models:one`: models and texts of the same shapes."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


def _built(weights: int, texts: int, count: int = 7, seconds: float = 0.0) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(weights)
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    draws = torch.Generator().manual_seed(texts)
    if seconds:
        model.register_forward_pre_hook(lambda module, args: time.sleep(seconds))
    return model, [torch.randn(1, 16, 16, generator=draws) for _ in range(count)]


def one() -> tuple[nn.Module, list[Tensor]]:
    return _built(0, 0)


def slow() -> tuple[nn.Module, list[Tensor]]:
    """The same as `one`, with time to interrupt it."""
    return _built(0, 0, seconds=0.05)


def two() -> tuple[nn.Module, list[Tensor]]:
    return _built(1, 1)


def other_text() -> tuple[nn.Module, list[Tensor]]:
    """Only the last text differs."""
    model, texts = _built(0, 0)
    texts[-1][0, 0, 0] += 1
    return model, texts


def other_model() -> tuple[nn.Module, list[Tensor]]:
    """Only the last entry of one weight differs."""
    model, texts = _built(0, 0)
    with torch.no_grad():
        model.get_parameter("layers.1.linear2.weight")[-1, -1] += 1
    return model, texts
