"""Cost and drift of per-head plans for MiniLM, beside one operator for every head.

    python -m benchmarks.rewrite [--quick] [--text FILE …] [--transfer STEPS] [--partial DIR]

Replacements are fitted on one part of the text and chosen by a second; every drift printed is from a third.  Costs are
multiply-adds, masked entries of blocks included, relative to softmax attention.  The entry of a baseline is the best of
its settings that costs at most as much as the plan.  --partial stores results, so that an interrupted run can resume.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.replacement import Effort, Plan, PlanPoint, plan
from headwise.replacement.planning.make_plan import QUICK

TOLERANCES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2)
BASELINES = {
    "projection": ("projected",),
    "window + leading": ("window",),
    "efficient": ("efficient", "factored"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--text", nargs="+", type=Path)
    parser.add_argument("--texts", type=int, default=28)
    parser.add_argument("--transfer", type=int, default=0, metavar="STEPS", help="train the chosen operators further")
    parser.add_argument("--partial", type=Path)
    options = parser.parse_args()
    loaded = load_model(None)
    batches = list(text_input(loaded, options.text, length=512, texts=options.texts).batches)
    start = time.perf_counter()
    effort = QUICK if options.quick else Effort()
    result = plan(
        loaded.model,
        batches,
        tolerance=0.05,
        effort=effort,
        transfer=options.transfer,
        name=loaded.name,
        partial_results=options.partial,
    )
    print(f"{loaded.name}, {len(batches)} texts of 512 tokens, split {result.provenance['texts']}; ", end="")
    print(f"{time.perf_counter() - start:.0f} s for this run\n")
    _curve(result)
    _singles(result)
    ratio = result.timing["ratio"]
    print(f"\ntolerance 0.05: attention takes {ratio:.2f} of the time of softmax attention at 512 on this machine")


def _curve(result: Plan) -> None:
    names = "".join(f"{name:>17}" for name in BASELINES)
    print(f"{'tolerance':>9} {'cost 512':>9} {'cost 4096':>10} {'selection':>10} {'test':>8}{names}   (test drift)")
    worse = 0
    for tolerance in TOLERANCES:
        point = result.at(tolerance).point
        assert point is not None
        others = [_best(result, kinds, point.cost) for kinds in BASELINES.values()]
        worse += sum(other is not None and other < (point.test or 0.0) for other in others)
        cells = "".join(f"{'—' if other is None else f'{other:.4f}':>17}" for other in others)
        far = result.cost(4096, point.sites)
        print(f"{tolerance:9.3f} {point.cost:9.1%} {far:10.2%} {point.selection:10.4f} {point.test:8.4f}{cells}")
    print(f"\na baseline has less drift at no more cost in {worse} of {len(TOLERANCES) * len(BASELINES)} entries")


def _best(result: Plan, kinds: tuple[str, ...], cost: float) -> float | None:
    fit = [p.test for p in result.baselines if p.name.split()[0] in kinds and p.cost <= cost * (1 + 1e-9)]
    return min((drift for drift in fit if drift is not None), default=None)


def _singles(result: Plan) -> None:
    print(
        f"\n{'one operator for every head':44} {'cost 512':>9} {'cost 4096':>10} {'test':>8} {'plan at that cost':>18}"
    )

    def row(single: PlanPoint) -> str:
        same = [p for p in result.curve if p.cost <= single.cost * (1 + 1e-9)]
        far = result.cost(4096, single.sites)
        here = f"{min(same, key=lambda p: p.selection).test:.4f}" if same else "—"
        return f"{single.name:44} {single.cost:9.2%} {far:10.2%} {single.test:8.4f} {here:>18}"

    for single in sorted(result.baselines, key=lambda p: p.cost):
        print(row(single))


if __name__ == "__main__":
    main()
