"""A plan, how long it took to make, and its drift on kinds of text that it was and was not chosen by.

    python -m benchmarks.rewrite minilm --length 512 --tolerance 0.05
    python -m benchmarks.rewrite smollm2 --length 4096 --tolerance 0.02 --objective memory --partial DIR --save PLAN
    python -m benchmarks.rewrite smollm2 --plan PLAN [--partial DIR] [--lengths 1024 8192]     # the check alone

Five kinds are those of the calibration set, in pieces that the plan has not seen; four (C and C++ headers, JavaScript,
licences, from the packages of this environment) are not in it.  Drift of language models is in nats per token: the
divergence KL(before || after), and the change of the loss.  --partial stores results, so that an interrupted run can
resume; --save writes the plan for other commands.  --lengths checks a language model at lengths other than the plan's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import resource
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch

import headwise
from headwise.cli.plan_command import return_freed_memory
from headwise.models.fingerprint import run_key
from headwise.models.inputs import special_tokens, tokenizer_of
from headwise.models.load import LoadedModel, load_model
from headwise.replacement import Plan, plan
from headwise.replacement.planning.calibration_texts import (
    calibration_texts,
    model_is_causal,
    numbers,
    piece_starts,
    plan_lengths,
    records,
    texts_by_kind,
    texts_per_kind,
)
from headwise.replacement.planning.drift import answer_for
from headwise.replacement.planning.prediction_bound import CONFIDENCE
from headwise.replacement.planning.saved_progress import PlanProgress
from headwise.replacement.planning.timing import OBJECTIVES

UNSEEN = ("c", "c++", "javascript", "licences")

MODULES = ("typing", "inspect", "subprocess", "datetime", "ast", "pathlib")
"""Of Python's library; the calibration set has others."""


