"""Optimizer state after a head has changed its width: old directions keep theirs, new ones start from calibration.

torch's names: exp_avg is the running mean m of the gradient, exp_avg_sq the running mean v of its square.  A query row
multiplied by a has its gradient divided by a, so m -> m / a and v -> v / a^2.  For new rows

    m = mean gradient,   v = m^2 + (batches a fold) * variance of the gradient between folds

is what the running means would hold had the rows been there.  They have further to go than rows that have been
trained, so v is divided by pace^2: new rows start `pace` times as fast, and slow down as v forgets how it began.
Zeros under an old step counter are faster still, by as much as (1 - beta_1) / sqrt(1 - beta_2) = 3.2 learning rates at
once in an old optimizer and less in a young one; a rebuilt optimizer forgets the rest.
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
from headwise.growth.head_weights import InstalledWeights, ParameterName
from headwise.growth.problem import Factors, Problem
from headwise.nn.ragged_heads import head_slices

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
MEANS = ("exp_avg", "momentum_buffer", "grad_avg")

PACE = 3.0
"""Measured on one layer (docs/explanation/growth.md): not worse than 1 at learning rates of 1e-3, 3e-3 and 1e-2, and
better at the first two; zeros are better still at those and worse at the last."""


@final
@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean and mean square of a batch's gradient, as rows of each parameter of one head."""

    mean: dict[ParameterName, Tensor]
    square: dict[ParameterName, Tensor]
    old_rows: int  # rows, from the first, that are the old ones
    stretch: float  # factor by which the old query rows were multiplied
    pace: float


def calibrate(problem: Problem, grown: Factors, pace: float = PACE) -> Calibration:
    """From M on each fold: dL/dW_q = -M W_k, dL/dW_k = -M^T W_q, brought to the layer's own scale."""
    k, width = problem.present.width, grown.width
    nonempty = problem.shares > 0
    m, shares = problem.folds[nonempty, 0].double(), problem.shares[nonempty].double()
    mean_q, square_q = _mean_and_square(-(m @ grown.wk).mT / math.sqrt(width), shares)  # (f, k', d_q)
    mean_k, square_k = _mean_and_square(-(m.mT @ grown.wq[0]).mT, shares)
    same = width >= k and torch.equal(grown.wk[:, :k], problem.present.wk.double())
    same = same and torch.equal(grown.wq[..., :k], problem.present.wq.double())

    def split(q: Tensor, key: Tensor) -> dict[ParameterName, Tensor]:
        zero = torch.zeros_like(key[:, 0])
        return {("query", "weight"): q, ("query", "bias"): q[:, -1], ("key", "weight"): key, ("key", "bias"): zero}

    # after a refit or a shrinking all directions are mixed anew, and none of them is younger than the others
    old_rows, pace = (k, pace) if same else (0, 1.0)
    return Calibration(split(mean_q, mean_k), split(square_q, square_k), old_rows, math.sqrt(width / k), pace)


def _mean_and_square(g: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    weights = (shares / shares.sum())[:, None, None]
    mean = (weights * g).sum(0)
    spread = (weights * (g - mean).square()).sum(0)
    noise = spread * (len(g) / max(1, len(g) - 1)) * shares.mean()
    square = mean.square() + noise
    # few folds say little about one entry: half of the estimate is the row's own average
    return mean, (square + square.mean(-1, keepdim=True)) / 2


def holds(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is p for group in optimizer.param_groups for p in group["params"])


@final
@dataclass(frozen=True, eq=False)
class ExchangedState:
    """Which parameters took whose place in the optimizer, and the state that was there."""

    optimizer: torch.optim.Optimizer
    before: list[tuple[nn.Parameter, nn.Parameter, dict[str, Any]]]  # (old, new, state of the old one)

    def undo(self) -> None:
        for old, new, state in self.before:
            _swap(self.optimizer, new, old)
            self.optimizer.state.pop(new, None)
            if state:
                self.optimizer.state[old] = state


def exchange(
    optimizer: torch.optim.Optimizer, installed: InstalledWeights, calibrated: Mapping[int, Calibration]
) -> ExchangedState:
    """Put the new parameters in the place of the old ones, with state that fits them; all of them, or none."""
    exchanged = ExchangedState(optimizer, [])
    try:
        for name, old in installed.before.items():
            if not holds(optimizer, old):
                if old.requires_grad:
                    raise InputError(
                        f"Grower: the optimizer does not hold {'.'.join(name)}; make it from model.parameters()"
                    )
                continue
            state, new = dict(optimizer.state.get(old, {})), installed.after[name]
            resized = _resized_state(state, name, installed, calibrated)
            exchanged.before.append((old, new, state))
            optimizer.state.pop(old, None)
            _swap(optimizer, old, new)
            if resized:
                optimizer.state[new] = resized
    except BaseException:
        exchanged.undo()
        raise
    return exchanged


def _swap(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]


def _resized_state(
    state: dict[str, Any], name: ParameterName, installed: InstalledWeights, calibrated: Mapping[int, Calibration]
) -> dict[str, Any]:
    tensors = {key: x for key, x in state.items() if isinstance(x, Tensor) and x.dim() > 0}
    if any(x.shape != installed.before[name].shape for x in tensors.values()):
        return {}  # factored state (Adafactor) has no rows to keep: the optimizer starts it anew
    slices = list(zip(head_slices(installed.widths), head_slices(installed.layer.key_widths), strict=True))
    for key, x in tensors.items():
        rows = x.new_zeros(installed.after[name].shape)
        for head, (source, target) in enumerate(slices):
            known = head in calibrated
            rows[target] = _head_rows(key, x[source], rows[target], calibrated[head], name) if known else x[source]
        state = {**state, key: rows}
    return state


def _head_rows(key: str, old: Tensor, new: Tensor, calibration: Calibration, name: ParameterName) -> Tensor:
    fresh = torch.zeros_like(new)
    if key in MEANS:
        fresh = _like(new, calibration.mean[name])
    elif key in SQUARES:
        fresh = _like(new, calibration.square[name])
        # a row without gradient yet (its partner is zero) takes the average of the old rows
        zero = (fresh.flatten(1).sum(1) if fresh.dim() > 1 else fresh) == 0
        fresh[zero] = old.mean()
        fresh /= calibration.pace**2
    if calibration.old_rows:
        stretch = calibration.stretch if name[0] == "query" else 1.0
        power = 2 if key in SQUARES else 1
        fresh[: calibration.old_rows] = old[: calibration.old_rows] / stretch**power
    return fresh


def _like(new: Tensor, rows: Tensor) -> Tensor:
    """`rows` in the dtype and shape of `new`; rows of W_q carry the bias in their last column, which a weight omits."""
    return (rows[:, : new.shape[1]] if new.dim() > 1 else rows).to(new, copy=True)
