"""Passkey retrieval: a number hidden in a long text, asked for at its end; a rewritten model against the original.

    python -m benchmarks.passkey [MODEL] [--plan DIR] [--lengths 4096 8192] [--trials 10] [--partial DIR]

The text is prose that ships with headwise.  The number stands at evenly spread depths; an answer is right if the five
digits come back by greedy decoding.  Without --plan the plan is that of `benchmarks.decoding`.  Read the column `exact`
first: what the original cannot find says nothing about the rewritten model.  --partial stores answers, so that an
interrupted run can resume.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch

import headwise
from benchmarks.decoding import SHORT, alternating, spent
from headwise.cli.tables import print_table
from headwise.models.fingerprint import run_key
from headwise.models.inputs import SAMPLE_TEXT, tokenizer_of
from headwise.models.load import load_model
from headwise.replacement import Plan
from headwise.replacement.planning.saved_progress import PlanProgress

KEY = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--plan")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--window", type=int, default=513)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--partial", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, with_head=True)
    plan = Plan.load(options.plan) if options.plan else alternating(loaded.model, options.window, max(options.lengths))
    new = headwise.rewrite(loaded.model, plan, probe=SHORT)[0]
    rows = []
    settings = {"sites": plan.to_dict()["sites"], "trials": options.trials, "model": options.model}
    store = PlanProgress(options.partial, run_key(str(plan.model.get("fingerprint")), settings))
    for n in options.lengths:
        found: dict[str, list[bool]] = {"exact": [], "rewritten": []}
        for trial in range(options.trials):
            ids, key = _prompt(tokenizer_of(loaded), n, trial, options.trials)
            for name, model in (("exact", loaded.model), ("rewritten", new)):
                answer = store.stored(
                    f"{n} {trial} {name}", lambda model=model, ids=ids: _answer(model, tokenizer_of(loaded), ids)
                )
                found[name].append(answer.startswith(key))
            print(
                f"{n}: {trial + 1} of {options.trials}", {name: sum(right) for name, right in found.items()}, flush=True
            )
        both = [a and b for a, b in zip(*found.values(), strict=True)]
        counts = [f"{sum(right)} of {len(right)}" for right in found.values()]
        rows.append((str(n), *counts, f"{sum(both)} of {sum(found['exact'])}"))
    headings = ("tokens", "exact", "rewritten", "rewritten where exact is right")
    print_table(f"{loaded.name}: pass keys found", headings, rows, words=())
    spent()


def _prompt(tokenizer: Any, n: int, trial: int, trials: int) -> tuple[torch.Tensor, str]:
    rng = random.Random(1000 * n + trial)
    key = str(rng.randrange(10000, 100000))
    hidden, question = (tokenizer(text)["input_ids"] for text in (KEY.format(key=key), QUESTION))
    prose = tokenizer(SAMPLE_TEXT.read_text())["input_ids"]
    room = n - len(hidden) - len(question) - 8  # 8 for the answer
    start = rng.randrange(max(1, len(prose) - room))
    prose = prose[start : start + room]
    depth = (2 * trial + 1) * len(prose) // (2 * trials)
    return torch.tensor([[*prose[:depth], *hidden, *prose[depth:], *question]]), key


def _answer(model: Any, tokenizer: Any, ids: torch.Tensor) -> str:
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :]).strip()


if __name__ == "__main__":
    main()
