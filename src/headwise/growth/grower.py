"""Grow the query/key width of a model's heads from inside the user's own training loop.

    grower = Grower(model, optimizer)
    for batch in data:
        loss = step(batch); loss.backward()
        grower.observe()
        optimizer.step(); optimizer.zero_grad()
    event = grower.grow(loss=lambda: step(held_out))

`observe` adds the finished backward pass to the statistics, `grow` solves for new dimensions (solve.py, refit.py),
searches the step on the held-out loss (search.py), and replaces parameters and optimizer state together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise.errors import InputError
from headwise.growth.choose import Key, choose, rank
from headwise.growth.gram_roots import root
from headwise.growth.growth_event import GrowthEvent, HeadChange, HeadScore
from headwise.growth.head_weights import factors, parameters
from headwise.growth.line_search import Found, Loss, install_all, measure, preserving, search, without_loss
from headwise.growth.optimizer_state import PACE, calibrate, exchange, holds
from headwise.growth.refit import refit
from headwise.growth.solve import (
    DAMPING,
    Factors,
    Problem,
    Solution,
    bottleneck,
    closed_form,
    fisher_form,
    metrics,
    predicted_change,
    score_change,
    shrink,
)
from headwise.growth.statistics import LayerStatistics
from headwise.growth.watch import Watch
from headwise.nn.multihead import MultiHead

SOLUTIONS: tuple[Solution, ...] = (closed_form, fisher_form, refit)

LEAST_GAIN = 0.01
"""Of the held-out loss: an automatic growth that brings less is not made."""


@final
class Grower:
    """Watches every MultiHead of `model` whose queries and keys learn.

    `rows`    query rows a sequence and batch whose scores are differentiated (drawn at random); None for all
    `memory`  bytes of tokens kept a layer for the refit and the Fisher metric; beyond them Gram matrices are clustered
    `pace`    how much faster than old directions new ones start, under optimizers with second moments (see state.py)
    `group`   the processes that train together; statistics are reduced over them, so that all grow alike
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rows: int | None = 32,
        memory: int = 1 << 26,
        folds: int = 4,
        pace: float = PACE,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer, self.group, self.pace = optimizer, group, pace
        if not pace > 0:
            raise InputError(f"Grower: pace must be above 0, but is {pace}; 1 is the pace of old directions")
        self._options: dict[str, Any] = {"rows": rows, "memory": memory, "folds": folds}
        self.layers = {
            name.removeprefix("_orig_mod."): module
            for name, module in self.model.named_modules()
            if isinstance(module, MultiHead) and module.query.weight.requires_grad and module.key.weight.requires_grad
        }
        if not self.layers:
            raise InputError(
                "Grower: the model has no MultiHead layer that learns; convert its attention with MultiHead.from_torch "
                "or headwise.growth.adopt first"
            )
        for name, layer in self.layers.items():
            for (part, kind), parameter in parameters(layer).items():
                if parameter.requires_grad and not holds(optimizer, parameter):
                    raise InputError(
                        f"Grower: the optimizer does not hold {name}.{part}.{kind}, so a grown one would never be "
                        "trained; make the optimizer from model.parameters(), or freeze the layer to leave it out"
                    )
        self._watches: dict[str, Watch] = {}
        try:
            for name, layer in self.layers.items():
                self._watches[name] = Watch(name, layer)
        except BaseException:
            self.close()
            raise
        self.statistics: dict[str, LayerStatistics] = {}
        self._reduced = False
        self.reset()

    def observe(self, scale: float = 1.0) -> None:
        """Add the backward pass that just finished to the statistics.

        `scale` is what the loss was multiplied by before backward, such as `scaler.get_scale()`.
        """
        calls = {name: watch.take() for name, watch in self._watches.items()}
        if not any(calls.values()):
            raise InputError(
                "observe: no backward pass has reached an attention layer since the last call; call observe() after "
                "loss.backward(), with a loss that depends on the model's output"
            )
        if self._reduced:
            self.reset()
        for name, done in calls.items():
            for call in done:
                LayerStatistics.check(call, name)
        for name, done in calls.items():
            for call in done:
                self.statistics[name].add(call, bias=self.layers[name].query.bias is not None, scale=scale)

    def scores(self) -> list[HeadScore]:
        """Every head's bottleneck, the highest first."""
        return rank(self._problems())

    def grow(
        self,
        p: int | Literal["auto"] = "auto",
        heads: Sequence[Key] | Literal["auto"] = "auto",
        *,
        loss: Loss | None = None,
        solutions: Sequence[Solution] = SOLUTIONS,
    ) -> GrowthEvent:
        """Widen `heads` by `p` dimensions each; "auto" lets the data decide both, and may decide for nothing.

        `loss` returns the loss on data held out from `observe`; it is called about ten times a solution, in evaluation
        mode and from one random state.  Without it the first solution is taken at a small trusted step.
        """
        problems = self._problems()
        plan = choose(problems, p, heads)
        if not plan:
            return GrowthEvent((), "no head has a direction that two halves of the data agree on")
        before = None if loss is None else measure(self.model, loss, self.group)
        chosen = {key: problems[key] for key in plan}
        if loss is None or before is None:
            found = without_loss(chosen, plan, solutions[0])
        else:
            found = search(self.model, self.layers, chosen, plan, solutions, loss, self.group)
            if heads == "auto" and found.loss > before - LEAST_GAIN * abs(before):
                gain = found.loss - before
                reason = f"the best step changes the held-out loss by {gain:+.2e}, less than 1 % of {before:.4g}"
                return GrowthEvent((), reason, loss_before=before, loss_after=before, tried=found.tried)
            if found.loss >= before and preserving_is_better(solutions):
                silent = search(self.model, self.layers, chosen, plan, (preserving,), loss, self.group)
                found = Found(silent.solution, silent.weights, 0.0, silent.loss, found.tried + silent.tried)
        return self._commit(chosen, found, before)

    def shrink(self, p: int, heads: Sequence[Key], *, loss: Loss | None = None) -> GrowthEvent:
        """Drop the p directions of each head whose removal changes its scores least."""
        problems = self._problems()
        missing = [key for key in heads if key not in problems]
        if missing:
            raise InputError(f"shrink: there is no head {missing[0]!r} with statistics; observe() a batch first")
        chosen = {key: problems[key] for key in heads}
        weights = {key: shrink(problem, p) for key, problem in chosen.items()}
        before = None if loss is None else measure(self.model, loss, self.group)
        tau = sum(score_change(chosen[key], w) ** 2 for key, w in weights.items()) ** 0.5
        found = Found("shrink", weights, tau, float("nan"), ())
        return self._commit(chosen, found, before, loss)

    def _commit(
        self, chosen: Mapping[Key, Problem], found: Found, before: float | None, loss: Loss | None = None
    ) -> GrowthEvent:
        """Install the weights, move the optimizer along, forget the statistics of the function that was."""
        weights = found.weights
        count = sum(p.numel() for p in self.model.parameters())
        changes = tuple(self._change(key, chosen[key], weights[key]) for key in weights)
        predicted = sum(predicted_change(chosen[key], weights[key]) for key in weights)
        calibrated = {key: calibrate(chosen[key], weights[key], self.pace) for key in weights}
        installed = install_all(self.layers, weights)
        self._broadcast(list(dict.fromkeys(layer for layer, _ in weights)))
        exchanged = []
        for one in installed:
            name = next(name for name, layer in self.layers.items() if layer is one.layer)
            heads = {head: c for (layer, head), c in calibrated.items() if layer == name}
            exchanged.append(exchange(self.optimizer, one, heads))
        after = found.loss
        if before is not None and loss is not None:
            after = measure(self.model, loss, self.group)

        def undo() -> None:
            for one in exchanged:
                one.undo()
            for one in installed:
                one.undo()
            self.reset()

        self.reset()
        self._retire_wrapper()
        return GrowthEvent(
            changes,
            "asked for" if found.solution == "shrink" else "the present width cannot give what the loss asks for",
            found.solution,
            found.tau,
            predicted,
            before,
            None if before is None else after,
            sum(p.numel() for p in self.model.parameters()) - count,
            found.tried,
            undo,
        )

    def _change(self, key: Key, problem: Problem, grown: Factors) -> HeadChange:
        q, k = metrics(problem)
        later = replace(problem, present=grown)
        scores = (bottleneck(x, problem.moment, q, k).score for x in (problem, later))
        return HeadChange(*key, problem.present.width, grown.width, *scores)

    def _problems(self) -> dict[Key, Problem]:
        """One problem a head with statistics, weights as they are now; the metric is shared by the heads of a layer."""
        if not self._reduced:
            for statistics in self.statistics.values():
                statistics.reduce(self.group)
            self._reduced = True
        problems: dict[Key, Problem] = {}
        for name, statistics in self.statistics.items():
            if statistics.weight == 0:
                continue
            gram_q, gram_k = statistics.means()
            roots = root(gram_q, DAMPING), root(gram_k, DAMPING)
            shares = statistics.shares
            # a fold that saw nothing stays zero, and has no weight
            folds = statistics.folds / shares.where(shares > 0, torch.ones_like(shares))[:, None, None, None]
            for head in range(self.layers[name].heads):
                present = factors(self.layers[name], head)
                problems[name, head] = Problem(
                    folds[:, head : head + 1],
                    shares,
                    present,
                    gram_q,
                    gram_k,
                    statistics.kept,
                    statistics.atoms,
                    statistics.biased,
                    roots,
                )
        if not problems:
            raise InputError(
                "grow: no statistics; call observe() after some backward passes of a loss that depends on the heads"
            )
        return problems

    def _broadcast(self, names: Sequence[str]) -> None:
        """Rank 0's weights everywhere: equal statistics give equal weights only on equal machines."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self.group) == 1:
            return
        for name in names:
            for parameter in parameters(self.layers[name]).values():
                dist.broadcast(parameter.data, 0, group=self.group)

    def _retire_wrapper(self) -> None:
        """A DistributedDataParallel made before growth does not know the new parameters: it must not be used again."""
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
            watch.passes.clear()

    def resume(self) -> None:
        for watch in self._watches.values():
            watch.paused = False

    def reset(self) -> None:
        """Forget all statistics."""
        self._reduced = False
        for name, layer in self.layers.items():
            weight = layer.query.weight
            self.statistics[name] = LayerStatistics(
                layer.heads,
                layer.width + (layer.query.bias is not None),
                layer.context_widths[0],
                dtype=weight.dtype,
                device=weight.device,
                **self._options,
            )

    def close(self) -> None:
        """Take every hook off the model."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()


def preserving_is_better(solutions: Sequence[Solution]) -> bool:
    """Whether the caller left the choice to us; a named baseline is installed whatever it does to the loss."""
    return tuple(solutions) == SOLUTIONS
