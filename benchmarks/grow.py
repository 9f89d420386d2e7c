"""Growth of the key width compared with other methods, and its cost.

    python -m benchmarks.grow kinds               least-squares residuals on eight kinds of data
    python -m benchmarks.grow train [--quick]     several methods and seeds; a task that needs width, one that does not
    python -m benchmarks.grow optimizer [--quick] policies for Adam's state after growth
    python -m benchmarks.grow heads [--quick]     the head with the highest score against a random one
    python -m benchmarks.grow compressed          a refit from compressed statistics against one from exact ones
    python -m benchmarks.grow cost  [--quick]     time and memory on a 6-layer, 8-head, width-256 model
    python -m benchmarks.grow all   [--quick]

Intervals are 95 % of Student's t over seeds; times are medians in one run, printed as ratios.  With --into FILE,
`--first 3 --seeds 2` adds seeds 3 and 4 to those in the file, and the tables are of all of them.
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.grow_baselines import gradmax, plain_svd, random_both, random_queries
from benchmarks.grow_kinds import compare, kinds
from benchmarks.grow_rows import Rows, interval
from headwise.growth import Grower
from headwise.growth.demo import Reader, ReaderBlock, Task, average, lookup
from headwise.nn import MultiHead, head_slices

BATCH, RATE, CALIBRATION = 32, 3e-3, 32


def train(model: Reader, optimizer: torch.optim.Optimizer, task: Task, draws: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(*task.draw(BATCH, draws)).backward()
        optimizer.step()


def trained(
    task: Task, seed: int, steps: int, rate: float = RATE, **sizes: int
) -> tuple[Reader, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Reader(task, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    train(model, optimizer, task, torch.Generator().manual_seed(seed), steps)
    return model, optimizer


@torch.no_grad()
def validation(model: Reader, task: Task) -> float:
    return float(model.loss(*task.draw(1024, torch.Generator().manual_seed(12345))))


def observed(model: Reader, optimizer: torch.optim.Optimizer, task: Task, seed: int, **options: Any) -> Grower:
    grower, draws = Grower(model, optimizer, **options), torch.Generator().manual_seed(1000 + seed)
    for _ in range(CALIBRATION):
        optimizer.zero_grad()
        model.loss(*task.draw(BATCH, draws)).backward()
        grower.observe()
    return grower


def held_out(model: Reader, task: Task, seed: int) -> Callable[[], Tensor]:
    batch = task.draw(256, torch.Generator().manual_seed(2000 + seed))
    return lambda: model.loss(*batch)


ALL = ("gram", "fisher", "refit")
METHODS: dict[str, Any] = {
    "no growth": None,
    "random": (random_both,),
    "random queries, zero keys": (random_queries,),
    "GradMax-like": (gradmax,),
    "plain SVD truncation (Burgund)": (plain_svd,),
    "refit": ("refit",),
    "closed form": ("gram",),
    "closed form, Fisher": ("fisher",),
    "line search chooses (default)": ALL,
}


def compare_training(
    task: Task, seeds: Sequence[int], steps: int, later: Sequence[int], file: Path | None, k: int = 2, p: int = 2
) -> None:
    """Same data, same steps, every head from k to k + p; the validation loss right after growth and later."""
    rows, automatic = Rows(file, f"train {task.name}"), Rows(file, f"auto {task.name}")
    for seed in seeds:
        if rows.has(seed):
            continue
        base, optimizer = trained(task, seed, steps, key_width=k)
        wide, wide_optimizer = trained(task, seed, steps, key_width=k + p)
        for name, solutions in METHODS.items():
            model, copied = copy.deepcopy((base, optimizer))
            torch.manual_seed(seed)
            if solutions is not None:
                grower = observed(model, copied, task, seed)
                heads = [(layer, head) for layer in grower.layers for head in range(2)]
                grower.grow(p, heads, loss=held_out(model, task, seed), solutions=solutions)
                grower.close()
            rows.add(name, seed, afterwards(model, copied, task, seed, later))
        rows.add("wide from the start", seed, afterwards(wide, wide_optimizer, task, seed, later))
        model, copied = copy.deepcopy((base, optimizer))
        grower = observed(model, copied, task, seed)
        event = grower.grow(loss=held_out(model, task, seed))
        automatic.add("heads widened, change of held-out loss", seed, [len(event.changes), event.measured or 0.0])
        grower.close()
        automatic.all_parts = rows.all_parts
        automatic.all_parts[automatic.part] = automatic.losses
        rows.save()
    print(f"\n{task.name}: 2 layers, 2 heads, width 32, k {k} -> {k + p} after {steps} steps;")
    print(f"validation loss right after growth, and after {' and '.join(map(str, later))} more steps")
    rows.print()
    by_seed = automatic.losses["heads widened, change of held-out loss"]
    counts = ", ".join(f"{n:.0f} heads ({change:+.3f})" for _, (n, change) in sorted(by_seed.items()))
    print(f"  grow(p='auto', heads='auto') widened, by seed: {counts}")


def afterwards(
    model: Reader, optimizer: torch.optim.Optimizer, task: Task, seed: int, later: Sequence[int]
) -> list[float]:
    losses, draws, done = [validation(model, task)], torch.Generator().manual_seed(3000 + seed), 0
    for steps in later:
        train(model, optimizer, task, draws, steps - done)
        done = steps
        losses.append(validation(model, task))
    return losses


POLICIES = ("pace 3 (the default)", "pace 1", "zeros under the old step counter", "optimizer rebuilt")


def compare_policies(
    task: Task, rate: float, seeds: Sequence[int], steps: int, later: Sequence[int], file: Path | None
) -> None:
    """The same growth, and four ways to continue with AdamW."""
    for name, solutions in {"default": ALL, "random queries, zero keys": (random_queries,)}.items():
        rows = Rows(file, f"optimizer, rate {rate:g}: {name}")
        for seed in seeds:
            if rows.has(seed):
                continue
            base, optimizer = trained(task, seed, steps, rate, layers=1, key_width=2)
            for policy in POLICIES:
                torch.manual_seed(seed)
                model, state = copy.deepcopy((base, optimizer))
                grower = observed(model, state, task, seed, **({"pace": 1.0} if policy == "pace 1" else {}))
                grower.grow(
                    2,
                    [("blocks.0.attend", 0), ("blocks.0.attend", 1)],
                    loss=held_out(model, task, seed),
                    solutions=solutions,
                )
                grower.close()
                if policy == "optimizer rebuilt":
                    state = torch.optim.AdamW(model.parameters(), rate)
                elif policy.startswith("zeros"):
                    forget(model, state, ("exp_avg", "exp_avg_sq"))
                rows.add(policy, seed, afterwards(model, state, task, seed, later))
            rows.save()
        print(f"\noptimizer after growth, learning rate {rate:g}, {name}: {task.name}, 1 layer, 2 heads, k 2 -> 4;")
        print(f"validation loss after growth, and after {' and '.join(map(str, later))} more steps | minus the default")
        rows.print(against=POLICIES[0])


def forget(model: Reader, optimizer: torch.optim.Optimizer, which: Sequence[str]) -> None:
    """Set the optimizer state of the new half of each head's dimensions to zero."""
    layer = model.blocks[0].attend
    assert isinstance(layer, MultiHead)
    new = torch.cat([torch.arange(s.start + 2, s.stop) for s in head_slices(layer.key_widths)])
    for linear in (layer.query, layer.key):
        for parameter in linear.parameters():
            for key in which:
                optimizer.state[parameter][key][new] = 0


