"""A plan, how long it took to make, and its drift on kinds of text that it was and was not chosen by.

    python -m benchmarks.rewrite minilm --length 512 --tolerance 0.05
    python -m benchmarks.rewrite smollm2 --length 4096 --tolerance 0.02 --objective memory [--partial DIR]

Four kinds are those of the calibration set, in pieces that the plan has not seen; four (C and C++ headers, JavaScript,
licences, from the packages of this environment) are not in it.  Drift of language models is in nats per token: the
divergence KL(before || after), and the change of the loss.  --partial stores results, so that an interrupted run can
resume.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch

import headwise
from headwise.models.load import LoadedModel, load_model
from headwise.replacement import Plan, plan
from headwise.replacement.planning.calibration_texts import (
    calibration_texts,
    model_is_causal,
    plan_lengths,
    texts_by_kind,
    texts_per_kind,
)
from headwise.replacement.planning.drift import answer_for
from headwise.replacement.planning.timing import OBJECTIVES

UNSEEN = ("c", "c++", "javascript", "licences")


def unseen_kinds() -> dict[str, str]:
    """Texts of kinds that are not in the calibration set, from installed packages."""
    c = Path(numpy.get_include()) / "numpy"
    cpp = Path(torch.__file__).parent / "include" / "ATen"
    js = Path(matplotlib.__file__).parent / "backends" / "web_backend" / "js"
    found: list[str] = []
    for name in ("numpy", "torch", "transformers", "matplotlib", "scipy", "safetensors"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name.startswith("LICENSE")]
    files = {
        "c": sorted(c.glob("n*.h")),
        "c++": [cpp / name for name in ("TensorIterator.h", "Dispatch.h", "Context.h")],
        "javascript": [js / "mpl.js", js / "nbagg_mpl.js"],
        "licences": [Path(file) for file in sorted(found)],
    }
    return {kind: "\n\n".join(x.read_text(errors="replace")[:400_000] for x in given) for kind, given in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="minilm")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--objective", choices=OBJECTIVES, default="seconds")
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--texts", type=int, help="of each kind and length (default: as `headwise plan`)")
    parser.add_argument("--partial", type=Path)
    options = parser.parse_args()
    loaded = load_model(options.model)
    lengths = plan_lengths(loaded.model, options.length)
    start, cpu = time.perf_counter(), time.process_time()
    batches = texts_by_kind(loaded, calibration_texts(), lengths, texts=options.texts or texts_per_kind(loaded.model))
    made = plan(
        loaded.model,
        batches,
        tolerance=options.tolerance,
        objective=options.objective,
        evaluations=options.evaluations,
        name=loaded.name,
        partial_results=options.partial,
        progress=_progress(),
    )
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    count = sum(map(len, batches.values()))
    print(
        f"{loaded.name}, {options.objective}, lengths {made.lengths}, {count} texts of {len(batches)} kinds: planned in"
    )
    print(f"{seconds:.0f} s ({cpu:.0f} processor seconds, {torch.get_num_threads()} threads), {memory:.1f} GB at most")
    _curve(made)
    _kinds(loaded, made)


def _progress() -> Any:
    last = [time.perf_counter()]

    def progress(what: str, done: int, total: int) -> None:
        if time.perf_counter() - last[0] > 30:
            last[0] = time.perf_counter()
            print(f"{what}: {done / total:.0%}", file=sys.stderr, flush=True)

    return progress


def _curve(made: Plan) -> None:
    print(f"\n{'cost':>8} {'predicted':>10} {'mean':>8} {'largest':>8} {'bound':>8}   drift on the measuring texts")
    for point in made.curve:
        values = [x for row in point.drift.values() for x in row.values()]
        mark = "→" if point is made.point else " "
        mean = sum(values) / len(values)
        print(f"{mark}{point.cost:7.1%} {point.predicted:10.4f} {mean:8.4f} {point.largest:8.4f} {point.bound:8.4f}")
    print(
        f"cache kept at {made.length}: {made.timing['cache']:.1%}; exact below {sorted(set(made.exact_below.values()))}"
    )
    for n, row in made.timing["seconds"].items():
        print(f"attention at {n:>5}: {row['planned'] / row['exact']:.2f} of the time of exact attention")


def _kinds(loaded: LoadedModel, made: Plan) -> None:
    """Drift of the rewritten model on fresh pieces of known kinds, and on kinds not tried."""
    # replaced heads at every length, also where the plan would run exact attention because that is faster here
    new, _ = headwise.rewrite(loaded.model, replace(made, exact_below={}))
    known = {kind: text for kind, text in calibration_texts().items() if kind != "languages"}
    sources = {**known, **unseen_kinds()}
    causal = model_is_causal(loaded.model)
    # plans see pieces at 0, 1 or at 0, 1/3, 2/3, 1 of a text; these are at 1/2, or at 1/6, 1/2, 5/6
    pieces, fresh = (3, (1,)) if causal else (7, (1, 3, 5))
    batches = texts_by_kind(loaded, sources, plan_lengths(loaded.model, made.length), texts=pieces)
    answer = answer_for(loaded.model, batches["prose"][0], causal=causal)
    print(f"\n{'drift of the rewritten model':30}" + "".join(f"{n:>18}" for n in made.lengths))
    every: list[float] = []
    with torch.no_grad():
        for kind, given in batches.items():
            rows: dict[int, list[list[float]]] = {n: [] for n in made.lengths}
            for batch in [batch for i, batch in enumerate(given) if i % pieces in fresh]:
                length = batch["input_ids"].shape[1]
                states = [answer.run(model.eval(), batch) for model in (loaded.model, new)]
                drift = answer.drift(loaded.model, batch, *states)
                for n in [n for n in made.lengths if n == length or (answer.by_position and n < length)] or [length]:
                    means = drift[..., :n].mean((1, 2)).tolist()
                    every.append(max(means))
                    rows.setdefault(n, []).append(means)
            # the largest of each measure over texts
            cells = {n: " ".join(f"{max(x):+.4f}" for x in zip(*row, strict=True)) for n, row in rows.items()}
            print(f"{kind + (' (not tried)' if kind in UNSEEN else ''):30}" + "".join(f"{cells[n]:>18}" for n in cells))
    print(f"{len(batches)} kinds, {len(fresh)} texts of each and length, the largest shown")
    largest, above = max(every), sum(x > made.tolerance for x in every)
    print(f"{above} of {len(every)} texts are above the promise")
    print(f"largest {largest:.4f}, promised {made.tolerance:g}: {'kept' if largest <= made.tolerance else 'BROKEN'}")


if __name__ == "__main__":
    main()
