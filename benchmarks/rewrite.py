"""What a per-head plan for the real MiniLM costs and moves, beside one operator for every head.

    python -m benchmarks.rewrite [--quick] [--text FILE …] [--transfer STEPS] [--work DIR]

Replacements are fitted on one part of the text, chosen by a second, and every drift printed is from a third.  Costs are
multiply-adds done, hidden entries of blocks included, over those of exact attention.  A baseline's entry is the best of
its settings that costs at most as much as the plan's point.  --work keeps what was found, so that a run may be cut.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.replacement.plan import Plan, Point
from headwise.replacement.planning.effort import QUICK, Effort
from headwise.replacement.planning.make_plan import plan

TOLERANCES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2)
BASELINES = {
    "projection": ("projected",),
    "window + first": ("window",),
    "double softmax": ("double_softmax", "factored"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--text", nargs="+", type=Path)
    parser.add_argument("--texts", type=int, default=28)
    parser.add_argument("--transfer", type=int, default=0, metavar="STEPS", help="train the chosen operators further")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    loaded = load_model(None)
    batches = list(text_input(loaded, options.text, length=512, texts=options.texts).batches)
    start = time.perf_counter()
    effort = QUICK if options.quick else Effort()
    found = plan(
        loaded.model,
        batches,
        tolerance=0.05,
        effort=effort,
        transfer=options.transfer,
        name=loaded.name,
        work=options.work,
    )
    print(f"{loaded.name}, {len(batches)} texts of 512 tokens, split {found.made['texts']}; ", end="")
    print(f"{time.perf_counter() - start:.0f} s for this run\n")
    _curve(found)
    _singles(found)
    ratio = found.timing["ratio"]
    print(f"\ntolerance 0.05: attention takes {ratio:.2f} of the exact time at 512 on this machine")


def _curve(found: Plan) -> None:
    names = "".join(f"{name:>17}" for name in BASELINES)
    print(f"{'tolerance':>9} {'cost 512':>9} {'cost 4096':>10} {'selection':>10} {'test':>8}{names}   (test drift)")
    worse = 0
    for tolerance in TOLERANCES:
        point = found.at(tolerance).point
        assert point is not None
        others = [_best(found, kinds, point.cost) for kinds in BASELINES.values()]
        worse += sum(other is not None and other < (point.test or 0.0) for other in others)
        cells = "".join(f"{'—' if other is None else f'{other:.4f}':>17}" for other in others)
        far = found.cost(4096, point.sites)
        print(f"{tolerance:9.3f} {point.cost:9.1%} {far:10.2%} {point.selection:10.4f} {point.test:8.4f}{cells}")
    print(f"\na baseline has less drift at no more cost in {worse} of {len(TOLERANCES) * len(BASELINES)} entries")


def _best(found: Plan, kinds: tuple[str, ...], cost: float) -> float | None:
    fit = [p.test for p in found.baselines if p.name.split()[0] in kinds and p.cost <= cost * (1 + 1e-9)]
    return min((drift for drift in fit if drift is not None), default=None)


def _singles(found: Plan) -> None:
    print(
        f"\n{'one operator for every head':44} {'cost 512':>9} {'cost 4096':>10} {'test':>8} {'plan at that cost':>18}"
    )

    def row(single: Point) -> str:
        same = [p for p in found.curve if p.cost <= single.cost * (1 + 1e-9)]
        far = found.cost(4096, single.sites)
        here = f"{min(same, key=lambda p: p.selection).test:.4f}" if same else "—"
        return f"{single.name:44} {single.cost:9.2%} {far:10.2%} {single.test:8.4f} {here:>18}"

    for single in sorted(found.baselines, key=lambda p: p.cost):
        print(row(single))


if __name__ == "__main__":
    main()
