"""centre = E[k - q], spread = Cov[k - q] under the weights P_qk: the receptive field of a head on a grid.

For positional and content-based heads.  The p-ellipse {x : (x - centre)^T Cov^-1 (x - centre) <= r^2} is the smallest
of its shape that holds a share p of the weight; r is measured, not taken from a normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.relative.encodings import cells
from headwise.shapes import same_axis

SHARES = (0.5, 0.9)


@final
@dataclass(frozen=True)
class Ellipse:
    """Half axes in cells, longest first, and the unit direction of each."""

    share: float
    half_axes: tuple[float, ...]
    directions: tuple[tuple[float, ...], ...]


@final
@dataclass(frozen=True)
class ReceptiveField:
    """Centre and covariance of one head's weights relative to the query, and the ellipses that hold 50 % and 90 %."""

    centre: tuple[float, ...]
    spread: tuple[tuple[float, ...], ...]
    ellipses: tuple[Ellipse, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def receptive_fields(
    operator: AttentionOperator,
    grid: Sequence[int],
    *,
    queries: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    at: Sequence[int] | None = None,
) -> list[ReceptiveField]:
    """One receptive field per matrix of the operator's batch (per head), averaged over the queries `at`.

    grid     of the keys; queries, stride, origin: query q is at cell stride q + origin, as in `quadratic`
    at       row-major indices of queries, by default the middle one; only these rows of P are computed

    >>> from headwise.operators.relative.shift import shift
    >>> field, = receptive_fields(shift((5, 5), (0, 2), border="zeros"), (5, 5))
    >>> field.centre
    (0.0, 2.0)
    """
    grid, axes = tuple(grid), len(grid)
    queries = grid if queries is None else tuple(queries)
    same_axis("receptive_fields", "n", operator=operator.shape[-1], grid=math.prod(grid))
    same_axis("receptive_fields", "m", operator=operator.shape[-2], queries=math.prod(queries))
    step = torch.tensor(stride or (1,) * axes, dtype=torch.float64)
    start = torch.tensor(origin or (0,) * axes, dtype=torch.float64)
    rows = [_middle(queries)] if at is None else list(at)
    if not rows or not all(0 <= row < math.prod(queries) for row in rows):
        raise ShapeError(f"receptive_fields: at must hold indices of {math.prod(queries)} queries, but is {rows}")
    places = cells(queries)[rows].double() * step + start  # (rows, D)
    offsets = (cells(grid).double() - places.unsqueeze(1)).flatten(0, 1)  # (rows n, D)
    weights = _rows_of(operator, rows).double().reshape(-1, len(offsets))
    return [_field(w, offsets) for w in weights]


def _rows_of(operator: AttentionOperator, rows: list[int]) -> Tensor:
    """P_q for the given q: (*batch, rows, n), by one call of the adjoint."""
    m, like = operator.shape[-2], operator.like
    with torch.no_grad():
        pick = torch.zeros(m, len(rows), dtype=like.dtype, device=like.device)
        pick[rows, range(len(rows))] = 1
        return operator.adjoint(pick.expand(*operator.shape[:-2], *pick.shape)).mT.cpu()


def _field(weights: Tensor, offsets: Tensor) -> ReceptiveField:
    total = weights.sum()
    if not total > 0:
        undefined = (math.nan,) * offsets.shape[-1]
        return ReceptiveField(undefined, (undefined,) * offsets.shape[-1], ())
    weights = weights / total
    centre = weights @ offsets
    away = offsets - centre
    spread = (away * weights.unsqueeze(-1)).mT @ away
    values, vectors = torch.linalg.eigh(spread)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    # directions without spread have all weight at distance 0, so their coordinate does not count
    flat = values <= 1e-12 * values.amax().clamp(min=1.0)
    scaled = torch.where(flat, 0.0, (away @ vectors) / values.clamp(min=1e-300).sqrt())
    radius, order = scaled.square().sum(-1).sqrt().sort()
    cumulative = weights[order].cumsum(-1)
    ellipses = []
    for share in SHARES:
        r = radius[int((cumulative < share - 1e-12).sum().clamp(max=len(cumulative) - 1))]
        half = torch.where(flat, 0.0, r * values.sqrt())
        ellipses.append(Ellipse(share, tuple(half.tolist()), tuple(tuple(v) for v in vectors.mT.tolist())))
    return ReceptiveField(tuple(centre.tolist()), tuple(tuple(row) for row in spread.tolist()), tuple(ellipses))


def _middle(queries: Sequence[int]) -> int:
    number = 0
    for q in queries:
        number = number * q + q // 2
    return number
