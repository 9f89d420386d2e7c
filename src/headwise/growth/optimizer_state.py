"""Optimizer state after a head has changed its width: old directions keep theirs, new ones start from calibration.

torch's names: exp_avg is the running mean m of the gradient, exp_avg_sq the running mean v of its square.  A query row
multiplied by a has its gradient divided by a, so m -> m / a and v -> v / a^2.  For new rows

    m = mean gradient,   v = m^2 + (batches a fold) * variance of the gradient between folds

is what the running means would hold had the rows been there.  They have further to go than rows that have been
trained, so v is divided by pace^2: new rows start `pace` times as fast, and slow down as v forgets how it began.
Zeros under an old step counter are faster still, by as much as (1 - beta_1) / sqrt(1 - beta_2) = 3.2 learning rates at
once in an old optimizer and less in a young one; a rebuilt optimizer forgets the rest.
The optimizer, its groups, its schedulers and the Parameters stay; only the tensors of its state are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.growth.layers.growing_layer import GrowingLayer, ParameterName
from headwise.growth.layers.head_weights import InstalledWeights
from headwise.growth.problem import Factors, Problem

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
MEANS = ("exp_avg", "momentum_buffer", "grad_avg")

PACE = 3.0
"""Measured on one layer (docs/explanation/growth.md): not worse than 1 at learning rates of 1e-3, 3e-3 and 1e-2, and
better at the first two; zeros are better still at those and worse at the last."""


@final
@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean and mean square of a batch's gradient, as rows of each parameter of one key head."""

    mean: dict[ParameterName, Tensor]
    square: dict[ParameterName, Tensor]
    old: dict[ParameterName, Tensor]  # boolean: which of the rows are the old ones, in their old order
    stretch: float  # factor by which the old query rows were multiplied
    pace: float


def calibrate(layer: GrowingLayer, problem: Problem, grown: Factors, pace: float = PACE) -> Calibration:
    """From M on each fold: dL/dW_q = -M W_k, dL/dW_k = -sum_g M^T W_q, brought to the layer's own scale."""
    k, width = problem.present.width, grown.width
    nonempty = problem.shares > 0
    m, shares = problem.folds[nonempty].double(), problem.shares[nonempty].double()
    unit = layer.unit(width)
    mean_q, square_q = _mean_and_square(-(m @ grown.wk) / unit, shares)  # (g, d_q, k')
    mean_k, square_k = _mean_and_square(-(m.mT @ grown.wq).sum(1), shares)  # (d_k, k')
    same = width >= k and torch.equal(grown.wk[:, :k], problem.present.wk.double())
    same = same and torch.equal(grown.wq[..., :k], problem.present.wq.double())
    names = layer.parameters()
    # after a refit or a shrinking all directions are mixed anew, and none of them is younger than the others
    is_old = (torch.arange(width, device=m.device) < (k if same else 0)).to(mean_k)
    rows = {name: layer.rows(is_old.expand_as(mean_q), is_old.expand_as(mean_k), name) for name in names}
    if ("key", "bias") in rows:
        rows["key", "bias"] = is_old
    return Calibration(
        {name: layer.rows(mean_q, mean_k, name) for name in names},
        {name: layer.rows(square_q, square_k, name) for name in names},
        {name: (x if x.dim() == 1 else x[:, 0]) > 0 for name, x in rows.items()},
        unit / layer.unit(k),
        pace if same else 1.0,
    )


def _mean_and_square(g: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Over folds (f, …, d, k'); few folds say little about one entry: half of the square is its direction's average."""
    weights = (shares / shares.sum()).reshape(-1, *(1,) * (g.dim() - 1))
    mean = (weights * g).sum(0)
    spread = (weights * (g - mean).square()).sum(0)
    noise = spread * (len(g) / max(1, len(g) - 1)) * shares.mean()
    square = mean.square() + noise
    return mean, (square + square.mean(-2, keepdim=True)) / 2


def holders(optimizers: Sequence[torch.optim.Optimizer], parameter: nn.Parameter) -> list[torch.optim.Optimizer]:
    """The optimizers that hold a parameter."""
    return [o for o in optimizers if any(parameter is p for group in o.param_groups for p in group["params"])]


@final
@dataclass(frozen=True, eq=False)
class ExchangedState:
    """The state of parameters before it was resized."""

    before: list[tuple[torch.optim.Optimizer, nn.Parameter, dict[str, Any]]]

    def undo(self) -> None:
        for optimizer, parameter, state in self.before:
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state


def exchange(
    optimizers: Sequence[torch.optim.Optimizer], installed: InstalledWeights, calibrated: Mapping[int, Calibration]
) -> ExchangedState:
    """Resize the state of every parameter of a layer whose weights were installed; of all of them, or of none."""
    exchanged = ExchangedState([])
    try:
        for name, parameter in installed.layer.parameters().items():
            for optimizer in holders(optimizers, parameter):
                state = dict(optimizer.state.get(parameter, {}))
                known = state or _state_like_others(optimizer, parameter, installed.before[name])
                resized = _resized_state(known, name, parameter, installed, calibrated)
                exchanged.before.append((optimizer, parameter, state))
                optimizer.state.pop(parameter, None)
                if resized:
                    optimizer.state[parameter] = resized
    except BaseException:
        exchanged.undo()
        raise
    return exchanged


def _state_like_others(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, old: Tensor) -> dict[str, Any]:
    """State for a parameter without rows until now: entries and step counter as others of its group have."""
    group = next(g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
    other = next((p for p in group["params"] if optimizer.state.get(p)), None)
    if old.numel() or other is None:
        return {}
    entries = optimizer.state[other].items()
    return {
        key: x if not isinstance(x, Tensor) else x.clone() if x.dim() == 0 else x.new_zeros(old.shape)
        for key, x in entries
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape == other.shape
    }


def _resized_state(
    state: dict[str, Any],
    name: ParameterName,
    parameter: nn.Parameter,
    installed: InstalledWeights,
    calibrated: Mapping[int, Calibration],
) -> dict[str, Any]:
    tensors = {key: x for key, x in state.items() if isinstance(x, Tensor) and x.dim() > 0}
    if any(x.shape != installed.before[name].shape for x in tensors.values()):
        return {}  # factored state (Adafactor) has no rows to keep: the optimizer starts it anew
    layer = installed.layer
    slices = list(zip(layer.slices(name, installed.widths), layer.slices(name, layer.key_widths), strict=True))
    for key, x in tensors.items():
        rows = x.new_zeros(parameter.shape)
        for head, (source, target) in enumerate(slices):
            known = head in calibrated
            rows[target] = _head_rows(key, x[source], rows[target], calibrated[head], name) if known else x[source]
        state = {**state, key: rows}
    return state


def _head_rows(key: str, old: Tensor, new: Tensor, calibration: Calibration, name: ParameterName) -> Tensor:
    fresh = torch.zeros_like(new)
    if key in MEANS:
        fresh = calibration.mean[name].to(new, copy=True)
    elif key in SQUARES:
        fresh = calibration.square[name].to(new, copy=True)
        # a row without gradient yet (its partner is zero) takes the average of the old rows
        zero = (fresh.flatten(1).sum(1) if fresh.dim() > 1 else fresh) == 0
        fresh[zero] = old.mean() if old.numel() else 0.0
        fresh /= calibration.pace**2
    kept = calibration.old[name]
    if bool(kept.any()):
        stretch = calibration.stretch if name[0] == "query" else 1.0
        power = 2 if key in SQUARES else 1
        fresh[kept] = old / stretch**power
    return fresh
