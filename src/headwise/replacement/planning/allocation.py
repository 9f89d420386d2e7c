"""Which operator for which head: a ladder of plans by decreasing cost.

    drift(x) = x^T G x      G = mean over kinds of G_k,   G_k = mean over texts and samples of x x^T / 2

x is 1 at the chosen candidate of each unit (the heads that share a key-value head) and 0 elsewhere, and G_k is from
`sensitivity`.  From exact attention downwards, the next plan is always the one change of one unit with the least
increase of drift for what it saves: the whole trade-off without running the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

COHERENT = 0.9
"""Factor on the products of different heads, below 1 because errors that cancel on a few texts may not on others."""


@final
@dataclass(frozen=True, eq=False)
class Allocation:
    """The index of the candidate of each unit, and what it costs relative to the model as it was."""

    chosen: tuple[int, ...]
    cost: float


@final
@dataclass(frozen=True, eq=False)
class DriftModel:
    """Predicted drift of plans, by kind of text.

    costs   (units, candidates), shares of the cost of all exact heads; candidate 0 is exact attention
    grams   {kind: (units * candidates, units * candidates)}
    """

    costs: Tensor
    grams: Mapping[str, Tensor]

    def predicted(self, plan: Allocation) -> dict[str, float]:
        """Predicted drift of each kind."""
        index = self._index(plan.chosen)
        return {kind: float(gram[index][:, index].sum()) for kind, gram in self.grams.items()}

    def ladder(self, without: str | None = None) -> list[Allocation]:
        """Plans by decreasing cost, from exact attention to the cheapest; chosen by all kinds but `without`."""
        kinds = [kind for kind in self.grams if kind != without] or list(self.grams)
        gram = torch.stack([self.grams[kind] for kind in kinds]).mean(0)
        units, candidates = self.costs.shape
        chosen, rows = torch.zeros(units, dtype=torch.long), torch.arange(units)
        alone = gram.diagonal().view(units, candidates)
        plans = [self._allocation(chosen.tolist())]
        while True:
            old = self._index(chosen)
            others = gram[:, old].sum(1).view(units, candidates)  # products with all chosen, the own one included
            own = gram.view(units, candidates, -1)[rows, :, old]
            increase = (
                alone
                - alone[rows, chosen, None]
                + 2 * (others - own - (others[rows, chosen] - alone[rows, chosen])[:, None])
            )
            saved = self.costs[rows, chosen, None] - self.costs
            # what reduces the predicted drift comes first, most saved first
            slope = torch.where(increase > 0, increase / saved, -saved).masked_fill(saved <= 1e-12, torch.inf)
            best = int(slope.argmin())
            if slope.flatten()[best] == torch.inf:
                return plans
            chosen[best // candidates] = best % candidates
            plans.append(self._allocation(chosen.tolist()))

    def _allocation(self, chosen: Sequence[int]) -> Allocation:
        return Allocation(tuple(chosen), float(self.costs[torch.arange(len(chosen)), list(chosen)].sum()))

    def _index(self, chosen: Sequence[int] | Tensor) -> Tensor:
        return torch.arange(len(chosen)) * self.costs.shape[1] + torch.as_tensor(chosen)


def gram_of(x: Tensor) -> Tensor:
    """x (units, candidates, samples) -> G (units * candidates, units * candidates)"""
    flat = x.flatten(0, 1).double()
    gram = COHERENT * (flat @ flat.mT) / (2 * flat.shape[1])
    gram.diagonal().div_(COHERENT)
    return gram
