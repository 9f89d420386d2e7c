"""A line search over solutions and steps: the held-out loss decides, not the prediction.

Steps are measured in nats: tau is how far a row of scores moves, so that the same steps suit every problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import HeadwiseError, InputError, NonFiniteError
from headwise.growth.bottleneck import HeadKey
from headwise.growth.layers.growing_layer import GrowingLayer
from headwise.growth.layers.head_weights import by_layer, install_all
from headwise.growth.problem import Factors, Problem
from headwise.growth.solve import Solution, WeightPath, named_solution
from headwise.growth.statistics import world_size
from headwise.models.run import as_it_was
from headwise.random_state import seeded

STEPS = tuple(0.1 * 2.0**i for i in range(9))
"""0.1 to 25.6 nats; stopped after two steps that are worse than the best."""

TRUST = 0.5
"""Nats moved when there is no loss to search with."""

Loss = Callable[[], Tensor | float]


@final
@dataclass(frozen=True, eq=False)
class SearchPoint:
    """Weights at one step of one solution, the held-out loss there, and all (solution, tau, loss) of the search."""

    solution: str
    weights: dict[HeadKey, Factors]
    tau: float
    loss: float
    tried: tuple[tuple[str, float, float], ...] = ()


def measure(model: nn.Module, loss: Loss, group: dist.ProcessGroup | None = None) -> float:
    """The held-out loss, averaged over processes: evaluation mode, no gradients, always the same random state.

    A loss that is not finite is infinite: worse than any other.
    """
    with as_it_was(model), torch.no_grad(), seeded(0):
        try:
            value = _number(loss())
        except NonFiniteError:  # our layers raise it
            value = math.nan
    if world_size(group) > 1:
        total = torch.tensor(value, dtype=torch.float64, device=next(model.parameters()).device)
        dist.all_reduce(total, group=group)
        value = float(total) / world_size(group)
    return value if math.isfinite(value) else math.inf


def _number(value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise InputError(f"grow: loss must return one real number, but returned a {type(value).__name__}{shape}")


def trusted_step(
    problems: Mapping[HeadKey, Problem], widths: Mapping[HeadKey, int], solution: str | Solution
) -> SearchPoint:
    """A solution at a small step, for when there is no loss to search with."""
    name, solve = named_solution(solution)
    paths, unit = _paths(problems, widths, solve)
    eta = TRUST / unit if unit else 1.0
    weights = {key: path.polished(eta) for key, path in paths.items()}
    return SearchPoint(name, weights, TRUST if unit else 0.0, math.nan)


def search(
    model: nn.Module,
    layers: Mapping[str, GrowingLayer],
    problems: Mapping[HeadKey, Problem],
    widths: Mapping[HeadKey, int],
    solutions: Sequence[str | Solution],
    loss: Loss,
    group: dist.ProcessGroup | None = None,
) -> SearchPoint:
    """The best step of all solutions that add `widths` dimensions; the model is restored in any case."""
    best: SearchPoint | None = None
    tried: list[tuple[str, float, float]] = []
    failure: HeadwiseError | None = None
    for solution in solutions:
        name, solve = named_solution(solution)
        try:
            paths, unit = _paths(problems, widths, solve)
        except HeadwiseError as error:  # a refit without sequences, the Fisher metric with a bias: others remain
            failure = error
            continue
        point = _best_point(layers, name, paths, unit, lambda: measure(model, loss, group), tried)
        best = point if best is None or point.loss < best.loss else best
    if best is None:
        assert failure is not None
        raise failure
    return replace(best, tried=tuple(tried))


def _paths(
    problems: Mapping[HeadKey, Problem], widths: Mapping[HeadKey, int], solution: Solution
) -> tuple[dict[HeadKey, WeightPath], float]:
    """One path per head, and how far all scores together move per unit of their common step."""
    paths = {key: solution(problems[key], p) for key, p in widths.items()}
    return paths, math.sqrt(sum(path.unit**2 for path in paths.values()))


def _best_point(
    layers: Mapping[str, GrowingLayer],
    name: str,
    paths: Mapping[HeadKey, WeightPath],
    unit: float,
    measured_loss: Callable[[], float],
    tried: list[tuple[str, float, float]],
) -> SearchPoint:
    """The best of: steps upwards until two are worse, two beside the best of them, and the best one polished."""

    def weights_at(tau: float, *, polish: bool = False) -> dict[HeadKey, Factors]:
        eta = tau / unit if unit else 1.0
        return {key: (path.polished if polish else path.at)(eta) for key, path in paths.items()}

    def point(tau: float, *, polish: bool = False) -> SearchPoint:
        weights = weights_at(tau, polish=polish)
        for layer, heads in by_layer(weights).items():
            installed[layer].write(heads)
        loss = measured_loss()
        tried.append((name, tau, loss))
        return SearchPoint(name, weights, tau, loss)

    def better(new: SearchPoint) -> SearchPoint:
        return new if new.loss < best.loss else best

    installed = install_all(layers, weights_at(STEPS[0]))
    try:
        if unit == 0:
            return point(0.0)
        best, worse = point(STEPS[0]), 0
        for tau in STEPS[1:]:
            before, best = best, better(point(tau))
            worse = worse + 1 if best is before else 0
            if worse == 2:
                break
        for tau in (best.tau * 2**-0.5, best.tau * 2**0.5):
            best = better(point(tau))
        if any(path.polished is not path.at for path in paths.values()):
            best = better(point(best.tau, polish=True))
        return best
    finally:
        for layer in installed.values():
            layer.undo()
