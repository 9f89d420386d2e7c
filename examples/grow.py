"""Grow the heads of a model in your own training loop.

    python examples/grow.py [--quick]

A one-layer model looks up values by key.  Its heads are two numbers wide, which is too few for 128 keys; the loop
observes some backward passes, grows the heads that are too narrow, and continues with the same optimizer.  The run is
repeated without growth, and on a task where the width is not the bottleneck, where nothing should grow.
"""

from __future__ import annotations

import argparse
import copy

import torch

from headwise.growth import Grower
from headwise.growth.demo import Reader, Task, average, lookup


def train(
    model: Reader, optimizer: torch.optim.Optimizer, task: Task, steps: int, seed: int, grower: Grower | None = None
) -> None:
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model.loss(*task.draw(32, draws))
        loss.backward()
        if grower is not None:
            grower.observe()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def validation(model: Reader, task: Task) -> float:
    return float(model.loss(*task.draw(1024, torch.Generator().manual_seed(99))))


def compare_with_and_without_growth(task: Task, first: int, more: int, observed: int) -> None:
    print(f"\n{task.name}")
    torch.manual_seed(0)
    model = Reader(task, layers=1, heads=2, key_width=2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    train(model, optimizer, task, first, seed=1)
    print(f"  after {first} steps, k = {model.blocks[0].attend.key_widths}: loss {validation(model, task):.3f}")
    narrow, narrow_optimizer = copy.deepcopy((model, optimizer))

    grower = Grower(model, optimizer)
    train(model, optimizer, task, observed, seed=2, grower=grower)
    for score in grower.scores():
        print(
            f"  {score.layer} head {score.head}: bottleneck {score.bottleneck:.4f}, of which both halves of the data "
            f"agree on {score.validated:.4f}"
        )
    held_out = task.draw(256, torch.Generator().manual_seed(3))
    event = grower.grow(loss=lambda: model.loss(*held_out))
    grower.close()
    print(f"  {event}")
    print(f"  {event.parameters_added} parameters added, loss {validation(model, task):.3f}")
    train(model, optimizer, task, more, seed=4)
    train(narrow, narrow_optimizer, task, observed, seed=2)
    train(narrow, narrow_optimizer, task, more, seed=4)
    with_growth, without = validation(model, task), validation(narrow, task)
    print(f"  after {more} more steps: loss {with_growth:.3f}, without growth {without:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a run of seconds")
    quick = parser.parse_args().quick
    keys = 24 if quick else 128
    for task in (lookup(keys=keys), average(keys=keys)):
        compare_with_and_without_growth(task, *((60, 20, 8) if quick else (400, 200, 32)))


if __name__ == "__main__":
    main()
