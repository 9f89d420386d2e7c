"""A narrow head planted in a small Llama with rotary positions and grouped queries: is it found, and does growth help?

    python -m benchmarks.grow_llama [--seeds 10] [--into FILE]

Two layers of 4 query heads on 2 key heads, 8 dimensions each, are trained to look up values by 64 keys.  Then one key
head is narrowed to its slowest rotated pair (the rest of its dimensions is multiplied by zero): the one that the
trained model needs most, since another one would not be missed.  The heads are ranked before the model can move the
work to another head, which it does within 20 steps.  Printed are the place of the narrow head in `Grower.scores()` (1
of 4 is found), the same for each of the other key heads narrowed instead, the validation loss when the narrow head
grows by 6 unrotated dimensions, at once and after 100 steps, and the same for the key head that is ranked last.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.grow_rows import interval
from headwise.growth import Grower
from headwise.growth.demo import lookup
from headwise.models.widths.resized_models import resized
from headwise.models.widths.widened_attention import NAME
from headwise.outputs import write_json

STEPS, LATER, BATCH, CALIBRATION, ADDED = 400, 100, 32, 24, 6
TASK = lookup(keys=64, values=16, pairs=12, queries=6)


class Recaller(nn.Module):
    """Tokens (b, n, 2) of (key, value) -> a Llama body -> logits (b, n, values)."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        width = 32
        config = LlamaConfig(
            vocab_size=4, hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, use_cache=False,
        )  # fmt: skip
        self.body = LlamaModel(config)
        self.key, self.value = nn.Embedding(TASK.keys, width), nn.Embedding(TASK.values + 1, width)
        self.read = nn.Linear(width, TASK.values)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.key(tokens[..., 0]) + self.value(tokens[..., 1])
        return self.read(self.body(inputs_embeds=x, use_cache=False).last_hidden_state)

    def loss(self, tokens: Tensor, answers: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), answers.flatten(), ignore_index=-100)


def plant(model: Recaller, layer: int, head: int) -> None:
    """One rotated pair is all that this key head, and the query heads that share it, have."""
    for name, module in resized(model.body).items():
        dimensions = getattr(module, NAME)
        maps = [torch.eye(8).repeat(n, 1, 1) for n in (4, 2)]
        if name == f"layers.{layer}.self_attn":
            kept = torch.zeros(8, 8)
            kept[3, 3] = kept[7, 7] = 1  # the slowest pair
            maps[0][2 * head : 2 * head + 2], maps[1][head] = kept, kept
        dimensions.keep_(*maps)


def train(model: Recaller, optimizer: torch.optim.Optimizer, draws: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(*TASK.draw(BATCH, draws)).backward()
        optimizer.step()


def one_seed(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Recaller()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    train(model, optimizer, torch.Generator().manual_seed(seed), STEPS)
    held, unseen = (TASK.draw(256, torch.Generator().manual_seed(i)) for i in (2000 + seed, 12345))

    def observed(model: Recaller, optimizer: torch.optim.Optimizer) -> Grower:
        grower, draws = Grower(model.body, optimizer), torch.Generator().manual_seed(1000 + seed)
        for _ in range(CALIBRATION):
            optimizer.zero_grad()
            model.loss(*TASK.draw(BATCH, draws)).backward()
            grower.observe()
        return grower

    @torch.no_grad()
    def validation(model: Recaller) -> float:
        return float(model.loss(*unseen))

    wide = validation(model)
    costs, orders = {}, {}
    for layer, head in ((layer, head) for layer in range(2) for head in range(2)):
        plant(model, layer, head)
        name = f"layers.{layer}.self_attn"
        costs[name, head] = validation(model) - wide
        orders[name, head] = [(s.layer, s.head) for s in observed(*copy.deepcopy((model, optimizer))).scores()]
    most = sorted(costs, key=lambda key: -costs[key])
    planted, order = most[0], orders[most[0]]
    plant(model, int(planted[0].split(".")[1]), planted[1])
    row: dict[str, Any] = {"wide": wide, "before": validation(model), "head": planted}
    row["every"] = [(costs[key], orders[key].index(key) + 1) for key in most]
    for name, key in (("planted", planted), ("last", order[-1] if order[-1] != planted else order[-2])):
        grown, state = copy.deepcopy((model, optimizer))
        grower = observed(grown, state)
        grower.grow(ADDED, [key], loss=lambda grown=grown: grown.loss(*held))
        grower.close()
        at_once = validation(grown)
        train(grown, state, torch.Generator().manual_seed(3000 + seed), LATER)
        row[name] = [at_once, validation(grown)]
    without, state = copy.deepcopy((model, optimizer))
    train(without, state, torch.Generator().manual_seed(3000 + seed), LATER)
    row["none"] = [row["before"], validation(without)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--into", type=Path, default=None, metavar="FILE", help="keep finished seeds in FILE")
    options = parser.parse_args()
    rows = json.loads(options.into.read_text()) if options.into is not None and options.into.exists() else {}
    for seed in range(options.seeds):
        if str(seed) not in rows:
            rows[str(seed)] = one_seed(seed)
            if options.into is not None:
                write_json(options.into, rows)
        places = ", ".join(f"{place} ({cost:+.3f})" for cost, place in rows[str(seed)]["every"])
        print(f"seed {seed}: number of the narrow head (and what narrowing it costs): {places}", flush=True)
    for i, which in enumerate(("most needed", "second", "third", "least needed")):
        found = [row["every"][i][1] == 1 for row in rows.values()]
        cost = interval([row["every"][i][0] for row in rows.values()])
        print(f"the {which} key head narrowed costs {cost}, found in {sum(found)} of {len(found)} seeds")
    print(f"\nthe most needed narrowed; validation loss at once, and after {LATER} steps")
    for name, what in (("none", "no growth"), ("planted", "the planted head grows"), ("last", "the last one grows")):
        columns = zip(*(row[name] for row in rows.values()), strict=True)
        print(f"  {what:24s} " + "   ".join(interval(list(column)) for column in columns))


if __name__ == "__main__":
    main()