def compare_compressed(task: Task, seeds: Sequence[int], steps: int) -> None:
    """The refit from tokens stored exactly, and from at most 16 clusters of Gram matrices."""
    print(f"\ncompressed statistics: {task.name}, refit, k 2 -> 4; validation loss right after growth, their error")
    losses: dict[str, list[float]] = {"exact": [], "compressed": []}
    errors = []
    for seed in seeds:
        base, optimizer = trained(task, seed, steps, layers=1, key_width=2)
        for name, memory in (("exact", 1 << 26), ("compressed", 0)):
            model, state = copy.deepcopy((base, optimizer))
            grower = observed(model, state, task, seed, memory=memory)
            errors += [x.compression_error() for x in grower.statistics.values() if memory == 0]
            heads = [(layer, head) for layer in grower.layers for head in range(2)]
            grower.grow(2, heads, loss=held_out(model, task, seed), solutions=("refit",))
            losses[name].append(validation(model, task))
    print(f"  exact {interval(losses['exact'])}   compressed {interval(losses['compressed'])}")
    print(f"  ||N~(Z) - N(Z)|| / ||N(Z)|| of the compressed form: {interval(errors)}")


def compare_heads(task: Task, seeds: Sequence[int], steps: int, file: Path | None) -> None:
    """2 layers of 4 heads, k = 2; one head grows by 2: the best by score, all others, the best in hindsight."""
    rows = Rows(file, "heads")
    for seed in seeds:
        if rows.has(seed):
            continue
        model, optimizer = trained(task, seed, steps, heads=4, key_width=2)
        before = validation(model, task)
        gains = {}
        order = [(s.layer, s.head) for s in observed(model, optimizer, task, seed).scores()]
        for head in order:
            copied, other = copy.deepcopy((model, optimizer))
            grower = observed(copied, other, task, seed)
            grower.grow(2, [head], loss=held_out(copied, task, seed), solutions=("gram",))
            gains[head] = before - validation(copied, task)
        rows.add("highest score", seed, [gains[order[0]]])
        rows.add("random head", seed, [statistics.fmean(gains.values())])
        rows.add("best in hindsight", seed, [max(gains.values())])
        rows.save()
    print(f"\nwhich head: {task.name}, 2 layers, 4 heads, k 2 -> 4 for one head; decrease of the loss")
    rows.print()
    pairs = zip(rows.column("highest score", 0), rows.column("random head", 0), strict=True)
    print(f"  highest score less random: {interval([a - b for a, b in pairs])}")


