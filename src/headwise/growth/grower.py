"""Grow the query/key width of a model's heads from inside the user's own training loop.

    grower = Grower(model, optimizer)
    for batch in data:
        loss = step(batch); loss.backward()
        grower.observe()
        optimizer.step(); optimizer.zero_grad()
    event = grower.grow(loss=lambda: step(held_out))

`observe` adds the finished backward pass to the statistics, `grow` solves for new dimensions (solve.py), searches the
step on the held-out loss (line_search.py), and replaces parameters and optimizer state together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from headwise.errors import InputError, NonFiniteError, UnsupportedError
from headwise.growth.bottleneck import HeadKey, bottleneck, choose, rank
from headwise.growth.growth_event import GrowthEvent, HeadGrowth, HeadScore
from headwise.growth.layers.growable import check_unsharded, growing_layers, register_parameters
from headwise.growth.layers.growing_layer import GrowingLayer, PassWatch
from headwise.growth.layers.head_weights import by_layer, install_all
from headwise.growth.layers.transformers_layer import TransformersLayer
from headwise.growth.line_search import Loss, SearchPoint, measure, search, trusted_step
from headwise.growth.metric import DAMPING, METRICS, root, roots
from headwise.growth.optimizer_state import PACE, ExchangedState, calibrate, exchange
from headwise.growth.problem import Factors, Problem
from headwise.growth.solve import Solution, narrowed, predicted_change, preserving, score_change
from headwise.growth.statistics import LayerStatistics, world_size
from headwise.shapes import shown

LEAST_GAIN = 0.01
"""Share of the held-out loss: an automatic growth that gains less is not made."""


@final
class Grower:
    """Watches the attention of `model`, and widens heads where their query/key width limits the loss.

    Layers that can grow are every trainable `MultiHead`, and in a model of transformers every attention module that
    calls its attention interface (models/widths); heads that share keys grow together, and are named by their key head.

    `optimizer`  the one, or all, that the model is trained with; each parameter is in one of them
    `averages`   torch.optim.swa_utils.AveragedModel copies of the model, which grow with it
    `probe`      a batch on which attention modules of transformers are found, if inputs are neither ids nor images
    `rows`       query rows per sequence and batch whose scores are differentiated (drawn at random); None for all
    `memory`     bytes of tokens stored per layer for refit and Fisher metric; Gram matrices beyond are clustered
    `pace`       how much faster than old directions new ones start, under optimizers such as Adam (optimizer_state.py)
    `group`      the processes that train together; statistics are reduced over them, so that all grow the same weights
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        averages: Sequence[AveragedModel] = (),
        probe: dict[str, Any] | None = None,
        rows: int | None = 32,
        memory: int = 1 << 26,
        folds: int = 4,
        pace: float = PACE,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        if not given or not all(hasattr(each, "param_groups") for each in given):
            raise InputError(
                f"Grower: optimizer must be an optimizer of torch or a list of them, but is {shown(optimizer)}"
            )
        self.optimizers = tuple(given)
        self.group, self.pace = group, pace
        if not pace > 0:
            raise InputError(f"Grower: pace must be above 0, but is {pace}; 1 is the pace of old directions")
        self._options: dict[str, Any] = {"rows": rows, "memory": memory, "folds": folds}
        check_unsharded(self.model)
        self.layers = growing_layers(self.model, probe)
        self.averages = [growing_layers(copy.module, probe) for copy in averages]
        for name, layer in self.layers.items():
            register_parameters(name, layer, self.optimizers)
        self._watches: dict[str, PassWatch] = {}
        try:
            for name, layer in self.layers.items():
                self._watches[name] = layer.watch(name)
        except BaseException:
            self.close()
            raise
        self.statistics: dict[str, LayerStatistics] = {}
        self._reduced = False
        self.reset()

    def observe(self, scale: float = 1.0) -> None:
        """Add the backward pass that just finished to the statistics.

        `scale` is the factor that the loss was multiplied by before backward, such as `scaler.get_scale()`.
        """
        passes = [(name, observed) for name, watch in self._watches.items() for observed in watch.take()]
        if not passes:
            raise InputError(
                "observe: no backward pass has reached an attention layer since the last call; call observe() after "
                "loss.backward(), with a loss that depends on the model's output"
            )
        if not 0 < scale < math.inf:
            raise InputError(f"observe: scale must be a positive number, but is {scale}; nothing was added")
        if self._reduced:
            self.reset()
        for name, observed in passes:
            LayerStatistics.check(observed, name)  # all are checked before any is added
        for name, observed in passes:
            self.statistics[name].add(observed, bias=self.layers[name].bias, scale=scale)

    def scores(self, metric: str = "gram") -> list[HeadScore]:
        """Every head's bottleneck in a registered metric, the highest first."""
        return rank(self._problems(), metric)

    def grow(
        self,
        p: int | Literal["auto"] = "auto",
        heads: Sequence[HeadKey] | Literal["auto"] = "auto",
        *,
        loss: Loss | None = None,
        metric: str = "gram",
        solutions: Sequence[str | Solution] | None = None,
    ) -> GrowthEvent:
        """Widen `heads` by `p` dimensions each; "auto" chooses both from the data, and may choose to change nothing.

        `loss` returns the loss on data held out from `observe`; it is called about ten times per solution, in
        evaluation mode and from one random state.  Without it the first solution is taken at a small trusted step.
        `metric` is the registered metric in which heads and dimensions are chosen.  `solutions` are tried in turn, by
        name or as functions: by default the closed form in every registered metric; "refit" computes all weights anew.
        """
        problems = self._problems()
        widths = choose(problems, p, heads, metric)
        if not widths:
            return GrowthEvent((), "no head has a direction that two halves of the data agree on")
        chosen = {key: problems[key] for key in widths}
        requested = list(METRICS) if solutions is None else solutions
        if loss is None:
            return self._commit(chosen, trusted_step(chosen, widths, requested[0]), None)
        before = self._measured(loss, "before growth")
        best = search(self.model, self.layers, chosen, widths, requested, loss, self.group)
        if heads == "auto" and best.loss > before - LEAST_GAIN * abs(before):
            gain = best.loss - before
            reason = f"the best step changes the held-out loss by {gain:+.2e}, less than 1 % of {before:.4g}"
            if not math.isfinite(best.loss):
                reason = "the held-out loss is not finite at any step"
            return GrowthEvent((), reason, loss_before=before, loss_after=before, tried=best.tried)
        if best.loss >= before and solutions is None:  # solutions given by the caller are installed in any case
            silent = search(self.model, self.layers, chosen, widths, (preserving,), loss, self.group)
            best = replace(silent, tau=0.0, tried=best.tried + silent.tried)
        if not math.isfinite(best.loss):
            raise NonFiniteError(
                f"grow: the held-out loss is {before:.4g} and not finite at any step of "
                f"{', '.join(dict.fromkeys(name for name, _, _ in best.tried))}; nothing was changed"
            )
        return self._commit(chosen, best, before)

    def shrink(self, p: int, heads: Sequence[HeadKey], *, loss: Loss | None = None) -> GrowthEvent:
        """Drop the p directions of each head whose removal changes its scores least; heads of MultiHead layers only."""
        foreign = next((name for name, _ in heads if isinstance(self.layers.get(name), TransformersLayer)), None)
        if foreign is not None:
            raise UnsupportedError(
                f"shrink: {foreign} is a module of transformers; use headwise.shrink(model, batches)"
            )
        problems = self._problems()
        for key in heads:
            if key not in problems:
                raise InputError(f"shrink: there is no head {key!r} with statistics; observe() a batch first")
        chosen = {key: problems[key] for key in heads}
        weights = {key: narrowed(problem, p) for key, problem in chosen.items()}
        before = None if loss is None else self._measured(loss, "before shrinking")
        return self._commit(chosen, SearchPoint("shrink", weights, math.nan, math.nan), before, loss)

    def _measured(self, loss: Loss, when: str) -> float:
        """The held-out loss; NonFiniteError if no comparison with it means anything."""
        value = measure(self.model, loss, self.group)
        if not math.isfinite(value):
            raise NonFiniteError(
                f"Grower: the held-out loss is not finite {when}, so nothing was changed; check the weights, and that "
                "the held-out data are not empty"
            )
        return value

    def _commit(
        self, chosen: Mapping[HeadKey, Problem], point: SearchPoint, before: float | None, loss: Loss | None = None
    ) -> GrowthEvent:
        """Install the weights, exchange the optimizer's state, reset the statistics; nothing at all on an error."""
        weights = point.weights
        for (layer, head), new in weights.items():
            if not bool(new.wq.isfinite().all() and new.wk.isfinite().all()):
                raise NonFiniteError(
                    f"Grower: {point.solution} has non-finite weights for head {head} of {layer}; nothing was changed"
                )
        count = sum(p.numel() for p in self.model.parameters())
        changes = tuple(_head_growth(key, chosen[key], weights[key]) for key in weights)
        predicted = sum(predicted_change(chosen[key], weights[key]) for key in weights)
        moved = math.sqrt(sum(score_change(chosen[key], weights[key]) ** 2 for key in weights))
        calibrated = by_layer(
            {key: calibrate(self.layers[key[0]], chosen[key], weights[key], self.pace) for key in weights}
        )
        for name, layer in ((name, copy[name]) for copy in self.averages for name in by_layer(weights)):
            layer.scaling = self.layers[name].scaling
        averaged = [install_all(copy, _averaged(copy, chosen, weights)) for copy in self.averages]
        installed = install_all(self.layers, weights)
        exchanged: list[ExchangedState] = []

        def restore() -> None:
            for one in (*exchanged, *installed.values(), *(x for copy in averaged for x in copy.values())):
                one.undo()

        def undo() -> None:
            restore()
            self.reset()

        try:
            self._broadcast(list(installed))
            for name, one in installed.items():
                exchanged.append(exchange(self.optimizers, one, calibrated[name]))
            after = point.loss if loss is None else self._measured(loss, "after shrinking")
        except BaseException:
            restore()
            raise
        self.reset()
        self._retire_wrapper()
        return GrowthEvent(
            changes,
            "requested" if point.solution == "shrink" else "the present width limits the loss",
            point.solution,
            moved,
            predicted,
            before,
            None if before is None else after,
            sum(p.numel() for p in self.model.parameters()) - count,
            point.tried,
            undo,
        )

    def _problems(self) -> dict[HeadKey, Problem]:
        """One problem per head with statistics and its present weights; heads of a layer share their metric."""
        if not self._reduced:
            for statistics in self.statistics.values():
                statistics.reduce(self.group)
            self._reduced = True
        problems: dict[HeadKey, Problem] = {}
        for name, statistics in self.statistics.items():
            if statistics.weight == 0:
                continue
            gram_q, gram_k = statistics.means()
            if not bool(gram_q.isfinite().all() and gram_k.isfinite().all() and statistics.folds.isfinite().all()):
                raise NonFiniteError(
                    f"Grower: the statistics of {name} overflowed, so nothing was changed; call reset() and observe "
                    "batches whose activations and gradients are smaller"
                )
            layer_roots = root(gram_q, DAMPING), root(gram_k, DAMPING)
            shares = statistics.shares
            # a fold without data stays zero, and has no weight
            folds = statistics.folds / shares.where(shares > 0, torch.ones_like(shares))[:, None, None, None]
            layer = self.layers[name]
            for head, present in enumerate(layer.factors(statistics)):
                problems[name, head] = Problem(
                    folds[:, head * layer.group : (head + 1) * layer.group],
                    shares,
                    present,
                    gram_q,
                    gram_k,
                    statistics.stored,
                    statistics.clusters,
                    statistics.biased or statistics.own is not None,
                    layer_roots,
                )
        if not problems:
            raise InputError(
                "grow: no statistics; call observe() after some backward passes of a loss that depends on the heads"
            )
        return problems

    def _broadcast(self, names: Sequence[str]) -> None:
        """Rank 0's weights everywhere: equal statistics give equal weights only on equal machines."""
        if world_size(self.group) > 1:
            for parameter in (x for name in names for x in self.layers[name].parameters().values()):
                dist.broadcast(parameter.data, 0, group=self.group)

    def _retire_wrapper(self) -> None:
        """Make a DistributedDataParallel made before growth, which does not know the new parameters, refuse to run."""
        wrapper, self.wrapper = self.wrapper, None
        if wrapper is not None:

            def refuse(*_: Any) -> None:
                raise InputError(
                    "Grower: this DistributedDataParallel was made before the model grew and would not average the new "
                    "gradients; wrap the model again: model = DistributedDataParallel(model.module)"
                )

            wrapper.register_forward_pre_hook(refuse)

    def pause(self) -> None:
        """Watch nothing until `resume`: forward passes keep no reference to their tensors."""
        for watch in self._watches.values():
            watch.paused = True
            watch.forget()

    def resume(self) -> None:
        for watch in self._watches.values():
            watch.paused = False

    def reset(self) -> None:
        """Forget all statistics."""
        self._reduced = False
        for name, layer in self.layers.items():
            self.statistics[name] = layer.statistics(**self._options)

    def close(self) -> None:
        """Remove every hook from the model."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()


def _averaged(
    layers: Mapping[str, GrowingLayer], chosen: Mapping[HeadKey, Problem], weights: Mapping[HeadKey, Factors]
) -> dict[HeadKey, Factors]:
    """The weights for an average of the model: its own old directions where the model keeps its own, and new ones."""
    new = {}
    for (name, head), grown in weights.items():
        present = chosen[name, head].present
        k = present.width
        if torch.equal(grown.wk[:, :k], present.wk.double()):
            own = layers[name].own_factors(head, present)
            grown = own.beside(Factors(grown.wq[..., k:], grown.wk[:, k:]))
        new[name, head] = grown
    return new


def _head_growth(key: HeadKey, problem: Problem, grown: Factors) -> HeadGrowth:
    q, k = roots(problem)
    before, after = (bottleneck(x, problem.descent, q, k).score for x in (problem, replace(problem, present=grown)))
    return HeadGrowth(*key, problem.present.width, grown.width, before, after)
