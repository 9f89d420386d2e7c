"""Prefill, decoding and cache of a rewritten decoder against the model as it was.

    python -m benchmarks.decoding [MODEL] [--plan DIR] [--lengths 1024 4096 8192] [--tokens 16] [--dtype float32]
                                  [--partial DIR]

Without --plan, every second key-value head attends to a window of --window keys and 4 leading ones; such a plan
promises nothing about the output.  Both models read the same text and write the same tokens in turns.  `exact` decodes
with transformers' DynamicCache, `exact, preallocated` with the cache of the rewritten model but no head replaced, which
shows what the storage alone gains.  Seconds are processor time (--threads 1), medians; bytes are what the cache holds.
--partial stores the measurements of each length, so that an interrupted run can resume.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import headwise
from headwise.cli.tables import print_table
from headwise.models.fingerprint import run_key
from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.replacement import SOFTMAX, Choice, HeadCache, Plan
from headwise.replacement.install.head_cache import cache_bytes
from headwise.replacement.planning.saved_progress import PlanProgress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--plan")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--window", type=int, default=513)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1, help="prefills of each model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--partial", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, with_head=True, dtype=options.dtype)
    longest = max(options.lengths)
    plan = Plan.load(options.plan) if options.plan else alternating(loaded.model, options.window, longest)
    unchanged = Plan(plan.model, plan.length, {site: [SOFTMAX] * len(row) for site, row in plan.sites.items()})
    new, same = (headwise.rewrite(loaded.model, each, probe=SHORT)[0] for each in (plan, unchanged))
    text = next(iter(text_input(loaded, None, length=longest, texts=1).batches))["input_ids"]
    print(f"{loaded.name}, {options.dtype}, {options.threads} thread(s), plan for {plan.length}: {_heads(plan)}")
    config: Any = loaded.model.config
    models = {
        "exact": (loaded.model, lambda: DynamicCache(config=config)),
        "exact, preallocated": (same, lambda: HeadCache(same)),
        "rewritten": (new, lambda: HeadCache(new)),
    }
    rows = []
    settings = {"sites": plan.to_dict()["sites"], "exact_below": dict(plan.exact_below)}
    settings |= {name: getattr(options, name) for name in ("model", "dtype", "tokens", "rounds", "threads")}
    store = PlanProgress(options.partial, run_key(str(plan.model.get("fingerprint")), settings))
    for n in options.lengths:
        ids = text[:, : n - options.tokens - 1]
        results = store.stored(f"{n}", lambda ids=ids: _measure(models, ids, options.tokens, options.rounds))
        prefill, decode, size = results["exact"]
        for name, (seconds, step, bytes_) in results.items():
            faster = f"{prefill / seconds:.2f} x", f"{decode / step:.2f} x"
            row = (str(n), name, f"{seconds:.2f}", faster[0], f"{1 / step:.1f}", faster[1])
            rows.append((*row, f"{bytes_ / 1e6:.1f}", f"{size / bytes_:.2f} x"))
    headings = ("keys", "model", "prefill s", "faster", "tokens/s", "faster", "cache MB", "smaller")
    print_table("prefill and decoding", headings, rows, words=("model",))
    spent()


def spent() -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{time.process_time():.0f} processor seconds, {memory:.1f} GB at most")


SHORT = {"input_ids": torch.arange(3, 11).unsqueeze(0)}


def alternating(model: Any, window: int, length: int) -> Plan:
    """A window with 4 leading keys for every second key-value head."""
    config = model.config
    groups, shared = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    choice, sites = Choice("window", {"width": window, "leading": 4}), {}
    layers = [
        name for name, module in model.named_modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")
    ]
    for layer, name in enumerate(layers):
        sites[name] = [choice if (layer * groups + g) % 2 else SOFTMAX for g in range(groups) for _ in range(shared)]
    facts = {name: {"heads": len(row), "width": width, "causal": True} for name, row in sites.items()}
    return Plan({"class": type(model).__name__, "sites": facts}, length, sites)


def _heads(plan: Plan) -> str:
    heads = [choice for row in plan.sites.values() for choice in row]
    return f"{sum(choice != SOFTMAX for choice in heads)} of {len(heads)} heads replaced"


def _measure(
    models: dict[str, Any], ids: torch.Tensor, tokens: int, rounds: int
) -> dict[str, tuple[float, float, int]]:
    """{name: (seconds of prefill, seconds of a token, bytes of the cache)}"""
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    caches: dict[str, Any] = {}
    token = ids[:, -1:]
    with torch.no_grad():
        for _ in range(rounds):
            for name, (model, make) in models.items():
                caches[name] = make()
                start = time.process_time()
                token = model(ids, past_key_values=caches[name], logits_to_keep=1).logits[:, -1:].argmax(-1)
                prefill[name].append(time.process_time() - start)
        for step in range(tokens + 1):
            for name, (model, _) in models.items():
                start = time.process_time()
                model(token, past_key_values=caches[name])
                if step:  # the first one allocates
                    decode[name].append(time.process_time() - start)
    return {
        name: (statistics.median(prefill[name]), statistics.median(decode[name]), cache_bytes(caches[name]))
        for name in models
    }


if __name__ == "__main__":
    main()