def known_kinds() -> dict[str, str]:
    """Further texts of kinds that are in the calibration set; prose and manual are the whole sources."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = calibration_texts()
    code = "\n\n".join((library / f"{name}.py").read_text() for name in MODULES)
    return {
        "prose": sources["prose"],
        "manual": sources["manual"],
        "code": code,
        "records": records(1600, seed=1),
        "numbers": numbers(3000, seed=1),
    }


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
    parser.add_argument("--confidence", type=float, default=CONFIDENCE)
    parser.add_argument("--texts", type=int, help="of each kind and length (default: as `headwise plan`)")
    parser.add_argument("--checks", type=int, help="texts of each kind and length that check (default: 12, decoders 1)")
    parser.add_argument("--lengths", type=int, nargs="+", help="check the beginnings of so many tokens (decoders)")
    parser.add_argument("--partial", type=Path)
    parser.add_argument("--plan", type=Path, help="check this plan instead of making one")
    parser.add_argument("--save", type=Path, help="write the plan into this directory")
    options = parser.parse_args()
    return_freed_memory()
    loaded = load_model(options.model)
    saved = None if options.plan is None else Plan.load(options.plan)
    texts = options.texts or texts_per_kind(loaded.model, options.length if saved is None else saved.length)
    made = saved or _planned(loaded, texts, options)
    _curve(made)
    if options.save is not None:
        made.save(options.save, force=True)
    cpu = time.process_time()
    lengths = made.lengths
    if options.lengths and model_is_causal(loaded.model):
        lengths = tuple(sorted(n for n in options.lengths if n <= made.length))
    checks = options.checks or (1 if model_is_causal(loaded.model) else 12)
    _check(loaded, made, texts, lengths, checks, options.partial)
    _spent("checked", cpu)


def _planned(loaded: LoadedModel, texts: int, options: argparse.Namespace) -> Plan:
    lengths = plan_lengths(loaded.model, options.length)
    start, cpu = time.perf_counter(), time.process_time()
    batches = texts_by_kind(loaded, calibration_texts(), lengths, texts=texts)
    made = plan(
        loaded.model,
        batches,
        tolerance=options.tolerance,
        objective=options.objective,
        evaluations=options.evaluations,
        confidence=options.confidence,
        name=loaded.name,
        partial_results=None if options.partial is None else options.partial / "plan",
        progress=_progress(),
    )
    count = sum(map(len, batches.values()))
    print(f"{loaded.name}, {options.objective}, lengths {made.lengths}, {count} texts of {len(batches)} kinds:")
    _spent(f"planned in {time.perf_counter() - start:.0f} s", cpu)
    return made


def _spent(what: str, cpu: float) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    seconds = time.process_time() - cpu
    print(f"{what}: {seconds:.0f} processor seconds, {torch.get_num_threads()} threads, {memory:.1f} GB at most")


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
        token = made.timing.get("token", {}).get(n)
        token = "" if token is None else f", {token['planned'] / token['exact']:.2f} for one more token"
        print(f"attention at {n:>5}: {row['planned'] / row['exact']:.2f} of the time of exact attention{token}")


def _fresh(loaded: LoadedModel, made: Plan, planned: int, checks: int) -> dict[str, list[torch.Tensor]]:
    """{kind: texts}, up to `checks` of each length that do not overlap with those of the plan or one another."""
    tokenizer = tokenizer_of(loaded)
    before, after = special_tokens(tokenizer)
    special, lengths = len(before) + len(after), plan_lengths(loaded.model, made.length)
    found: dict[str, list[torch.Tensor]] = {}
    for kind, content in {**known_kinds(), **unseen_kinds()}.items():
        ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        taken = [
            (start, start + n - special)
            for n in (lengths if kind in ("prose", "manual") else ())
            for start in piece_starts(len(ids), min(n - special, int(len(ids) / 1.8)), planned)
        ]
        for n in lengths:
            size = n - special
            free, start = [], 0
            while start + size <= len(ids):
                hit = [stop for first, stop in taken if first < start + size and start < stop]
                if hit:
                    start = max(hit)
                else:
                    free.append(start)
                    start += size
            some = free if len(free) <= checks else [free[i * len(free) // checks] for i in range(checks)]
            rows = [torch.tensor([[*before, *ids[start : start + size], *after]]) for start in some]
            found.setdefault(kind, []).extend(rows)
    return found


def _check(
    loaded: LoadedModel, made: Plan, planned: int, lengths: tuple[int, ...], checks: int, partial: Path | None
) -> None:
    """Drift of the rewritten model on fresh texts of known kinds, and on kinds not tried."""
    # replaced heads at every length, also where the plan would run exact attention because that is faster here
    new, _ = headwise.rewrite(loaded.model, replace(made, exact_below={}))
    answer = answer_for(loaded.model, {"input_ids": torch.ones(1, 8)}, causal=model_is_causal(loaded.model))
    facts = made.to_dict()
    settings = {"sites": facts["sites"], "lengths": lengths, "checks": checks, "planned": planned}
    key = run_key(str(made.model["fingerprint"]), settings)
    store = PlanProgress(None if partial is None else partial / f"check-{key[:12]}", key)
    print(f"\n{'drift of the rewritten model':30}" + "".join(f"{n:>26}" for n in lengths))
    every: dict[int, list[float]] = {n: [] for n in lengths}
    missing = []
    for kind, texts in _fresh(loaded, made, planned, checks).items():
        rows: dict[int, list[list[float]]] = {}
        for index, ids in enumerate(texts):
            rows_of = store.stored(f"{kind} {index}", lambda ids=ids: _drift(loaded, new, answer, lengths, ids))
            for n, means in rows_of.items():
                rows.setdefault(n, []).append(means)
        if not rows:
            missing.append(kind)
            continue
        for n, row in rows.items():
            every[n] += [max(means) for means in row]
        # the largest of each measure over texts, and how many texts
        cells = {
            n: " ".join(f"{max(x):+.4f}" for x in zip(*row, strict=True)) + f" ({len(row)})" for n, row in rows.items()
        }
        label = kind + (" (not tried)" if kind in UNSEEN else "")
        print(f"{label:30}" + "".join(f"{cells.get(n, ''):>26}" for n in lengths), flush=True)
    if missing:
        print(f"no text is left that the plan has not seen: {', '.join(missing)}")
    for n, values in every.items():
        above = sum(x > made.tolerance for x in values)
        print(f"at {n}: {len(values) - above} of {len(values)} texts within the promise, largest {max(values):.4f}")
    flat = [x for values in every.values() for x in values]
    above = sum(x > made.tolerance for x in flat)
    bound = "" if made.point is None else f", bound {made.point.bound:.4f}"
    print(
        f"all: {len(flat) - above} of {len(flat)} texts within {made.tolerance:g}, largest {max(flat):.4f}{bound}: "
        + ("kept" if not above else f"BROKEN for {above / len(flat):.1%}")
    )


@torch.no_grad()
def _drift(
    loaded: LoadedModel, new: Any, answer: Any, lengths: Sequence[int], ids: torch.Tensor
) -> dict[int, list[float]]:
    """{length: mean of each measure}; the beginnings of a text of a language model are texts too."""
    batch = {"input_ids": ids}
    drift = answer.drift(loaded.model, batch, *(answer.run(model.eval(), batch) for model in (loaded.model, new)))
    length = ids.shape[1]
    taken = [n for n in lengths if n == length or (answer.by_position and n < length)]
    return {n: drift[..., :n].mean((1, 2)).tolist() for n in taken}


if __name__ == "__main__":
    main()
