"""Train chosen operators further, to the heads' outputs as before: the first stage of LoLCATs (Zhang et al. 2024).

What an operator learned is written down, so that an interrupted run goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.replacement.choice import Choice
from headwise.replacement.planning.capture import Site, capture, in_portions
from headwise.replacement.planning.fit import errors, fit
from headwise.replacement.planning.saved_progress import Memory

Fitted = Mapping[tuple[str, Choice], dict[str, Tensor]]


def transfer(
    model: nn.Module,
    batches: Sequence[Any],
    sites: Mapping[str, Site],
    fitted: Fitted,
    wanted: Iterable[tuple[str, Choice]],
    *,
    length: int,
    steps: int,
    seed: int,
    memory: Memory,
    budget: int,
    say: Callable[[str, int, int], None],
) -> dict[tuple[str, Choice], dict[str, Tensor]]:
    """What `wanted` learned in so many steps on these batches, each beginning with what is in `fitted`."""
    todo = sorted(set(wanted), key=str)
    found: dict[tuple[str, Choice], dict[str, Tensor]] = {}
    touched = {site: sites[site] for site, _ in todo}
    for portion in in_portions(touched, len(batches), budget):
        samples = None
        for site, choice in (pair for pair in todo if pair[0] in portion):
            name = f"{site}|{choice}|{steps} more"
            known = memory.fitted(name)
            if known is None:
                samples = samples or capture(model, batches, portion)
                own = fit(
                    choice,
                    samples[site],
                    length=length,
                    steps=steps,
                    generator=torch.Generator().manual_seed(seed),
                    start=fitted[site, choice],
                )
                known = {choice: (own, errors(choice, samples[site], own))}
                memory.keep_fitted(name, known)
            found[site, choice] = known[choice][0]
            say("training the chosen operators further", len(found), len(todo))
    return found