class Stack(nn.Module):
    """6 layers, 8 heads, width 256, 256 symbols."""

    def __init__(self, layers: int = 6, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(256, width), nn.Linear(width, 256)
        self.place = nn.Parameter(torch.randn(256, width) / 10)
        self.blocks = nn.Sequential(*(ReaderBlock(width, heads, width // heads) for _ in range(layers)))

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
    statistics_before = copy.deepcopy(grower.statistics)
    b = time.perf_counter()
    event = grower.grow(8, top, loss=lambda: model.loss(held), solutions=("gram",))
    c = time.perf_counter()
    event.undo()
    grower.statistics, grower._reduced = statistics_before, True
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
    print(f"  {'':34s} plain    metric   refit    no rank limit")
    for name, data in kinds().items():
        row = compare(*data, 3)
        print(f"  {name:34s} {row['plain']:.4f}   {row['metric']:.4f}   {row['refit']:.4f}   {row['free']:.4f}")


PARTS = ("kinds", "train", "optimizer", "heads", "compressed", "cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--quick", action="store_true", help="fewer seeds, steps and sequences")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--task", choices=("lookup", "average"), default=None, help="only one task of `train`")
    parser.add_argument("--rate", type=float, default=None, help="only one learning rate of `optimizer`")
    parser.add_argument("--into", type=Path, default=None, metavar="FILE", help="add the seeds to those in FILE")
    options = parser.parse_args()
    quick, parts = options.quick, PARTS if options.part == "all" else (options.part,)
    count = (2 if quick else 5) if options.seeds is None else options.seeds
    seeds = range(options.first, options.first + count)
    steps = 150 if quick else 400
    if "kinds" in parts:
        print_kinds()
    if "train" in parts:
        for task in (lookup(keys=128), average(keys=128)):
            if options.task in (None, task.name):
                compare_training(task, seeds, steps, (20,) if quick else (50, 200), options.into)
    if "optimizer" in parts:
        for rate in (1e-3, 3e-3, 1e-2) if options.rate is None else (options.rate,):
            compare_policies(lookup(keys=128), rate, seeds, steps, (20,) if quick else (20, 50, 200), options.into)
    if "heads" in parts:
        compare_heads(lookup(keys=128), seeds, 150 if quick else 300, options.into)
    if "compressed" in parts:
        compare_compressed(lookup(keys=128), seeds, steps)
    if "cost" in parts:
        cost(16 if quick else 64, 64 if quick else 256)


if __name__ == "__main__":
    main()
