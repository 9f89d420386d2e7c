"""One sequence on 1, 2 and 4 processes: seconds, peak memory and bytes of every exchange, and of whole models.

    python -m benchmarks.sequence_parallel [--quick] [--only NAME …] [--json FILE]

Measured: forward and backward of attention with 4 heads of width 64, and of Llama models of transformers (4 layers of
256), plain, with windows in place of all heads, and with three kinds of heads; float32, one thread a process, gloo.
    seconds   median of the wall-clock times, the slowest rank of each; ratio to one process
    busy      mean of the processor times, the busiest rank: what falls with more cores than this machine has
    MB        peak resident memory of a rank above what it held before the step, its slices
    kB        received by a rank in one forward pass, counted at the collectives; `formula` is what `traffic` says

This machine's cores bound what can be seen: with more processes than cores, time does not fall, memory and bytes do.
`headwise bench ranks` compares the seconds with a model of their cost, and projects it to clusters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.bench.sharded_cases import ShardedCase, sharded_cases
from headwise.bench.sharded_cost import cores
from headwise.bench.sharded_runs import run_memory, run_sharded
from headwise.distributed import Slices, traffic
from headwise.operators import softmax
from headwise.operators.masks import Mask
from headwise.replacement import Choice, Plan, rewrite
from headwise.replacement.install.sharded_attention import sequence_parallel_model
from headwise.replacement.kinds import HeadInputs

LAYERS, HEADS, WIDTH, LENGTH = 4, 8, 32, 2048
NARROW = Choice("window", {"width": 129, "leading": 1})
KINDS = {
    "Llama, plain": [Choice("softmax")] * HEADS,
    "Llama, windows": [NARROW] * HEADS,
    "Llama, mixed": [NARROW] * 5 + [Choice("window", {"width": 257})] * 2 + [Choice("softmax")],
}


def llama(heads: Sequence[Choice]) -> nn.Module:
    """A model of random weights with these heads in every layer."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1000, hidden_size=HEADS * WIDTH, intermediate_size=4 * HEADS * WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_hidden_layers=LAYERS, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaModel(config).eval()
    if all(choice.kind == "softmax" for choice in heads):
        return model
    site = {"heads": HEADS, "key_value_heads": HEADS, "width": WIDTH, "causal": True}
    sites = {f"layers.{i}.self_attn": site for i in range(LAYERS)}
    plan = Plan({"class": "LlamaModel", "sites": sites}, LENGTH, {key: list(heads) for key in sites})
    return rewrite(model, plan)[0]


def model_case(heads: Sequence[Choice]) -> ShardedCase:
    """Forward and backward of a whole model on the slice of a rank; what is sent is what its groups of heads send."""

    def prepare(held: Slices, rank: int) -> tuple[Callable[[], Tensor], Sequence[Tensor]]:
        model, positions = llama(heads), held.positions(rank).unsqueeze(0)
        ids = held.cut(torch.randint(1000, (1, held.n), generator=torch.Generator().manual_seed(0)), rank, dim=1)

        def forward() -> Tensor:
            with sequence_parallel_model(model):
                return model(input_ids=ids, position_ids=positions).last_hidden_state

        return forward, [x for x in model.parameters() if x.requires_grad]

    def operators(n: int) -> list[tuple[int, Any]]:
        found = []
        for choice in dict.fromkeys(heads):
            q = torch.empty(1, heads.count(choice), n, WIDTH, device="meta")
            inputs = HeadInputs(q, q, Mask(n, n, True), WIDTH**-0.5)
            exact = choice.kind == "softmax"
            found.append((heads.count(choice), softmax(q, q, causal=True) if exact else choice.operator(inputs, {})))
        return found

    def received(n: int, ranks: int) -> float:
        return float(4 * LAYERS * sum(count * cheapest(op, count, ranks) for count, op in operators(n)))

    def work(n: int) -> float:
        return LAYERS * (16 * n * (HEADS * WIDTH) ** 2 + sum(op.cost(WIDTH).multiply_adds for _, op in operators(n)))

    return ShardedCase(LENGTH, prepare, received, work)


def cheapest(operator: Any, heads: int, ranks: int) -> float:
    """Scalars a head: an operator's own exchange, or that of heads where it is cheaper and they divide."""
    from headwise.distributed.traffic import head_traffic

    counts = [traffic, head_traffic] if heads % ranks == 0 else [traffic]
    return float(min(count(operator, WIDTH, ranks).received(ranks) for count in counts))


def cases(only: tuple[str, ...] = ()) -> dict[str, ShardedCase]:
    every = {**sharded_cases(), **{name: model_case(heads) for name, heads in KINDS.items()}}
    return {name: case for name, case in every.items() if not only or name in only}


def run(only: tuple[str, ...], repeats: int, shrink: int) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    make = partial(cases, only)
    for size in (1, 2, 4):
        found[size] = run_sharded(make, size, repeats=repeats, shrink=shrink)
        for name, memory in run_memory(make, size, shrink=shrink).items():
            found[size][name]["memory"] = memory
        print(f"measured {size} process{'es' if size > 1 else ''}", flush=True)
    return found


def show(found: dict[int, dict[str, Any]], repeats: int, only: tuple[str, ...]) -> None:
    print(f"\nfloat32, forward and backward, median of {repeats}; {cores()} cores\n")
    columns = ("n", 7), ("P", 3), ("seconds", 9), ("spread", 8), ("ratio", 6), ("busy", 9), ("ratio", 6)
    columns += ("MB peak", 9), ("ratio", 6), ("kB received", 13), ("formula", 10)
    print(f"{'':24}" + "".join(f"{name:>{width}}" for name, width in columns))
    for name, case in cases(only).items():
        one = found[1][name]
        for size, results in found.items():
            x = results[name]
            said = case.received(x["n"], size) if size > 1 else 0.0
            ratios = [x[key] / max(1e-9, one[key]) for key in ("seconds", "busy", "memory")]
            print(f"{name:24}{x['n']:7}{size:3}{x['seconds']:9.4f}{x['spread']:8.4f}{ratios[0]:6.2f}", end="")
            print(f"{x['busy']:9.4f}{ratios[1]:6.2f}{x['memory'] / 1e6:9.1f}{ratios[2]:6.2f}", end="")
            print(f"{x['received'] / 1e3:13.1f}{said / 1e3:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the length, two runs")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help=f"some of: {'; '.join(cases())}")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    arguments = parser.parse_args()
    repeats, shrink = (2, 8) if arguments.quick else (5, 1)
    only = tuple(arguments.only)
    found = run(only, repeats, shrink)
    show(found, repeats, only)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
