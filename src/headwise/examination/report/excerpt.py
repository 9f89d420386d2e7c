"""A picture of every head on one real text: P averaged over cells, 8 bits a cell.

Cell (a, b) holds round(255 sqrt(mean of P over the cell / largest mean of the head)): the root keeps faint weights
visible, and 72 heads of 64 x 64 cells are 295 kB where plotting libraries write megabytes.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax

BUDGET = 600_000
"""Bytes for all maps of a report, before base64."""

CELLS = 64
"""Cells a side of the finest map."""


def cell_means(scores: Scores, cells: int = CELLS) -> Tensor:
    """(h, rows, columns) means of P over at most `cells` x `cells` cells; q (h, m, k), k (h, n, k)."""
    m, n = scores.shape[-2:]
    edges = torch.linspace(0, m, min(cells, m) + 1).round().long().tolist()
    rows = [Softmax(scores.rows(a, b)).dense().float().mean(-2) for a, b in itertools.pairwise(edges)]
    return torch.stack([_columns(row, n, min(cells, n)) for row in rows], dim=1)


def images(means: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """uint8 maps and (h,) largest cell means of every site, coarser by halves until all of them fit the budget."""
    while sum(x.numel() for x in means) > BUDGET and max(x.shape[-1] for x in means) > 16:
        means = [torch.nn.functional.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False) for x in means]
    tops = [x.amax((-2, -1)).clamp(min=1e-30) for x in means]
    return [
        ((x / top[:, None, None]).sqrt().mul(255).round().to(torch.uint8), top)
        for x, top in zip(means, tops, strict=True)
    ]


def _columns(row: Tensor, n: int, columns: int) -> Tensor:
    """(h, seen) -> (h, columns) means; keys beyond what a causal block sees count as zero."""
    row = torch.nn.functional.pad(row, (0, n - row.shape[-1]))
    edges = torch.linspace(0, n, columns + 1).round().long()
    sums = torch.nn.functional.pad(row.double().cumsum(-1), (1, 0))
    return ((sums[:, edges[1:]] - sums[:, edges[:-1]]) / (edges[1:] - edges[:-1])).float()
