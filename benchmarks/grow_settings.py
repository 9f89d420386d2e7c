"""Growth beside random and zero-initialised growth, in nine settings of training and ten seeds.

    python -m benchmarks.grow_settings --into FILE [--seeds 10] [--only NAME] [--unlimited]

The task is to look up values by 128 keys; a setting says how wide heads are, how the model is trained and which heads
are widened.  Every method continues the same trained model with the same data, and new directions start at the same
pace (`optimizer_state`).  Printed are the validation loss right after growth and after 50 and 200 more steps, and the
paired difference from zero-initialised growth, with 95 % intervals of Student's t over seeds.  Finished seeds are kept
in FILE: an interrupted run goes on where it was.  With --unlimited new directions may also start at any length.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.grow import CALIBRATION, held_out, validation
from benchmarks.grow_baselines import random_both, random_queries
from benchmarks.grow_rows import Rows
from headwise.growth import Grower, closed_form
from headwise.growth.demo import Reader, lookup

ZERO, GROWN = "random queries, zero keys", "growth (the default)"
METHODS: dict[str, Any] = {"random": (random_both,), ZERO: (random_queries,), GROWN: None}
UNLIMITED = {
    **METHODS,
    "growth, any length": tuple(partial(closed_form, metric=metric, longest=math.inf) for metric in ("gram", "fisher")),
}
STEPS, LATER, BATCH = 400, (50, 200), 32


@dataclass(frozen=True)
class Setting:
    """Key widths of each head, dimensions added, and how the model is trained; `heads` are widened (default: all)."""

    widths: int | tuple[int, ...]
    p: int
    layers: int = 2
    rate: float = 3e-3
    sgd: bool = False
    careful: bool = False  # clipped gradients, a cosine schedule, weight decay
    heads: tuple[tuple[int, int], ...] = field(default=((0, 0), (0, 1), (1, 0), (1, 1)))


ALL = {
    "k 1 to 2": Setting(1, 1),
    "k 2 to 4": Setting(2, 2),
    "k 4 to 8": Setting(4, 4),
    "k 1 to 2, one layer": Setting(1, 1, layers=1, heads=((0, 0), (0, 1))),
    "k 1 to 2, rate 0.001": Setting(1, 1, rate=1e-3),
    "k 1 to 2, rate 0.01": Setting(1, 1, rate=1e-2),
    "k 2 to 4, SGD with momentum": Setting(2, 2, rate=0.1, sgd=True),
    "k 1 to 2 in one head, 2 in the other": Setting((1, 2), 1, heads=((0, 0), (1, 0))),
    "k 1 to 2, clipping, schedule, decay": Setting(1, 1, careful=True),
}
TASK = lookup(keys=128)


@dataclass
class Run:
    """A model in training: everything that a copy must continue with."""

    setting: Setting
    model: Reader
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR

    def train(self, draws: torch.Generator, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model.loss(*TASK.draw(BATCH, draws)).backward()
            if self.setting.careful:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()


def started(setting: Setting, seed: int) -> Run:
    torch.manual_seed(seed)
    model = Reader(TASK, layers=setting.layers, key_width=setting.widths)
    if setting.sgd:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), setting.rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), setting.rate, weight_decay=0.1 if setting.careful else 0.01)
    total = STEPS + LATER[-1]
    cosine = LambdaLR(optimizer, lambda t: 0.5 + 0.5 * math.cos(math.pi * t / total) if setting.careful else 1.0)
    return Run(setting, model, optimizer, cosine)


def grown(run: Run, seed: int, solutions: Sequence[Any] | None) -> None:
    """Observe, then widen the heads of the setting."""
    torch.manual_seed(seed)
    grower, draws = Grower(run.model, run.optimizer), torch.Generator().manual_seed(1000 + seed)
    for _ in range(CALIBRATION):
        run.optimizer.zero_grad()
        run.model.loss(*TASK.draw(BATCH, draws)).backward()
        grower.observe()
    heads = [(f"blocks.{layer}.attend", head) for layer, head in run.setting.heads]
    grower.grow(run.setting.p, heads, loss=held_out(run.model, TASK, seed), solutions=solutions)
    grower.close()


def compare(
    name: str, setting: Setting, seeds: Sequence[int], file: Path | None, methods: dict[str, Any] = METHODS
) -> None:
    rows = Rows(file, name if methods is METHODS else f"{name}, unlimited")
    for seed in seeds:
        if rows.has(seed):
            continue
        base = started(setting, seed)
        base.train(torch.Generator().manual_seed(seed), STEPS)
        for method, solutions in methods.items():
            run = copy.deepcopy(base)
            grown(run, seed, solutions)
            losses, draws, done = [validation(run.model, TASK)], torch.Generator().manual_seed(3000 + seed), 0
            for steps in LATER:
                run.train(draws, steps - done)
                done = steps
                losses.append(validation(run.model, TASK))
            rows.add(method, seed, losses)
        rows.save()
    print(f"\n{name}: validation loss after growth, +50, +200 | less {ZERO}")
    rows.print(against=ZERO)
    better = sum(a < b for a, b in zip(rows.column(GROWN, 2), rows.column(ZERO, 2), strict=True))
    print(f"  growth is lower than zero keys at +200 in {better} of {len(rows.column(GROWN, 2))} seeds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=ALL, default=None)
    parser.add_argument("--unlimited", action="store_true", help="new directions of any length beside the default")
    parser.add_argument("--into", type=Path, default=None, metavar="FILE", help="keep finished seeds in FILE")
    options = parser.parse_args()
    for name, setting in ALL.items():
        if options.only in (None, name):
            compare(name, setting, range(options.seeds), options.into, UNLIMITED if options.unlimited else METHODS)


if __name__ == "__main__":
    main()
