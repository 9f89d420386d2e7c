"""Numbers for the checks: always the same, since a verdict that changes from run to run says nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def shown(x: Tensor, digits: int = 3) -> str:
    """[[1, 0.5], [0, 1]]: a matrix as a reader types it, without minus zeros."""
    if x.dim():
        return "[" + ", ".join(shown(row, digits) for row in x) + "]"
    return f"{round(x.item(), digits) + 0.0:g}"
