"""`headwise plan`: the cheapest operator for every head of a model within a tolerance, and the whole trade-off."""

from __future__ import annotations

import argparse
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli import options as shared
from headwise.errors import check_extra
from headwise.output_directory import PARTIAL, OutputDirectory
from headwise.outputs import json_text

if TYPE_CHECKING:
    from headwise.models.load import LoadedModel
    from headwise.replacement import Plan

OTHERS = 12
"""Default of --texts for images and random tokens."""


def run(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if not options.json:
        check_extra("report", "the figure", "matplotlib")
    check_extra("models", "a plan", "safetensors")
    if options.report is not None:
        from headwise.examination.report.page import check_report

        check_report(options.report)
    from headwise.replacement.plans import FILES

    names, command = [*FILES, "trade-off.svg"], "headwise plan " + shlex.join(argv)
    rank, processes = shared.join_processes(options.timeout)
    if rank != 0:  # the first process has the lock, writes the plan and prints
        options.quiet = True
        _plan(options, options.out.expanduser() / PARTIAL, command, processes)
        return 0
    with OutputDirectory(options.out, command="plan", names=names, force=options.force, resume=options.resume) as out:
        plan = _plan(options, out.partial, command, processes)
        files = plan.save(out)
        if not options.json:
            from headwise.replacement.planning.trade_off_figure import draw

            with out.atomic("trade-off.svg") as path:
                draw(plan, path)
            files.append(out.path / "trade-off.svg")
    if options.report is not None:
        from headwise.examination.report.page import add_plan

        files.append(add_plan(options.report, plan.to_dict()))
    if options.json:
        print(json_text(plan.to_dict()))
    else:
        _print(plan, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = shared.Parser(
        prog="headwise plan",
        description="Choose for every head the cheapest operator that keeps the output of the model, also on kinds of "
        "text that were not tried: a quarter of the texts choose, the others measure.",
        epilog="Then: headwise rewrite MODEL --plan DIR -o NEW.  Several processes share the work: torchrun "
        "--nproc-per-node N -m headwise plan …",
    )
    shared.add_model(parser)
    each = f"24 of each kind and length, 2 or 3 for decoders, {OTHERS} images"
    shared.add_inputs(
        parser,
        texts=None,
        texts_default=each,
        kinds=("images",),
        text_help="plain text, each file a kind of its own (default: prose, code, a manual, records, numbers, other "
        "languages)",
    )
    parser.add_argument(
        "--tolerance",
        type=shared.number(0),
        default=0.05,
        metavar="T",
        help="largest drift allowed: 1 - cosine, or nats per token for language models (default: %(default)s)",
    )
    parser.add_argument(
        "--objective",
        choices=("seconds", "prefill", "decode", "memory", "multiply-adds"),
        default="seconds",
        help="quantity to minimise (default: %(default)s)",
    )
    parser.add_argument(
        "--confidence",
        type=shared.number(0.5, 0.999),
        default=0.99,
        metavar="C",
        help="share of texts, each of another new kind, that shall stay within the tolerance (default: %(default)s)",
    )
    parser.add_argument(
        "--beyond",
        choices=("exact", "refuse"),
        default="exact",
        help="what the rewritten model does with sequences longer than --length (default: %(default)s attention)",
    )
    shared.add_output(parser, default="headwise-plan")
    parser.add_argument(
        "--report", type=shared.file_path, metavar="DIR", help="add the plan to the report of examine there"
    )
    shared.add_timeout(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    shared.add_force(parser)
    shared.add_seed(parser, "of the random directions and labels")
    shared.add_json(parser, "the plan")
    return parser


def return_freed_memory() -> None:
    """Give blocks of 4 MB and more back to the system when they are freed; glibc keeps the gaps between them otherwise.

    SmolLM2-135M at 4096 tokens takes 2.4 GB instead of 3.3.  For the whole process, so only in commands.
    """
    import ctypes

    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4 << 20)


M_MMAP_THRESHOLD = -3
"""From malloc.h of glibc."""


def _plan(options: argparse.Namespace, partial: Path, command: str, processes: int) -> Plan:
    from headwise.replacement import plan

    return_freed_memory()
    loaded = shared.load(options)
    whole = _ends_before_its_predictions(loaded)
    if whole:
        loaded = shared.load(options, with_head=True)
    batches, data = _batches(options, loaded)
    shared.wait_for_processes(processes)
    made = plan(
        loaded.model,
        batches,
        tolerance=options.tolerance,
        objective=options.objective,
        beyond=options.beyond,
        confidence=options.confidence,
        seed=options.seed,
        name=loaded.name,
        provenance={"command": command, "data": data},
        partial_results=partial,
        progress=not shared.is_quiet(options),
    )
    return _for_body(made, loaded.model) if whole else made


def _ends_before_its_predictions(loaded: LoadedModel) -> bool:
    """Whether this is the body of a language model that has an output embedding of its own."""
    config = getattr(loaded.model, "config", None)
    names = () if loaded.is_factory else getattr(config, "architectures", None) or ()
    return any(name.endswith("ForCausalLM") for name in names) and not getattr(config, "tie_word_embeddings", False)


def _for_body(plan: Plan, model: Any) -> Plan:
    """The plan of a whole language model as one for its body, which `examine` and Python's AutoModel load."""
    from headwise.models.fingerprint import weights_hash

    body = getattr(model, "base_model", model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if body is model or not all(site.startswith(prefix) for site in plan.sites):
        return plan
    facts = {**plan.model, "class": type(body).__name__, "fingerprint": weights_hash(body)}
    return replace(plan, model=facts).renamed(lambda site: site.removeprefix(prefix))


def _batches(options: argparse.Namespace, loaded: LoadedModel) -> tuple[Any, dict[str, Any]]:
    """Batches, by kind if they are texts, and where they came from."""
    others = options.images is not None or options.random_tokens is not None or loaded.batches is not None
    if others:
        options.texts = options.texts or OTHERS
        inputs = shared.make_inputs(options, loaded)
        return inputs.batches, inputs.description
    from headwise.models.inputs import declared_length, tokenizer_of
    from headwise.models.load import DTYPES
    from headwise.models.run import placed
    from headwise.replacement.planning.calibration_texts import (
        calibration_texts,
        plan_lengths,
        read_kinds,
        texts_by_kind,
        texts_per_kind,
    )

    sources = calibration_texts() if options.text is None else read_kinds(options.text)
    longest = options.length or declared_length(loaded, tokenizer_of(loaded))[0]
    lengths = plan_lengths(loaded.model, longest)
    kinds = texts_by_kind(
        loaded, sources, lengths, texts=max(2, options.texts or texts_per_kind(loaded.model, longest))
    )
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    batches = {kind: [placed(batch, options.device, dtype) for batch in given] for kind, given in kinds.items()}
    return batches, {"kind": "text", "source": list(sources), "length": longest}


def _print(plan: Plan, files: list[Path]) -> None:
    from headwise.cli.tables import print_table, print_text
    from headwise.replacement.planning.prediction_bound import CONFIDENCE

    headings = (f"cost at {plan.length}", "predicted drift", "largest measured", "bound for any text")
    rows = [
        (
            ("→ " if point is plan.point else "") + f"{point.cost:.1%}",
            *(f"{value:.4f}" for value in (point.predicted, point.largest, point.bound)),
        )
        for point in plan.curve
    ]
    bold = next((i for i, point in enumerate(plan.curve) if point is plan.point), None)
    objective = plan.provenance["objective"]
    print_table(
        f"{plan.model['name']}: attention cost ({objective}) against drift", headings, rows, no_wrap=headings, bold=bold
    )
    if plan.point is not None:
        kinds = plan.point.drift
        cells = [(kind, *(f"{row[n]:.4f}" if n in row else "" for n in plan.lengths)) for kind, row in kinds.items()]
        title = f"drift of the plan for {plan.tolerance:g} ({plan.measure}), by kind of text and length"
        print_table(title, ("kind", *map(str, plan.lengths)), cells, words=("kind",))
        confidence = plan.provenance.get("confidence", CONFIDENCE)
        print_text(
            f"The bound is for one text of a kind that was not tried, at {confidence:.0%} confidence: from the "
            f"spread between and within {len(kinds)} kinds, each with a plan chosen without it. "
            f"Beyond {plan.length} tokens the rewritten model "
            f"{'runs exact attention' if plan.beyond == 'exact' else 'refuses'}."
        )
    if "cache" in plan.timing and all(site["causal"] for site in plan.model["sites"].values()):
        print_text(f"The key-value cache would keep {plan.timing['cache']:.0%} of its keys at {plan.length}.")
    for n, row in plan.timing.get("seconds", {}).items():
        token = plan.timing.get("token", {}).get(n)
        token = "" if token is None else f", and {token['planned'] / token['exact']:.0%} for one more token"
        print_text(f"Attention takes {row['planned'] / row['exact']:.0%} of the time of exact attention at {n}{token}.")
    for site, why in plan.skipped.items():
        print(f"skipped: {site}: {why}")
    for file in files:
        print(file)
