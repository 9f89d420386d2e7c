"""A picture of every head on one real text: P averaged over cells, 8 bits a cell.

Cell (a, b) holds round(255 sqrt(mean of P over the cell / largest mean of the head)).  The square root keeps small
weights visible; 72 heads of 64 x 64 cells take 295 kB.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from headwise.examination.measure.observe import sequence
from headwise.models.intercept import AttentionCall, intercept, nothing_seen
from headwise.models.run import Batch, first_sequence, run_model
from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax
from headwise.shapes import filled

BUDGET = 600_000
"""Bytes for all maps of a report, before base64."""

CELLS = 64
"""Cells a side of the finest map."""


def make_excerpt(
    model: nn.Module, batch: Batch, token_names: Callable[[Batch], list[list[str]]] | None
) -> dict[str, Any]:
    """Token names of the first sequence of the batch, and maps of every head on it."""
    text = first_sequence(model, batch)
    sites: list[dict[str, Any]] = []
    means: list[Tensor] = []

    def see(call: AttentionCall) -> None:
        scores, _ = sequence(call, 0)
        sites.append({"site": call.site, "queries": scores.shape[-2], "keys": scores.shape[-1]})
        means.append(cell_means(scores))

    with torch.no_grad(), intercept(model, see):
        run_model(model, text)
    if not sites:
        raise nothing_seen(model)
    for site, (image, top) in zip(sites, to_bytes(means), strict=True):
        site.update(
            rows=image.shape[-2],
            columns=image.shape[-1],
            top=[float(f"{x:.4g}") for x in top.tolist()],
            maps=[base64.b64encode(head.contiguous().numpy().tobytes()).decode() for head in image],
        )
    return {"tokens": [] if token_names is None else token_names(text)[0], "sites": sites}


def cell_means(scores: Scores, cells: int = CELLS) -> Tensor:
    """(h, rows, columns) means of P over at most `cells` x `cells` cells; q (h, m, k), k (h, n, k)."""
    m, n = scores.shape[-2:]
    edges = torch.linspace(0, m, min(cells, m) + 1).round().long().tolist()
    rows = [Softmax(scores.rows(a, b)).dense().float().mean(-2) for a, b in itertools.pairwise(edges)]
    return torch.stack([_column_means(row, n, min(cells, n)) for row in rows], dim=1)


def to_bytes(means: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """uint8 maps and (h,) largest cell means of every site, coarser by halves until all of them fit the budget."""
    while sum(x.numel() for x in means) > BUDGET and max(x.shape[-1] for x in means) > 16:
        means = [avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False) for x in means]
    tops = [x.amax((-2, -1)).clamp(min=1e-30) for x in means]
    return [
        ((x / top[:, None, None]).sqrt().mul(255).round().to(torch.uint8), top)
        for x, top in zip(means, tops, strict=True)
    ]


def _column_means(row: Tensor, n: int, columns: int) -> Tensor:
    """(h, keys) -> (h, columns) means; keys beyond the causal reach of a block of rows count as zero."""
    row = filled(row, (0, n - row.shape[-1]))
    edges = torch.linspace(0, n, columns + 1).round().long()
    sums = torch.nn.functional.pad(row.double().cumsum(-1), (1, 0))
    return ((sums[:, edges[1:]] - sums[:, edges[:-1]]) / (edges[1:] - edges[:-1])).float()
