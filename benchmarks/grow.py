"""What growing the key width brings, against every other way to do it, and what it costs.

    python -m benchmarks.grow kinds               least-squares residuals on eight kinds of data
    python -m benchmarks.grow train [--quick]     several ways to widen, several seeds, a task with and one without need
    python -m benchmarks.grow optimizer [--quick] what becomes of Adam's moments
    python -m benchmarks.grow heads [--quick]     the head with the highest score against a random one
    python -m benchmarks.grow cost  [--quick]     time and memory on a 6-layer, 8-head, width-256 model
    python -m benchmarks.grow all   [--quick]

Intervals are 95 % of Student's t over seeds; times are medians in one run, printed as ratios.
"""

from __future__ import annotations

import argparse
import copy
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.grow_kinds import compare, kinds
from headwise.grow import Grower
from headwise.grow.baselines import gradmax, random_both, random_queries, source_recipe
from headwise.grow.grower import SOLUTIONS
from headwise.grow.refit import refit
from headwise.grow.solve import closed_form, fisher_form
from headwise.grow.tasks import Block, Reader, Task, average, lookup
from headwise.nn import MultiHead, head_slices

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26}
BATCH, RATE, CALIBRATION = 32, 3e-3, 32


def interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = T95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f}"


def train(model: Reader, optimizer: torch.optim.Optimizer, task: Task, draws: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(*task.draw(BATCH, draws)).backward()
        optimizer.step()


@torch.no_grad()
def validation(model: Reader, task: Task) -> float:
    return float(model.loss(*task.draw(1024, torch.Generator().manual_seed(12345))))


def observed(model: Reader, optimizer: torch.optim.Optimizer, task: Task, seed: int) -> Grower:
    grower, draws = Grower(model, optimizer), torch.Generator().manual_seed(1000 + seed)
    for _ in range(CALIBRATION):
        optimizer.zero_grad()
        model.loss(*task.draw(BATCH, draws)).backward()
        grower.observe()
    return grower


def held_out(model: Reader, task: Task, seed: int) -> Callable[[], Tensor]:
    batch = task.draw(256, torch.Generator().manual_seed(2000 + seed))
    return lambda: model.loss(*batch)


WAYS: dict[str, Any] = {
    "no growth": None,
    "random": (random_both,),
    "random queries, zero keys": (random_queries,),
    "GradMax-like": (gradmax,),
    "source's recipe": (source_recipe,),
    "refit": (refit,),
    "closed form": (closed_form,),
    "closed form, Fisher": (fisher_form,),
    "ours (line search chooses)": SOLUTIONS,
    "ours, optimizer rebuilt": SOLUTIONS,
}


def compare_training(task: Task, seeds: int, steps: int, later: Sequence[int], k: int = 2, p: int = 2) -> None:
    """Same data, same steps, every head from k to k + p; the validation loss right after growth and later."""
    print(f"\n{task.name}: 2 layers, 2 heads, width 32, k {k} -> {k + p} after {steps} steps, {seeds} seeds;")
    print(f"validation loss right after growth, and after {' and '.join(map(str, later))} more steps")
    results: dict[str, list[list[float]]] = {name: [] for name in (*WAYS, "wide from the start")}
    recommended = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        base = Reader(task, key_width=k)
        optimizer = torch.optim.AdamW(base.parameters(), RATE)
        train(base, optimizer, task, torch.Generator().manual_seed(seed), steps)
        torch.manual_seed(seed)
        wide = Reader(task, key_width=k + p)
        wide_optimizer = torch.optim.AdamW(wide.parameters(), RATE)
        train(wide, wide_optimizer, task, torch.Generator().manual_seed(seed), steps)
        results["wide from the start"].append(afterwards(wide, wide_optimizer, task, seed, later))
        for name, solutions in WAYS.items():
            model, copied = copy.deepcopy((base, optimizer))
            torch.manual_seed(seed)
            if solutions is not None:
                grower = observed(model, copied, task, seed)
                heads = [(layer, head) for layer in grower.layers for head in range(2)]
                grower.grow(p, heads, loss=held_out(model, task, seed), solutions=solutions)
                grower.close()
            if name.endswith("rebuilt"):
                copied = torch.optim.AdamW(model.parameters(), RATE)
            results[name].append(afterwards(model, copied, task, seed, later))
        model, copied = copy.deepcopy((base, optimizer))
        grower = observed(model, copied, task, seed)
        event = grower.grow(loss=held_out(model, task, seed))
        recommended.append((len(event.changes), event.measured))
        grower.close()
    for name, rows in results.items():
        print(f"  {name:28s}", "   ".join(interval(column) for column in zip(*rows, strict=True)))
    gains = ", ".join(f"{n} heads ({0 if m is None else m:+.3f})" for n, m in recommended)
    print(f"  grow(p='auto', heads='auto') widened, by seed: {gains}")


def afterwards(
    model: Reader, optimizer: torch.optim.Optimizer, task: Task, seed: int, later: Sequence[int]
) -> list[float]:
    found, draws, done = [validation(model, task)], torch.Generator().manual_seed(3000 + seed), 0
    for steps in later:
        train(model, optimizer, task, draws, steps - done)
        done = steps
        found.append(validation(model, task))
    return found


def compare_policies(task: Task, seeds: int, steps: int, later: Sequence[int]) -> None:
    """The same growth, four ways to go on with AdamW."""
    print(f"\noptimizer after growth: {task.name}, 1 layer, 2 heads, k 2 -> 4, {seeds} seeds; validation loss after")
    print(f"growth, and after {' and '.join(map(str, later))} more steps")
    ways = {"ours": SOLUTIONS, "random queries, zero keys": (random_queries,)}
    policies = ("calibrated", "second moments only", "zeros", "rebuilt")
    rows: dict[str, list[list[float]]] = {f"{way}: {policy}": [] for way in ways for policy in policies}
    for seed in range(seeds):
        torch.manual_seed(seed)
        base = Reader(task, layers=1, key_width=2)
        optimizer = torch.optim.AdamW(base.parameters(), RATE)
        train(base, optimizer, task, torch.Generator().manual_seed(seed), steps)
        for way, solutions in ways.items():
            torch.manual_seed(seed)
            grown, moments = copy.deepcopy((base, optimizer))
            grower = observed(grown, moments, task, seed)
            grower.grow(
                2,
                [("blocks.0.attend", 0), ("blocks.0.attend", 1)],
                loss=held_out(grown, task, seed),
                solutions=solutions,
            )
            grower.close()
            for policy in policies:
                model, state = copy.deepcopy((grown, moments))
                if policy == "rebuilt":
                    state = torch.optim.AdamW(model.parameters(), RATE)
                elif policy != "calibrated":
                    forget(model, state, ("exp_avg",) if policy.startswith("second") else ("exp_avg", "exp_avg_sq"))
                rows[f"{way}: {policy}"].append(afterwards(model, state, task, seed, later))
    for name, values in rows.items():
        print(f"  {name:46s}", "   ".join(interval(column) for column in zip(*values, strict=True)))


def forget(model: Reader, optimizer: torch.optim.Optimizer, which: Sequence[str]) -> None:
    """Zero moments for the new half of each head's dimensions."""
    layer = model.blocks[0].attend
    assert isinstance(layer, MultiHead)
    new = torch.cat([torch.arange(s.start + 2, s.stop) for s in head_slices(layer.key_widths)])
    for linear in (layer.query, layer.key):
        for parameter in linear.parameters():
            for key in which:
                optimizer.state[parameter][key][new] = 0


def compare_heads(task: Task, seeds: int, steps: int) -> None:
    """2 layers of 4 heads, k = 2; one head grows by 2: the best by score, all others, the best in hindsight."""
    print(f"\nwhich head: {task.name}, 2 layers, 4 heads, k 2 -> 4 for one head, {seeds} seeds; decrease of the loss")
    chosen, random, oracle = [], [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Reader(task, heads=4, key_width=2)
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        train(model, optimizer, task, torch.Generator().manual_seed(seed), steps)
        before = validation(model, task)
        gains = {}
        order = [(s.layer, s.head) for s in observed(model, optimizer, task, seed).scores()]
        for head in order:
            copied, other = copy.deepcopy((model, optimizer))
            grower = observed(copied, other, task, seed)
            grower.grow(2, [head], loss=held_out(copied, task, seed), solutions=(closed_form,))
            gains[head] = before - validation(copied, task)
        chosen.append(gains[order[0]])
        random.append(statistics.fmean(gains.values()))
        oracle.append(max(gains.values()))
    print(f"  highest score {interval(chosen)}   random head {interval(random)}   best in hindsight {interval(oracle)}")
    print(f"  highest score less random: {interval([a - b for a, b in zip(chosen, random, strict=True)])}")


class Stack(nn.Module):
    """6 layers, 8 heads, width 256, 256 symbols."""

    def __init__(self, layers: int = 6, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(256, width), nn.Linear(width, 256)
        self.place = nn.Parameter(torch.randn(256, width) / 10)
        self.blocks = nn.Sequential(*(Block(width, heads, width // heads) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(self.blocks(self.embed(tokens) + self.place[: tokens.shape[1]]))

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def cost(sequences: int, n: int, batch: int = 8) -> None:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = (torch.randint(256, (sequences, n)) // torch.randint(1, 16, (sequences, n))).split(batch)
    print(f"\ncost: 6 layers, 8 heads, width 256, {sequences} sequences of {n} tokens in batches of {batch}")
    started, forward, backward, observe = _memory(), [], [], []
    grower = Grower(model, optimizer)
    model.loss(data[0]).backward()  # warm up
    grower.observe()
    grower.reset()
    epoch = time.perf_counter()
    spent = 0.0
    for tokens in data:
        optimizer.zero_grad()
        a = time.perf_counter()
        loss = model.loss(tokens)
        b = time.perf_counter()
        loss.backward()
        c = time.perf_counter()
        grower.observe()
        d = time.perf_counter()
        optimizer.step()
        forward.append(b - a)
        backward.append(c - b)
        observe.append(d - c)
        spent += d - c
    epoch = time.perf_counter() - epoch - spent
    trained = _memory()
    ratio = [o / b for o, b in zip(observe, backward, strict=True)]
    print(f"  a batch: forward {_ms(forward)} backward {_ms(backward)} observe {_ms(observe)}")
    print(f"  observe / backward: median {statistics.median(ratio):.3f}, {min(ratio):.3f} to {max(ratio):.3f}")
    held = torch.randint(256, (batch, n))
    a = time.perf_counter()
    scores = grower.scores()
    scored = time.perf_counter() - a
    top = [(scores[0].layer, scores[0].head)]
    size = sum(s.bytes for s in grower.statistics.values()) / 2**20
    kept = copy.deepcopy(grower.statistics)
    b = time.perf_counter()
    event = grower.grow(8, top, loss=lambda: model.loss(held), solutions=(closed_form,))
    c = time.perf_counter()
    event.undo()
    grower.statistics, grower._reduced = kept, True
    d = time.perf_counter()
    grower.grow(8, top, loss=lambda: model.loss(held))
    e = time.perf_counter()
    print(f"  one epoch of training {epoch:.1f} s; scores of 48 heads {scored:.1f} s ({scored / epoch:.2f} epochs)")
    print(f"  one growth, closed form {c - b:.1f} s ({(c - b) / epoch:.2f} epochs, {len(event.tried)} held-out losses)")
    print(f"  one growth, all solutions {e - d:.1f} s ({(e - d) / epoch:.2f} epochs)")
    weights = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    print(
        f"  statistics {size:.0f} MiB, parameters {weights:.0f} MiB; peak resident {started:.0f} MiB before training,"
    )
    print(f"  {trained:.0f} MiB after the epoch, {_memory():.0f} MiB after growth")


def _ms(times: Sequence[float]) -> str:
    return f"{1000 * statistics.median(times):.0f} ms,"


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_kinds() -> None:
    print("relative residual of the scores, rank 3 (the truth's) plus noise of 1 %")
    print(f"  {'':34s} recipe   metric   refit    no rank limit")
    for name, data in kinds().items():
        row = compare(*data, 3)
        print(f"  {name:34s} {row['recipe']:.4f}   {row['metric']:.4f}   {row['refit']:.4f}   {row['free']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kinds", "train", "optimizer", "heads", "cost", "all"))
    parser.add_argument("--quick", action="store_true", help="fewer seeds, steps and sequences")
    parser.add_argument("--seeds", type=int, default=None)
    options = parser.parse_args()
    quick, parts = (
        options.quick,
        ("kinds", "train", "optimizer", "heads", "cost") if options.part == "all" else (options.part,),
    )
    seeds = options.seeds or (2 if quick else 5)
    if "kinds" in parts:
        print_kinds()
    if "train" in parts:
        steps, later = (150, (20,)) if quick else (400, (50, 200))
        for task in (lookup(keys=128), average(keys=128)):
            compare_training(task, seeds, steps, later)
    if "optimizer" in parts:
        compare_policies(lookup(keys=128), seeds, 150 if quick else 400, (20,) if quick else (20, 50, 200))
    if "heads" in parts:
        compare_heads(lookup(keys=128), seeds, 150 if quick else 300)
    if "cost" in parts:
        cost(16 if quick else 64, 64 if quick else 256)


if __name__ == "__main__":
    main()
