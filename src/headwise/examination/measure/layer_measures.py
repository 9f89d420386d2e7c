"""How far the tokens of a hidden state (n, d) have become equal: measures of one layer, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.distributed.collectives import Ranks, largest, summed

SERIAL_ENTRIES = (1 << 15) - 1
"""Numbers of a hidden state measured at once: more would be shared among threads, and need new memory; measured."""


def layer_measures(x: Tensor, ranks: Ranks | None = None) -> dict[str, float]:
    """Measures of the hidden state x (n, d), whose rows may be on several processes.

    relative_residual   ||res X|| / ||X|| in the composite norm, res X = X less its row mean: 0 for equal tokens
    difference          ||res X||_F^2 / ||X||_F^2: the share that tells tokens apart, between 0 and 1
    mean_cosine         between two different tokens: (||sum of unit rows||^2 - n) / (n (n - 1))
    norm                root mean square length of a token
    """
    n, width = x.shape
    parts = x.split(max(1, SERIAL_ENTRIES // width))
    total = sum((part.double().sum(-2) for part in parts), start=torch.zeros(width, dtype=torch.float64))
    if ranks is not None:
        total, count = _of_all(summed, torch.cat([total, total.new_tensor([n])]), ranks).split([width, 1])
        n = int(count.item())
    mean = total / n
    columns, unit = torch.zeros(2, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    highest, squares = [0.0, 0.0], [0.0, 0.0]
    for part in parts:
        part = part.double()
        unit += (1 / torch.linalg.vector_norm(part, dim=-1).clamp(min=1e-12)) @ part
        for i, rows in enumerate((part, part - mean)):
            squares[i] += torch.linalg.vector_norm(rows).item() ** 2
            sizes = rows.abs()
            columns[i] += sizes.sum(-2)
            highest[i] = max(highest[i], sizes.sum(-1).amax().item())
    if ranks is not None:
        columns, unit = _of_all(summed, columns, ranks), _of_all(summed, unit, ranks)
        squares = _of_all(summed, unit.new_tensor(squares), ranks).tolist()
        highest = _of_all(largest, unit.new_tensor(highest), ranks).tolist()
    one_norms = columns.amax(-1).tolist()
    composite = [math.sqrt(one) * math.sqrt(infinity) for one, infinity in zip(one_norms, highest, strict=True)]
    return {
        "relative_residual": composite[1] / max(composite[0], 1e-300),
        "difference": squares[1] / max(squares[0], 1e-300),
        "mean_cosine": (unit.square().sum().item() - n) / max(1, n * (n - 1)),
        "norm": math.sqrt(squares[0] / n),
    }


def _of_all(combine: Callable[[Tensor, Ranks], Tensor], x: Tensor, ranks: Ranks) -> Tensor:
    """x of this process combined with that of the others, on the CPU as x is."""
    return combine(x.to(ranks.device), ranks).cpu()
