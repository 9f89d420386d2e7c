"""Time of a rewritten encoder over that of the model as it was, whole models.

    python -m benchmarks.encoding [MODEL] [--plan DIR] [--lengths 128 256 512] [--batches 1 8] [--rounds 9]

Without --plan, a third of the heads are windows of 33, a third `near_far` in blocks of 16, both with 4 leading keys,
and a third softmax; such a plan promises nothing about the output.  Processor time (--threads 1), in turns; medians of
the ratio of neighbouring runs, and half of its interquartile range.  `exact below` is the same model told to run the
original attention at that length: what the installation alone costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import headwise
from headwise.cli.tables import print_table
from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.replacement import SOFTMAX, Choice, MixedHeads, Plan

THIRDS = (
    Choice("window", {"width": 33, "leading": 4}),
    Choice("near_far", {"block": 16, "rank": 3, "leading": 4}),
    SOFTMAX,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--plan")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model)
    plan = Plan.load(options.plan) if options.plan else thirds(loaded.model, max(options.lengths))
    probe = {"input_ids": torch.arange(100, 116).unsqueeze(0)}
    new, same = (headwise.rewrite(loaded.model, plan, probe=probe)[0] for _ in range(2))
    for module in same.modules():
        if isinstance(module, MixedHeads):
            module.exact_below = max(options.lengths) + 1
    rows = []
    for n in options.lengths:
        for b in options.batches:
            ids = next(iter(text_input(loaded, None, length=n, texts=b, batch=b).batches))["input_ids"]
            seconds, ratios = _measure(
                {"exact": loaded.model, "rewritten": new, "exact below": same}, ids, options.rounds
            )
            rows.append((str(n), str(b), f"{1e3 * seconds:.1f}", *ratios))
    headings = ("tokens", "batch", "exact ms", "rewritten / exact", "exact below / exact")
    print_table(f"{loaded.name}, {options.threads} thread(s), {options.rounds} rounds", headings, rows, words=())


def thirds(model: Any, length: int) -> Plan:
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    row = [THIRDS[3 * head // heads] for head in range(heads)]
    names = [name for name, module in model.named_modules() if name.endswith("attention.self")]
    facts = {name: {"heads": heads, "width": width, "causal": False} for name in names}
    return Plan({"class": type(model).__name__, "sites": facts}, length, dict.fromkeys(names, row))


def _measure(models: dict[str, Any], ids: torch.Tensor, rounds: int) -> tuple[float, list[str]]:
    """Median seconds of the first model, and the others' times as shares of it."""
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for step in range(rounds + 1):
            for name, model in models.items():
                start = time.process_time()
                model(input_ids=ids)
                if step:
                    times[name].append(time.process_time() - start)
    first, *others = times.values()
    shown = []
    for other in others:
        low, middle, high = statistics.quantiles([x / y for x, y in zip(other, first, strict=True)], n=4)
        shown.append(f"{middle:.2f} ± {(high - low) / 2:.2f}")
    return statistics.median(first), shown


if __name__ == "__main__":
    main()
