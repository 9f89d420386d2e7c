"""A line search over solutions and steps: the held-out loss decides, not the prediction.

Steps are measured in nats: tau is how far a row of scores moves, so that one ladder suits every problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.growth.choose import Key
from headwise.growth.gram_roots import root
from headwise.growth.head_weights import Installed, install, write
from headwise.growth.solve import Factors, Path, Problem, Solution, bottleneck, metrics, room
from headwise.nn.multihead import MultiHead

LADDER = tuple(0.1 * 2.0**i for i in range(9))
"""0.1 to 25.6 nats; stopped after two steps that are worse than the best."""

TRUST = 0.5
"""Nats moved when there is no loss to search with."""

Loss = Callable[[], Tensor | float]
Held = Sequence[Installed]


@final
@dataclass(frozen=True, eq=False)
class Found:
    """The best point of the search."""

    solution: str
    weights: dict[Key, Factors]
    tau: float
    loss: float
    tried: tuple[tuple[str, float, float], ...]


def measure(model: nn.Module, loss: Loss, group: dist.ProcessGroup | None = None) -> float:
    """The held-out loss: in evaluation mode, without gradients, from the same random state at every call, all ranks."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            value = float(loss())
    finally:
        for module, training in modes:
            module.training = training
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        device = next(model.parameters()).device
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        value = float(total) / dist.get_world_size(group)
    return value if math.isfinite(value) else math.inf


def preserving(problem: Problem, p: int) -> Path:
    """W_k = 0 and W_q the directions of the closed form, as long as the present ones: the function does not change.

    The gradient of the new keys is the largest that queries of this length allow in the data's metric.
    """
    room(problem, p)
    found = bottleneck(problem, problem.moment, *metrics(problem))
    u = torch.linalg.svd(found.residual, full_matrices=False)[0][:, :p]
    g, dq, _ = problem.present.wq.shape
    wq, wk = problem.present.wq.double(), problem.present.wk.double()
    q = root(problem.gram_q)
    length = (q.root @ wq).square().sum((0, 1)).mean().sqrt()
    new = Factors(found.left @ u.reshape(g, dq, p) * length, wk.new_zeros(len(wk), p))
    grown = Factors(wq, wk).beside(new)
    return Path(lambda eta: grown, lambda eta: grown, 0.0)


def paths(
    problems: Mapping[Key, Problem], plan: Mapping[Key, int], solution: Solution
) -> tuple[dict[Key, Path], float]:
    """One path a head, and how far all scores together move per unit of their common step."""
    found = {key: solution(problems[key], p) for key, p in plan.items()}
    return found, math.sqrt(sum(path.unit**2 for path in found.values()))


def without_loss(problems: Mapping[Key, Problem], plan: Mapping[Key, int], solution: Solution) -> Found:
    """The first solution at the trusted step."""
    found, unit = paths(problems, plan, solution)
    eta = TRUST / unit if unit else 1.0
    weights = {key: path.polished(eta) for key, path in found.items()}
    return Found(_name(solution), weights, TRUST if unit else 0.0, math.nan, ())


def search(
    model: nn.Module,
    layers: Mapping[str, MultiHead],
    problems: Mapping[Key, Problem],
    plan: Mapping[Key, int],
    solutions: Sequence[Solution],
    loss: Loss,
    group: dist.ProcessGroup | None = None,
) -> Found:
    """Every solution along its ladder; the model is as before when this returns or raises."""
    best: Found | None = None
    tried: list[tuple[str, float, float]] = []
    complaint: HeadwiseError | None = None
    for solution in solutions:
        name = _name(solution)
        try:
            found, unit = paths(problems, plan, solution)
        except HeadwiseError as error:  # a refit without sequences, the Fisher metric with a bias: others remain
            complaint = error
            continue
        first = {key: path.at(LADDER[0] / unit if unit else 1.0) for key, path in found.items()}
        installed = install_all(layers, first)
        try:

            def at(tau: float, weights: dict[Key, Factors], name: str = name, now: Held = installed) -> Found:
                write_all(now, weights)
                value = measure(model, loss, group)
                tried.append((name, tau, value))
                return Found(name, weights, tau, value, ())

            if unit == 0:
                point = at(0.0, first)
            else:
                point = _ladder(lambda tau, f=found, u=unit: {k: x.at(tau / u) for k, x in f.items()}, at)
                if any(path.polished is not path.at for path in found.values()):
                    polished = at(point.tau, {k: x.polished(point.tau / unit) for k, x in found.items()})
                    point = min(point, polished, key=lambda x: x.loss)
        finally:
            for one in installed:
                one.undo()
        if best is None or point.loss < best.loss:
            best = point
    if best is None:
        assert complaint is not None
        raise complaint
    return Found(best.solution, best.weights, best.tau, best.loss, tuple(tried))


def _ladder(weights: Callable[[float], dict[Key, Factors]], at: Callable[..., Found]) -> Found:
    best: Found | None = None
    worse = 0
    for tau in LADDER:
        point = at(tau, weights(tau))
        if best is None or point.loss < best.loss:
            best, worse = point, 0
        else:
            worse += 1
            if worse == 2:
                break
    assert best is not None
    middle = best.tau
    for tau in (middle * 2**-0.5, middle * 2**0.5):
        point = at(tau, weights(tau))
        best = point if point.loss < best.loss else best
    return best


def install_all(layers: Mapping[str, MultiHead], weights: Mapping[Key, Factors]) -> list[Installed]:
    """Layer by layer; all or none."""
    done: list[Installed] = []
    try:
        for name in dict.fromkeys(layer for layer, _ in weights):
            done.append(install(layers[name], {head: w for (layer, head), w in weights.items() if layer == name}))
    except BaseException:
        for one in done:
            one.undo()
        raise
    return done


def write_all(installed: Sequence[Installed], weights: Mapping[Key, Factors]) -> None:
    names = list(dict.fromkeys(layer for layer, _ in weights))
    for name, one in zip(names, installed, strict=True):
        write(one, {head: w for (layer, head), w in weights.items() if layer == name})


def _name(solution: Solution) -> str:
    return getattr(solution, "__name__", type(solution).__name__)
