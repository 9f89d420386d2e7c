"""Optimizer moments after a head has changed its width: old directions keep theirs, new ones start from calibration.

A query row multiplied by a has its gradient divided by a, so m -> m / a and v -> v / a^2.  For new rows

    m = mean gradient,   v = m^2 + (batches a fold) * variance of the gradient between folds

is what the running averages would hold had the rows been there.  They have further to go than rows that have been
trained, so v is divided by pace^2: new rows start `pace` times as fast, and slow down as v forgets how it began.
Zero-filled moments under an old step counter are faster still, by as much as (1 - beta_1) / sqrt(1 - beta_2) = 3.2
learning rates at once in an old optimizer and less in a young one; a rebuilt optimizer forgets the rest.
The optimizer object, its groups and its schedulers stay; only the tensors inside are replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.growth.head_weights import Installed
from headwise.growth.solve import Factors, Problem
from headwise.nn.ragged_heads import head_slices

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
MEANS = ("exp_avg", "momentum_buffer", "grad_avg")

PACE = 3.0
"""Measured on one layer (docs/grow.md): not worse than 1 at learning rates of 1e-3, 3e-3 and 1e-2, and better at the
first two; zeros are better still at those and worse at the last."""

Name = tuple[str, str]


@final
@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean and mean square of a batch's gradient, as rows of each parameter of one head, and how many rows are old."""

    mean: dict[Name, Tensor]
    square: dict[Name, Tensor]
    kept: int
    stretch: float  # what the kept query rows were multiplied by
    pace: float


def calibrate(problem: Problem, grown: Factors, pace: float = PACE) -> Calibration:
    """From M on each fold: dL/dW_q = -M W_k, dL/dW_k = -M^T W_q, brought to the layer's own scale."""
    k, width = problem.present.width, grown.width
    live = problem.shares > 0
    m, shares = problem.folds[live, 0].double(), problem.shares[live].double()
    g_q = -(m @ grown.wk).mT / math.sqrt(width)  # (f, k', d_q)
    g_k = -(m.mT @ grown.wq[0]).mT
    mean_q, square_q = _moments(g_q, shares)
    mean_k, square_k = _moments(g_k, shares)
    same = width >= k and torch.equal(grown.wk[:, :k], problem.present.wk.double())
    same = same and torch.equal(grown.wq[..., :k], problem.present.wq.double())

    def split(q: Tensor, key: Tensor) -> dict[Name, Tensor]:
        zero = torch.zeros_like(key[:, 0])
        return {("query", "weight"): q, ("query", "bias"): q[:, -1], ("key", "weight"): key, ("key", "bias"): zero}

    # where all directions are mixed anew, as after a refit or a shrinking, none of them is younger than the others
    kept, pace = (k, pace) if same else (0, 1.0)
    return Calibration(split(mean_q, mean_k), split(square_q, square_k), kept, math.sqrt(width / k), pace)


def _moments(g: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    weights = (shares / shares.sum())[:, None, None]
    mean = (weights * g).sum(0)
    spread = (weights * (g - mean).square()).sum(0)
    count = len(g)
    noise = spread * (count / max(1, count - 1)) * shares.mean()
    square = mean.square() + noise
    # few folds say little about one entry: half of the estimate is the row's own average
    return mean, (square + square.mean(-1, keepdim=True)) / 2


def holds(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is p for group in optimizer.param_groups for p in group["params"])


@final
@dataclass(frozen=True, eq=False)
class Exchanged:
    """Which parameter stood where in the optimizer, and the state it had."""

    optimizer: torch.optim.Optimizer
    before: list[tuple[nn.Parameter, nn.Parameter, dict[str, Any]]]  # (old, new, old's state)

    def undo(self) -> None:
        for old, new, state in self.before:
            _swap(self.optimizer, new, old)
            self.optimizer.state.pop(new, None)
            if state:
                self.optimizer.state[old] = state


def exchange(
    optimizer: torch.optim.Optimizer, installed: Installed, calibrated: Mapping[int, Calibration]
) -> Exchanged:
    """Put the new parameters in the place of the old ones, with moments that fit them."""
    before = []
    for name, old in installed.before.items():
        new = installed.after[name]
        if not holds(optimizer, old):
            if old.requires_grad:
                raise InputError(f"Grower: the optimizer does not hold {'.'.join(name)}; give it all of the model's")
            continue
        state = dict(optimizer.state.pop(old, {}))
        _swap(optimizer, old, new)
        moved = _moved(state, name, old, new, installed, calibrated)
        if moved:
            optimizer.state[new] = moved
        before.append((old, new, state))
    return Exchanged(optimizer, before)


def _swap(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]


def _moved(
    state: dict[str, Any],
    name: Name,
    old: nn.Parameter,
    new: nn.Parameter,
    installed: Installed,
    calibrated: Mapping[int, Calibration],
) -> dict[str, Any]:
    shaped = {key: x for key, x in state.items() if isinstance(x, Tensor) and x.dim() > 0}
    if any(x.shape != old.shape for x in shaped.values()):
        return {}  # factored moments (Adafactor) have no rows to keep: the optimizer starts them anew
    out = dict(state)
    for key, x in shaped.items():
        parts = zip(head_slices(installed.widths), head_slices(installed.layer.key_widths), strict=True)
        rows = x.new_zeros(new.shape)
        for head, (source, target) in enumerate(parts):
            if head not in calibrated:
                rows[target] = x[source]
            else:
                rows[target] = _head_rows(key, x[source], rows[target], calibrated[head], name)
        out[key] = rows
    return out


def _head_rows(key: str, old: Tensor, new: Tensor, calibration: Calibration, name: Name) -> Tensor:
    fresh = torch.zeros_like(new)
    columns = new.shape[1:]
    if key in MEANS:
        fresh = _fit(calibration.mean[name], columns).to(new)
    elif key in SQUARES:
        fresh = _fit(calibration.square[name], columns).to(new)
        # a row without gradient yet (its partner is zero) borrows the pace of the old rows
        silent = (fresh.flatten(1).sum(1) if fresh.dim() > 1 else fresh) == 0
        fresh[silent] = old.mean()
        fresh /= calibration.pace**2
    kept = calibration.kept
    if kept:
        shrink = calibration.stretch if name[0] == "query" else 1.0
        power = 2 if key in SQUARES else 1
        fresh[:kept] = old[:kept] / shrink**power
    return fresh


def _fit(rows: Tensor, columns: torch.Size) -> Tensor:
    """W_q's rows carry the bias in their last column; a weight leaves it out."""
    return rows[:, : columns[0]] if columns else rows
